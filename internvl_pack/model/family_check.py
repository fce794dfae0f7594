"""`--family_check FAMILY`: a model of an unknown kind, tried by the rules of a known family before it is trained.

Its config is shrunken to a few layers of small width, a model of random weights is made of it, and parity.py decides:
a pack against the model's own forward, with the inputs of the checkpoint's own image processor. The sizes that this
processor gives pictures must be the family's, too. Takes some seconds on the CPU, in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoints.encoding import encode_config, served_by
from ..checkpoints.internvl_format_files import without_zero3
from ..encode.families import make_family
from ..errors import SampleError, UserError, first_line
from .parity import PLANS, Parity, make_segment, measure_parity, pack_on_cpu, perturbed, pictures
from .towers import TOWERS, find_tower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

LAYERS = 4  # of each tower, at most
HEADS, VISION_HEADS = 4, 2
WIDTH_OF_A_HEAD = 64  # where the config gives the heads' own width apart
VOCABULARY = 512
EXPERTS, ACTIVE_EXPERTS = 4, 2
MAX_PARAMETERS = 200_000_000  # of the shrunken model
# Of pictures whose grids are compared: small ones, which are enlarged, long ones, and one of many pixels.
SIZES = [(20, 30), (64, 64), (97, 330), (301, 150), (640, 480), (31, 900), (1500, 1200)]
TILE_PLANS = {
    "two images": [("text", 5), ("image", 2), ("text", 3), ("image", 1), ("text", 4), ("answer", 9)],
    "image first": [("image", 1), ("text", 3), ("answer", 7)],
    **{name: plan for name, plan in PLANS.items() if all(kind != "image" for kind, _ in plan)},
}


def check_by_parity(path: str | Path, family: str, tokenizer: Any) -> None:
    """Log how exactly a checkpoint's model is packed by the rules of `family`.

    Raises:
        UserError: it is not, within rounding; or the model cannot be tried.
    """
    from transformers import AutoConfig

    check_name(family)
    config = AutoConfig.from_pretrained(path)
    what = f"--family_check {family}: {config.model_type!r}"
    if not hasattr(config, "vision_config"):
        raise UserError(f"{what} has no vision tower: leave the option out")
    try:
        with without_zero3():
            found = _try(path, config, family, tokenizer)
    except UserError:
        raise
    except Exception as error:  # code written for another model, on this one
        raise UserError(
            f"{what} is not built as that family is ({type(error).__name__}: {first_line(error)}): try another of "
            f"{_names()}"
        ) from error
    if not found.holds:
        raise UserError(
            f"{what}, packed by the rules of that family, differs from its own forward: {found}: it would be trained "
            "otherwise than it is used"
        )
    logger.info("family check: %r by the rules of %r: %s", config.model_type, family, found)


def check_name(family: str | None) -> None:
    """Refuse a name of no family.

    Raises:
        UserError: names those that there are.
    """
    if family is not None and find_tower(family) is None:
        raise UserError(f"--family_check {family!r} is unknown: use one of {_names()}")


def _names() -> str:
    return ", ".join(sorted(TOWERS))


def _try(path: str | Path, config: PreTrainedConfig, family: str, tokenizer: Any) -> Parity:
    packed = pack_on_cpu(perturbed(small_model(config)), family=family)
    tower = packed.tower
    assert tower is not None, "as of any model with a vision config"
    processor = _image_processor(path, family)
    if tower.grid_positions:
        _check_grids(config, family, processor, tokenizer)
    prepare = partial(processor, do_resize=False, input_data_format="channels_last", return_tensors="pt")
    image_token_id = packed.config.image_token_id
    layout = {"image_token_id": image_token_id, "tokens_per_tile": tower.tokens_per_tile, "side": tower.tile_size[0]}
    layout["around"] = ([0], [1])  # pictures side by side would be one to some models
    plans = PLANS if tower.grid_positions else TILE_PLANS
    segments = [make_segment(plan, seed=seed, **layout) for seed, plan in enumerate(plans.values())]
    collation = {"image_size": tower.tile_size[0], "image_token_id": image_token_id}
    return measure_parity(
        packed, segments, lambda s: prepare(pictures(s)), grid_positions=tower.grid_positions, **collation
    )


def _image_processor(path: str | Path, family: str) -> Any:
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--family_check {family}: {path} has no image processor to compare with (preprocessor_config.json): copy "
            "it there from the published checkpoint"
        ) from error
    if hasattr(processor, "crop_to_patches"):
        processor.crop_to_patches = False  # it gets tiles
    return processor


def _check_grids(config: PreTrainedConfig, family: str, processor: Any, tokenizer: Any) -> None:
    """Compare the grids of pictures of a few sizes with the processor's.

    Raises:
        UserError: they differ.
    """
    encode = encode_config({}, served_by(config.to_dict(), family))
    rules = make_family(encode, tokenizer)
    files = rules.processor_files(encode)
    assert files is not None, "as of any family of native resolution"
    bounds = files["preprocessor_config.json"]["size"]
    for width, height in SIZES:
        picture = np.zeros((height, width, 3), dtype=np.uint8)
        try:
            grid = rules.plan((width, height), 1, 1)
        except SampleError:
            continue
        made = processor([picture], size=bounds, input_data_format="channels_last", return_tensors="pt")
        found = (made["image_grid_thw"][0, 1:] // 2).tolist()
        if found != [grid.rows, grid.columns]:
            raise UserError(
                f"--family_check {family}: {config.model_type!r} makes {found[0]} x {found[1]} tokens of a picture of "
                f"{width} x {height} pixels, that family {grid.rows} x {grid.columns}"
            )


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of random weights after a shrunken config, float32.

    Raises:
        UserError: what the config is made of is not known to be shrunken, and the model is too large to try.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    small = shrunken(config)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind(small).parameters())
    if parameters > MAX_PARAMETERS:
        raise UserError(
            f"--family_check: {config.model_type!r} has {parameters:,} parameters shrunken: too many to try"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(small)


def shrunken(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with few layers, heads, experts and tokens; kinds of layers and the widths of heads stay."""
    content = config.to_dict()
    text = content.get("text_config") or content
    width = _shrink_decoder(text)
    if vision := content.get("vision_config"):
        _shrink_tower(vision, width)
    numbers: dict[int, int] = {}
    for part in filter(None, (content, content.get("text_config"), vision)):
        _renumber(part, numbers)
    return type(config).from_dict(content)


def _shrink_decoder(text: dict[str, Any]) -> int:
    """Returns its width."""
    _shrink_layers(text, "num_hidden_layers")
    heads, shared = text["num_attention_heads"], text.get("num_key_value_heads")
    text["num_attention_heads"] = few = min(HEADS, heads)
    if shared:
        text["num_key_value_heads"] = few if shared == heads else min(2, shared)
    width = few * (WIDTH_OF_A_HEAD if text.get("head_dim") else text["hidden_size"] // heads)
    text["hidden_size"] = width
    _shrink_products(text, width)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if text.get(name):
            text[name] = min(EXPERTS, text[name])
    if text.get("num_experts_per_tok"):
        text["num_experts_per_tok"] = min(ACTIVE_EXPERTS, text["num_experts_per_tok"])
    text |= {name: 1 for name in ("n_group", "topk_group") if text.get(name)}
    return width


def _shrink_tower(vision: dict[str, Any], decoder_width: int) -> None:
    _shrink_layers(vision, "depth" if "depth" in vision else "num_hidden_layers")
    count = "num_heads" if "num_heads" in vision else "num_attention_heads"
    own = "embed_dim" if "embed_dim" in vision else "hidden_size"
    heads = vision[count]
    vision[count] = min(VISION_HEADS, heads)
    width = vision[count] * (vision[own] // heads)
    vision |= {name: decoder_width for name in ("hidden_size", "out_hidden_size") if name in vision}
    vision[own] = width
    _shrink_products(vision, width)


def _shrink_layers(part: dict[str, Any], count: str) -> None:
    """Also lists by layer: listed layer numbers become every second one, of kinds of layers all stay."""
    layers = part[count]
    part[count] = few = min(LAYERS, layers)
    for name, value in part.items():
        if not isinstance(value, list) or not value:
            continue
        if name.endswith(("indexes", "indices")):
            part[name] = list(range(1, few, 2))[: len(value)]
        elif len(value) == layers:
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
            part[name] = (kinds * few)[:few]


def _shrink_products(part: dict[str, Any], width: int) -> None:
    """The inner widths; and nothing is dropped at random, which no two forwards would do alike."""
    for name, value in part.items():
        if name.endswith("intermediate_size") and isinstance(value, int):
            part[name] = min(value, 2 * width)
        elif "drop" in name and isinstance(value, float):
            part[name] = 0.0


def _renumber(part: dict[str, Any], numbers: dict[int, int]) -> None:
    """Special tokens to the last ids of a small vocabulary; the same ones stay the same."""
    if part.get("vocab_size"):
        part["vocab_size"] = VOCABULARY
    for name, value in part.items():
        if name.endswith(("token_id", "token_index")) and value is not None:
            if isinstance(value, Mapping | list):
                part[name] = None
            elif value >= 0:
                part[name] = numbers.setdefault(value, VOCABULARY - 1 - len(numbers))
