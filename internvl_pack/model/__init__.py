"""The model side: an unmodified Hugging Face model that trains on packs. See packed.py and docs/attention.md."""
