"""Tiny models and tokenizers with random weights: for the quickstart, tests and trials."""
