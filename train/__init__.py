"""Training programs over `internvl_pack`: arguments, trainer, fine-tuning and a tiny checkpoint to try them on."""
