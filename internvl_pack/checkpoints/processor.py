"""The files by which `AutoProcessor` prepares images and chats for what was trained: the base's own, or made.

preprocessor_config.json         how an image becomes tiles
video_preprocessor_config.json   how a frame does
processor_config.json            tokens of a tile, and the processor's class
chat_template.jinja              the chat format, with places for images
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..encode.config import EncodeConfig
from ..encode.families import family_of
from ..encode.formats import make_template
from .internvl_format import is_internvl_format
from .internvl_format_files import config_of
from .tokenizers import name_image_tokens

PREPROCESSOR, VIDEO, PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
# Of pictures and videos, in files of one age or another.
BOUNDS = (
    *("size", "min_pixels", "max_pixels", "cap_pixels_per_frame", "max_video_tokens"),
    *("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames"),
)
CHAT_TEMPLATE, OLDER_CHAT_TEMPLATE = "chat_template.jinja", "chat_template.json"
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_BICUBIC = 3  # PIL's number


def processor_files(base: str | None) -> list[Path]:
    """A native checkpoint's processor files; none of another model, or where it has none.

    Args:
        base: folder or hub name.
    """
    from transformers.utils import cached_file

    if base is None or is_internvl_format(config_of(base)):
        return []
    names = (PREPROCESSOR, VIDEO, PROCESSOR, CHAT_TEMPLATE, OLDER_CHAT_TEMPLATE)
    found = [cached_file(base, name, _raise_exceptions_for_missing_entries=False) for name in names]
    files = [Path(path) for path in found if path is not None]
    return files if {PREPROCESSOR, PROCESSOR} & {path.name for path in files} else []


def save_processor(folder: str | Path, base: str | None, tokenizer: Any, encode: EncodeConfig, vocab_size: int) -> None:
    """Add the processor files to a folder to which tokenizer and model have been saved.

    Args:
        base: what the model was loaded from; its files are copied where it has them.
        tokenizer: as it was saved there.
        encode: how the data was encoded; files that are made say the same.
        vocab_size: rows of the model's embeddings.
    """
    folder = Path(folder)
    files = processor_files(base)
    for path in files:
        if not (target := folder / path.name).exists() or not target.samefile(path):
            shutil.copyfile(path, target)
    of_family = family_of(encode.family).processor_files(encode)
    if of_family is not None:
        for name, content in of_family.items():
            path = folder / name
            copied = any(file.name == name for file in files)
            kept = json.loads(path.read_text(encoding="utf-8")) if copied else {}
            if "size" in content:  # as in training, whatever the base says
                kept = {key: value for key, value in kept.items() if key not in BOUNDS}
            path.write_text(json.dumps(content | kept, indent=2) + "\n", encoding="utf-8")
        return
    if files:
        return
    name_image_tokens(folder, tokenizer, vocab_size)
    for name, content in made_files(encode).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    jinja = getattr(make_template(encode.conv_style, tokenizer), "jinja", None)
    if jinja is not None:  # other formats leave the tokenizer's own
        (folder / CHAT_TEMPLATE).write_text(jinja(), encoding="utf-8")


def made_files(encode: EncodeConfig) -> dict[str, dict[str, Any]]:
    """Processor files by name, for tiles cut as `encode` says. A thumbnail beside several tiles is always added."""
    tiles = (encode.min_dynamic_patch, encode.max_dynamic_patch) if encode.dynamic_image_size else (1, 1)
    common = {
        "processor_class": "InternVLProcessor",
        "do_resize": True,
        "size": {"height": encode.image_size, "width": encode.image_size},
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        **_IMAGENET,
    }
    patches = {"crop_to_patches": True, "min_patches": tiles[0], "max_patches": tiles[1]}
    return {
        PREPROCESSOR: {"image_processor_type": "GotOcr2ImageProcessor", **common, **patches},
        VIDEO: {"video_processor_type": "InternVLVideoProcessor", **common},
        PROCESSOR: {"processor_class": "InternVLProcessor", "image_seq_length": encode.tokens_per_tile},
    }
