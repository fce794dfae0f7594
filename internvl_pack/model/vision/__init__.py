"""What makes vision towers faster, or drops InternVL's paths; without any of it a tower is transformers' own.

    picture_attention.py attention in towers of native resolution
    tile_attention.py    attention of tiles by the language model's kernel, where that is faster on them
    fused.py             the layers with their gradients written out (fused_ops.py; on a GPU fused_triton.py)
    patches.py           the patch embedding as a matrix product
    drop_path.py         stochastic depth

The rest of the package reaches them through the names below alone.
"""

from .drop_path import add_drop_path
from .fused import FusedTower, fuse_tower
from .patches import compile_patches, use_patch_products
from .picture_attention import register_picture_attention
from .tile_attention import use_tile_attention

__all__ = [
    "FusedTower",
    "add_drop_path",
    "compile_patches",
    "fuse_tower",
    "register_picture_attention",
    "use_patch_products",
    "use_tile_attention",
]
