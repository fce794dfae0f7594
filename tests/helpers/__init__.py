"""What tests share: samples, tiny models, references and workers; no tests."""
