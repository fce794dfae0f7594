"""Training programs over `internvl_pack`: arguments, trainer, fine-tuning and a tiny checkpoint to try them on."""

import logging
from importlib.util import find_spec

if find_spec("torchao"):  # transformers imports it, and it tells of each of its own kernels that does not load
    for _name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(_name).setLevel(logging.ERROR)
