"""Folders with `InternVLChatModel`: loaded into the native model, written from it, and converted without one.

A folder's Python files are copied where the format is written again; they are never imported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError, first_line, naming
from . import internvl_format
from .internvl_format import Weight, published
from .weight_files import SHARD_SIZE, LazyWeights, indexed_names, named, write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HEAD, _EMBEDDINGS = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
# Endings of files that belong to the weights, or to a training run, and not to the model.
_NOT_EXTRA = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", ".jsonl", ".log")
_RUN_FILES = frozenset({"config.json", "trainer_state.json", "packing_state.json", "train_summary.json", "latest"})


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: no config.json there ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    return config


def config_of(source: str | Path | None) -> dict[str, Any]:
    """config.json of a folder or hub name; empty where there is none, which is said better where it is loaded.

    Raises:
        UserError: `source` is no folder and cannot be a hub name, or the folder that it would lie in is there: a
            mistyped path.
    """
    from transformers import PreTrainedConfig

    if source is None:
        return {}
    if not Path(source).is_dir() and not _HUB_NAME.fullmatch(str(source)):
        raise UserError(f"{source}: no such folder, and no hub name, which is owner/name")
    parent = Path(source).parent
    if not Path(source).is_dir() and parent != Path() and parent.is_dir():
        raise UserError(f"{source}: no such folder in {parent.resolve()}")
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        config, _ = PreTrainedConfig.get_config_dict(source)
    return config


def chat_style(given: str | None, config: Mapping[str, Any]) -> str:
    """The chat format of a run: the user's, else the one in the config of a checkpoint in InternVL's format, else its
    family's.

    Raises:
        UserError: the checkpoint's is not known here.
    """
    from ..encode.families import family_of
    from ..encode.formats import known_templates

    default = family_of(config.get("model_type")).CONV_STYLE
    template = internvl_format.template_of(config)
    if template is None:
        return given or default
    if given is not None:
        if given != template:
            logger.warning(
                "--conv_style %s: the checkpoint was trained with %s (template in its config)", given, template
            )
        return given
    if template not in known_templates():
        raise UserError(
            f"--conv_style is missing: the checkpoint was trained with {template!r} (template in its config), which is "
            f"not known here: choose one of {', '.join(known_templates())}"
        )
    return template


def local_folder(name: str | Path) -> Path:
    """A checkpoint's folder; that of a hub name is downloaded, or found in the cache where the hub is off.

    Raises:
        UserError: neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        described = Path(snapshot_download(str(name), allow_patterns=["*.json"]))
        internvl_format.check_names(indexed_names(described))
        return Path(snapshot_download(str(name), ignore_patterns=["*.md", "*.jpg", "*.png", "examples/*"]))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # the hub's and the network's errors are of many kinds
        raise UserError(f"{name}: no such folder, and not to be had from the hub: {first_line(error)}") from error


# --- loading --------------------------------------------------------------------------------------


def load_internvl_format(
    folder: str | Path, image_token_id: int, dtype: torch.dtype, attn_implementation: Any = None
) -> PreTrainedModel:
    """A native model with the weights of an InternVLChatModel; under ZeRO-3 its weights are partitioned.

    The files are mapped and each tensor is copied when its place in the model is filled, so that the weights are in
    memory once. Names and shapes are checked before.

    Raises:
        UserError: what the native model cannot compute, or weights that are missing, unknown or of another shape.
    """
    from transformers import InternVLForConditionalGeneration

    config, stored, plan = _opened(folder, image_token_id)
    model = _filled(InternVLForConditionalGeneration, config, _state(stored, plan, dtype), dtype, attn_implementation)
    _take_generation_config(model, folder)
    return model


def load_internvl_vision(folder: str | Path, dtype: torch.dtype, attn_implementation: Any = None) -> PreTrainedModel:
    """A native vision tower with the weights of an `InternVisionModel`, or of that within an `InternVLChatModel`.

    Raises:
        UserError: as `load_internvl_format`.
    """
    from transformers import InternVLVisionModel

    content = read_config(folder)
    prefix = "" if content.get("model_type") == internvl_format.VISION_TYPE else "vision_model."
    with naming(f"{folder}: "):
        config = internvl_format.native_vision_config(content.get("vision_config", {}) if prefix else content)
    stored = LazyWeights(folder, prefix)
    with without_zero3(), torch.device("meta"):
        shapes = {f"vision_tower.{name}": t for name, t in InternVLVisionModel(config).state_dict().items()}
    plan = internvl_format.weights(shapes)
    if not prefix:
        plan = {name.removeprefix("vision_model."): weight for name, weight in plan.items()}
    _check_plan(folder, stored, plan, shapes)
    state = {name.removeprefix("vision_tower."): t for name, t in _state(stored, plan, dtype).items()}
    return _filled(InternVLVisionModel, config, state, dtype, attn_implementation)


def _filled(
    model_class: Any, config: Any, state: dict[str, Any], dtype: torch.dtype, attention: Any
) -> PreTrainedModel:
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    wrong = {key: info[key] for key in ("unexpected_keys", "mismatched_keys", "error_msgs") if info.get(key)}
    wrong |= {"missing_keys": left} if (left := set(info["missing_keys"]) - {"lm_head.weight"}) else {}
    assert not wrong, f"the native model did not take what was made for it: {wrong}"
    return model


def _state(stored: Mapping[str, Tensor], plan: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` takes as state dict."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return _state_for_zero3(stored, plan)
    return {
        native: _Piece(stored, name, weight, native, dtype) for name, weight in plan.items() for native in weight.native
    }


def _take_generation_config(model: Any, folder: str | Path) -> None:
    """The folder's settings of generation, unless transformers would refuse to save them."""
    from transformers import GenerationConfig

    path = Path(folder, "generation_config.json")
    if not path.is_file():
        return
    try:
        settings = GenerationConfig.from_pretrained(folder)
        settings.validate(strict=True)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is left out: %s", path, " ".join(str(error).split())[:300])
    else:
        model.generation_config = settings


class _Piece:
    """A native tensor that is cut from its file when it is indexed, as safetensors' own slices are."""

    def __init__(
        self, stored: Mapping[str, Tensor], name: str, weight: Weight, native: str, dtype: torch.dtype
    ) -> None:
        self._make = lambda: weight.split(stored[name])[native]
        self._is_view = weight.groups is None or weight.groups.blocks == 1
        self._dtype = dtype

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self._make()[index]
        # Of another dtype it is copied by the cast that follows; else it must not stay a part of the file.
        return tensor.clone() if self._is_view and tensor.dtype == self._dtype else tensor


def _state_for_zero3(stored: Mapping[str, Tensor], plan: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Rank 0 gives the values (mapped from the files), the others names and shapes."""
    import torch.distributed as dist

    on_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, weight in plan.items():
        tensor = stored[name]
        state |= weight.split(tensor if on_rank_0 else tensor.to("meta"))
    return state


def _shapes(config: Any) -> dict[str, Tensor]:
    """The published native names of a config's model with tensors of no memory."""
    from transformers import InternVLForConditionalGeneration

    with without_zero3(), torch.device("meta"):
        return published(InternVLForConditionalGeneration(config).state_dict())


@contextlib.contextmanager
def without_zero3() -> Iterator[None]:
    """Models that are made meanwhile are whole on each rank, also under ZeRO-3."""
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def _opened(folder: str | Path, image_token_id: int) -> tuple[Any, LazyWeights, dict[str, Weight]]:
    """(native config, what is stored, each of its tensors as the native model takes it) of an InternVLChatModel.

    Raises:
        UserError: what the native model cannot compute, or names that are missing, unknown or of another shape.
    """
    content = read_config(folder)
    with naming(f"{folder}: "):
        config = internvl_format.native_config(content, image_token_id)
    stored, shapes = LazyWeights(folder), _shapes(config)
    plan = internvl_format.weights(shapes, config)
    head = next(name for name, weight in plan.items() if weight.native == (_HEAD,))
    if config.get_text_config().tie_word_embeddings and head not in stored:
        del plan[head]
    _check_plan(folder, stored, plan, shapes)
    _remember_tied_head(stored, plan, config, folder)
    return config, stored, plan


def _check_plan(
    folder: str | Path, stored: Mapping[str, Tensor], plan: Mapping[str, Weight], shapes: Mapping[str, Tensor]
) -> None:
    with naming(f"{folder}: "):
        internvl_format.check_names(stored)
    if missing := [name for name in plan if name not in stored]:
        raise UserError(f"{folder}: weights that its config.json asks for are missing: {named(missing)}")
    if unknown := [name for name in stored if name not in plan]:
        raise UserError(f"{folder}: weights that its config.json does not account for: {named(unknown)}")
    for name, weight in plan.items():
        expected, found = tuple(weight.join(shapes).shape), tuple(stored[name].shape)
        if found != expected:
            raise UserError(f"{folder}: {name} is {found}, its config.json makes it {expected}")


def _remember_tied_head(
    stored: Mapping[str, Tensor], plan: Mapping[str, Weight], config: Any, folder: str | Path
) -> None:
    """Some checkpoints hold the head beside the embeddings it is tied to: so will what is saved again.

    Raises:
        UserError: they differ.
    """
    names = {weight.native[0]: name for name, weight in plan.items()}
    if not config.get_text_config().tie_word_embeddings or _HEAD not in names:
        return
    if not torch.equal(stored[names[_HEAD]], stored[names[_EMBEDDINGS]]):
        raise UserError(
            f"{folder}: llm_config.tie_word_embeddings is true, but {names[_HEAD]} and {names[_EMBEDDINGS]} differ"
        )
    getattr(config, internvl_format.PROVENANCE)["tied_head"] = True


# --- writing --------------------------------------------------------------------------------------


def save_internvl_format(
    folder: str | Path,
    config: Any,
    state: Mapping[str, Tensor],
    *,
    like: str | Path | None = None,
    max_shard_size: str = SHARD_SIZE,
    **changes: Any,
) -> None:
    """Write a native model as `InternVLChatModel`.

    Args:
        config: its native config.
        state: its state dict, by its own names or by those of published files; whole tensors.
        like: a folder in InternVL's format, whose other files (code, tokenizer, ...) are copied; its `auto_map`
            names them where the config has none.
        changes: keys of config.json that are set (`template`, `max_dynamic_patch`, ...).

    Raises:
        UserError: a model that InternVLChatModel cannot be.
    """
    folder = Path(folder)
    state = published(state)
    known = getattr(config, internvl_format.PROVENANCE, None) or {}
    tied = config.get_text_config().tie_word_embeddings
    if tied:
        state.pop(_HEAD, None)
    if tied and known.get("tied_head"):
        state[_HEAD] = state[_EMBEDDINGS].clone()  # safetensors refuses tensors that share memory
    plan = internvl_format.weights(state, config)
    dtypes = {tensor.dtype for tensor in state.values()}
    content = internvl_format.internvl_config(config, dtypes.pop() if len(dtypes) == 1 else None, **changes)
    meta = {name: weight.join({n: state[n].to("meta") for n in weight.native}) for name, weight in plan.items()}
    write_weights(folder, meta, lambda name: _own(plan[name].join(state)), max_shard_size)
    if like is not None:
        copy_extra_files(like, folder)
        if "auto_map" not in content and (auto_map := read_config(like).get("auto_map")):
            content["auto_map"] = auto_map
    else:
        content.pop("auto_map", None)  # names Python files that are not there
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, and alone in its memory."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def copy_extra_files(source: str | Path, folder: str | Path) -> None:
    """Copy what a checkpoint holds besides config and weights: code, tokenizer, generation config, licence."""
    for path in sorted(Path(source).iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name in _RUN_FILES or path.name.endswith(_NOT_EXTRA):
            continue
        target = Path(folder, path.name)
        if not (target.exists() and os.path.samefile(path, target)):
            shutil.copyfile(path, target)


# --- converting -----------------------------------------------------------------------------------


def convert_to_native(source: str | Path, folder: str | Path, image_token_id: int, max_shard_size: str) -> None:
    """Write a checkpoint in InternVL's format as a native one, tensor by tensor as they are stored.

    Raises:
        UserError: as `load_internvl_format`.
    """
    config, stored, plan = _opened(source, image_token_id)
    where = {native: name for name, weight in plan.items() for native in weight.native}
    if config.get_text_config().tie_word_embeddings:
        where.pop(_HEAD, None)
    dtypes = {stored[name].dtype for name in plan}
    config.dtype = dtypes.pop() if len(dtypes) == 1 else None

    def make(native: str) -> Tensor:
        return _own(plan[where[native]].split(stored[where[native]])[native])

    meta = {n: plan[name].split(stored[name].to("meta"))[n] for n, name in where.items()}
    write_weights(folder, meta, make, max_shard_size)
    config.save_pretrained(folder)


def convert_to_internvl_format(
    source: str | Path, folder: str | Path, like: str | Path | None, max_shard_size: str
) -> None:
    """Write a native checkpoint in InternVL's format, tensor by tensor as they are stored.

    Raises:
        UserError: it is no InternVLForConditionalGeneration, or its weights are not those of its config.
    """
    from transformers import InternVLConfig

    content = read_config(source)
    if content.get("model_type") != "internvl":
        raise UserError(f"{source}: model_type is {content.get('model_type')!r}, not 'internvl' of a native InternVL")
    config = InternVLConfig.from_pretrained(source)
    state = published(LazyWeights(source))
    shapes = _shapes(config)
    if config.get_text_config().tie_word_embeddings:
        shapes.pop(_HEAD)
        state.pop(_HEAD, None)
    for what, names in (("missing", shapes.keys() - state.keys()), ("unknown", state.keys() - shapes.keys())):
        if names:
            raise UserError(f"{source}: weights are {what}: {named(sorted(names))}")
    save_internvl_format(folder, config, state, like=like, max_shard_size=max_shard_size)
