"""Options of how samples become tokens and tiles, each with its default, unit, help and check."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError
from ..options import check_options, option
from .images import ImageRules, colour_of
from .text import MARKUP_TOKENS
from .trees import OBJECTIVES


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """How samples become tokens and tiles."""

    family: str = option(
        "internvl",
        "For a model of a kind that is not known: the family by whose rules its pictures become tokens. Training first "
        "compares a pack with the model's own forward, on a small copy of it, and refuses it if they differ.",
        flag="family_check",
        from_checkpoint=True,
        page="families.md#a-model-of-an-unknown-kind",
    )
    conv_style: str = option(
        "internvl2_5",
        "Chat format: internvl2_5, Hermes-2, internlm2-chat, phi3-chat, internvl_zh, internvl3_5_gpt_oss, "
        "chat_template (the tokenizer's own) or one of yours.",
        from_checkpoint=True,
        page="encoding.md#tokens-and-labels",
    )
    objective: str = option(
        "sft",
        "What is trained: sft (conversations, groups of answers), or on pairs of a chosen and a rejected answer dpo or "
        "mpo, whose losses are other defaults of --loss_type.",
        choices=OBJECTIVES,
        page="preference.md",
    )
    image_size: int = option(
        448,
        "Side of a tile. Another than the checkpoint's resizes the position embeddings.",
        unit="pixels",
        at_least=1,
        flag="force_image_size",
        from_checkpoint=True,
    )
    tokens_per_tile: int = option(
        256, "Context tokens of a tile, see tiles.tokens_per_tile.", unit="tokens", at_least=1, flag=""
    )
    min_dynamic_patch: int = option(1, "Tiles of an image at least, without the thumbnail.", unit="tiles", at_least=1)
    max_dynamic_patch: int = option(
        12,
        "Tiles of an image at most, without the thumbnail. Images of one sample share them; a dataset's own "
        "max_dynamic_patch comes first.",
        unit="tiles",
        at_least=1,
    )
    use_thumbnail: bool = option(False, "With more than one tile, add the whole image as one more.")
    dynamic_image_size: bool = option(False, "Cut images into tiles by their shape; False: one tile an image.")
    min_pixels: int | None = option(
        None,
        "Width x height of a picture at least, as it goes into a model of native resolution; smaller ones are "
        "enlarged. Default: 65,536 for Qwen3-VL and Qwen3.5, 3,136 for Qwen2.5-VL, 6,272 for GLM-4V.",
        unit="pixels",
        at_least=1,
        page="families.md#budgets",
    )
    max_pixels: int | None = option(
        None,
        "Width x height of a picture at most, likewise; larger ones are made smaller. Default: 1,280 tokens of a "
        "picture, which is 1,310,720 for Qwen3-VL and Qwen3.5, 1,003,520 for the others.",
        unit="pixels",
        at_least=1,
        page="families.md#budgets",
    )
    video_max_pixels: int | None = option(
        None,
        "Width x height of all frames of a video together at most, as they go into a model of native resolution. "
        "Default: 4,096 tokens of a video, which is 8,388,608 for Qwen3-VL and Qwen3.5, 6,422,528 for the others.",
        unit="pixels",
        at_least=1,
        page="families.md#videos",
    )
    min_num_frame: int = option(
        8, "Frames of a video at least, as far as it has so many.", unit="frames", at_least=1, page="data.md#videos"
    )
    max_num_frame: int = option(
        32,
        "Frames of a video at most. The number is drawn for each sample; by a model of native resolution two a second "
        "are taken.",
        unit="frames",
        at_least=1,
    )
    takes_videos: bool = option(True, "Whether videos are read, or refused.", flag="")
    positions_per_second: int | None = option(
        None, "Of a video's frames in Qwen2.5-VL: tokens_per_second of the checkpoint.", at_least=1, flag=""
    )
    max_image_pixels: int = option(
        ImageRules().max_image_pixels,
        "Width x height above which an image is refused from its header; decoding takes up to 32 bytes a pixel.",
        unit="pixels",
        at_least=1,
    )
    allow_truncated_images: bool = option(
        False, "Accept image files that are damaged or cut off, the missing part grey or black."
    )
    apply_exif_orientation: bool = option(
        True, "Turn photographs upright by their EXIF orientation; False keeps them as stored, as InternVL does."
    )
    transparent_background: str | None = option(
        None,
        "Colour (white, #ff8800) that transparent pixels are composited on. Default: alpha is dropped, as in InternVL.",
    )
    markup_tokens: tuple[str, ...] = option(
        MARKUP_TOKENS, "Special tokens that text may contain as tokens (grounding markup).", flag=""
    )

    def __post_init__(self) -> None:
        check_options(self)
        for what in ("dynamic_patch", "num_frame", "pixels"):
            low, high = f"min_{what}", f"max_{what}"
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise UserError(f"{low}={least} exceeds {high}={most}: lower the first or raise the second")

    @property
    def rules(self) -> ImageRules:
        """The options that concern an image by itself."""
        background = None if self.transparent_background is None else colour_of(self.transparent_background)
        return ImageRules(self.max_image_pixels, self.allow_truncated_images, self.apply_exif_orientation, background)
