"""What a run writes as its model, and reads when it goes on: format, LoRA, and the files of an original checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from internvl_pack.checkpoints import internvl_format, lora
from internvl_pack.checkpoints.internvl_format_files import config_of, local_folder, save_internvl_format
from internvl_pack.checkpoints.processor import processor_files, save_processor
from internvl_pack.checkpoints.tokenizers import save_tokenizer
from internvl_pack.encode.config import EncodeConfig
from internvl_pack.errors import UserError
from internvl_pack.model.holder import inner_names
from internvl_pack.model.packed import PackedModel

from .checkpoint import give_usual_modes, writing_to

logger = logging.getLogger(__name__)

ADAPTER = "adapter"  # folder within a checkpoint, beside the whole model with LoRA merged in


@dataclass(frozen=True)
class Saving:
    """How the model of a run is written.

    Args:
        save_format: "hf", transformers' native checkpoint, or "internvl", InternVLChatModel.
        merge_lora: write the whole model with LoRA merged into its weights; otherwise the adapters alone.
        source: the checkpoint that was loaded, by the user's name for it.
        encode: how the data is encoded, for the processor files; None writes none.
    """

    save_format: str = "hf"
    merge_lora: bool = True
    source: str | None = None
    encode: EncodeConfig | None = None

    def write(self, packed: PackedModel, folder: str | Path, state_dict: dict | None, tokenizer: Any) -> None:
        """Write model, tokenizer and processor: a folder that inference can start from.

        Args:
            state_dict: gathered, by the names of `packed` or of the model inside; None for the model's own.

        Raises:
            UserError: there is no space.
        """
        model = packed.model
        state = model.state_dict() if state_dict is None else inner_names(state_dict, model)
        with writing_to(folder):
            if lora.has_lora(model):
                alone = Path(folder) if not self.merge_lora else Path(folder, ADAPTER)
                lora.save_adapter(model, state, alone, self.source)
            if self.save_format == "internvl":
                source = self.source  # of a checkpoint in that format the other files are taken along
                of_internvl = internvl_format.is_internvl_format(config_of(source))
                like = local_folder(source) if source is not None and of_internvl else None
                save_internvl_format(folder, packed.config, lora.merged_state_dict(model, state), like=like)
                if like is None:
                    save_tokenizer(tokenizer, folder)
            else:
                if self.merge_lora or not lora.has_lora(model):
                    packed.save_pretrained(folder, state_dict=state)
                tokenizer.save_pretrained(folder)
                if packed.has_vision and self.encode is not None:
                    vocab_size = packed.config.get_text_config().vocab_size
                    save_processor(folder, self.source, tokenizer, self.encode, vocab_size)
            give_usual_modes(folder)

    def read(self, packed: PackedModel, folder: str | Path) -> None:
        """Take the weights of a checkpoint that `write` wrote.

        With LoRA these are the trained ones; the frozen ones are as they were loaded.

        Raises:
            UserError: what was trained then is not what is trained now.
        """
        if not lora.has_lora(packed.model):
            packed.load_pretrained(folder)
            return
        alone = Path(folder, ADAPTER)
        lora.load_adapter(packed.model, alone if alone.is_dir() else Path(folder))

    def check(self, packed: PackedModel) -> None:
        """Before training: that the model can be written so, and what its config will say of the data's encoding.

        Raises:
            UserError: names the option.
        """
        if not self.merge_lora:
            if not lora.has_lora(packed.model):
                raise UserError("--merge_lora False: there is no LoRA, give --use_llm_lora or --use_backbone_lora")
            if self.save_format == "internvl":
                raise UserError(
                    "--merge_lora False with --save_format internvl: that format has LoRA on other matrices (its qkv "
                    "is one), merge it or save as hf"
                )
            lora.peft_config(packed.model, self.source)
        if packed.grid_positions and self.save_format == "internvl":
            raise UserError(f"--save_format internvl with a {packed.config.model_type!r} model: use hf")
        processor_files(self.source)  # of a hub name they are in the cache from here on
        if not packed.has_vision:
            if self.save_format == "internvl":
                raise UserError("--save_format internvl: the model has no vision tower")
            return
        encode = self.encode
        if encode is not None and (self.save_format == "internvl" or internvl_format.loaded_from(packed.config)):
            try:
                internvl_format.remember(
                    packed.config,
                    template=encode.conv_style,
                    dynamic_image_size=encode.dynamic_image_size,
                    use_thumbnail=encode.use_thumbnail,
                    min_dynamic_patch=encode.min_dynamic_patch,
                    max_dynamic_patch=encode.max_dynamic_patch,
                )
            except UserError as error:
                raise UserError(f"--save_format {self.save_format}: {error}") from error
