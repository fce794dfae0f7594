"""Checkpoints: InternVL's own format and the native one, weight files, tokenizers, LoRA adapters."""
