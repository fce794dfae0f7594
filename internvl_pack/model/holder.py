"""What transformers' Trainer and DeepSpeed look for in a model, for one that holds another.

Its config, its weights' type and place, checkpointing of its layers, saving and loading: of the model inside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.internvl_format import is_internvl_format
from ..checkpoints.internvl_format_files import load_internvl_format, read_config
from ..checkpoints.lora import merged_state_dict
from ..errors import UserError

_Holder = TypeVar("_Holder", bound="ModelHolder")


class ModelHolder(nn.Module):
    """A module around a model of transformers, to be trained and saved as that is.

    Args:
        model: the one inside.
    """

    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # the loss is normalised over the whole step by its caller, not by the Trainer
    _keys_to_ignore_on_save = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # as the modules inside, until train() or eval()
        self.register_load_state_dict_pre_hook(_refuse_other_names)

    def train(self: _Holder, mode: bool = True) -> _Holder:
        """As of any module, but no walk over all modules where the mode is set: a Trainer calls it for every row."""
        return self if self.training == mode else super().train(mode)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def generation_config(self) -> Any:
        return getattr(self.model, "generation_config", None)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if any(hasattr(p, "ds_numel") for p in self.model.parameters()):  # ZeRO-3: this rank holds a part of each
            counted = [p for p in self.model.parameters() if p.requires_grad or not only_trainable]
            return sum(getattr(p, "ds_numel", p.numel()) for p in counted)  # LoRA is partitioned later
        return self.model.num_parameters(only_trainable, exclude_embeddings)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())

    is_activation_checkpointing = is_gradient_checkpointing

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **options: Any) -> None:
        """Recompute each vision and decoder layer in the backward pass.

        Raises:
            UserError: reentrant checkpointing, which loses gradients where the layers' input needs none.
        """
        kwargs = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if kwargs["use_reentrant"]:
            raise UserError(
                "gradient_checkpointing_kwargs: set use_reentrant to false, true loses gradients of frozen parts"
            )
        enable, name = _first_method(self.model, "activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable(**{f"{name.removesuffix('_enable')}_kwargs": kwargs}, **options)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, **options: Any
    ) -> None:
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        _first_method(self.model, "activation_checkpointing_disable", "gradient_checkpointing_disable")[0]()

    activation_checkpointing_disable = gradient_checkpointing_disable

    def save_pretrained(self, save_directory: str | Path, state_dict: dict | None = None, **kwargs: Any) -> None:
        """An ordinary Hugging Face checkpoint of the inner model, LoRA merged in.

        Args:
            state_dict: of this wrapper or of the inner model, as a Trainer has gathered it; None takes
                the model's own.
        """
        if state_dict is None:
            state_dict = self.model.state_dict()
        state_dict = merged_state_dict(self.model, inner_names(state_dict, self.model))
        self.model.save_pretrained(save_directory, state_dict=state_dict, **kwargs)
        saved = next((t.dtype for t in state_dict.values() if t.is_floating_point()), self.dtype)
        if saved != self.dtype:  # float32 masters (sharded.py) of weights that are saved in half precision
            self.config.dtype = saved
            self.config.save_pretrained(save_directory)

    def load_pretrained(self, directory: str | Path) -> None:
        """Take the weights of a checkpoint, native or in InternVL's format (not under ZeRO-3, not with LoRA).

        transformers stores some models under other names than their parameters', so the state dict of
        the file cannot simply be loaded.

        Raises:
            RuntimeError: weights that are missing or do not fit.
        """
        if is_internvl_format(read_config(directory)):
            saved = load_internvl_format(directory, self.config.image_token_id, self.dtype)
        else:
            saved = type(self.model).from_pretrained(directory, dtype=self.dtype)
        self.model.load_state_dict(saved.state_dict())


def inner_names(state_dict: dict, model: nn.Module) -> dict:
    """A state dict under the inner model's names, whether it was taken of the wrapper or of `model` itself."""
    own = model.state_dict().keys()
    if all(name in own for name in state_dict):
        return state_dict
    return {name.removeprefix("model."): value for name, value in state_dict.items()}


def _refuse_other_names(holder: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    """Refuse a checkpoint whose names fit none of the parameters: loaded leniently, it would change nothing."""
    own = [prefix + name for name in holder.state_dict()]
    if not any(name in state_dict for name in own):
        raise ValueError("no name of this state dict is a parameter's: to load a saved checkpoint use load_pretrained")


def _first_method(model: nn.Module, *names: str) -> tuple[Callable[..., Any], str]:
    """The first of a method's names that this version of transformers knows, and that name."""
    name = next(n for n in names if hasattr(model, n))
    return getattr(model, name), name
