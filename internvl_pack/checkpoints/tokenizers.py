"""Tokenizers of checkpoints, without the code that some of their folders bring.

InternLM2's (`tokenizer.model` of SentencePiece, with a Python class of its own) is rebuilt from the file: byte-pair
encoding with byte fallback, the added tokens at their ids. What the file asks for beyond that is refused by name.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line

logger = logging.getLogger(__name__)

# The names by which processors of the native InternVL ask a tokenizer for its image tokens.
IMAGE_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
# Tokens that a bare language model's tokenizer lacks: InternVL's for images, and for grounding.
IMAGE_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>")
OTHER_TOKENS = ("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
# Files of a hub name that a tokenizer may need.
_TOKENIZER_FILES = ["*token*", "*.txt", "vocab*.json", "*.jinja", "config.json"]
_INTERNLM2 = ("InternLM2Tokenizer", "InternLM2TokenizerFast", "InternLMTokenizer")


def add_image_tokens(tokenizer: Any) -> None:
    """Give a bare language model's tokenizer the tokens that it lacks; one that has them stays as it is."""
    if IMAGE_TOKENS[0] not in tokenizer.get_vocab():
        tokenizer.add_tokens([*IMAGE_TOKENS, *OTHER_TOKENS], special_tokens=True)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder or hub name.

    That of an InternVLChatModel also names its image tokens as processors of the native model ask for them.

    Raises:
        UserError: there is none, it is a SentencePiece model that is not rebuilt here, or sentencepiece to read it is
            not installed; begins with `path`.
    """
    try:
        return _loaded(path)
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as error:
        if not Path(path).is_dir() and os.environ.get("HF_HUB_OFFLINE") == "1":
            raise UserError(f"{path}: no such folder, and the hub is off (HF_HUB_OFFLINE=1)") from error
        raise UserError(f"{path}: no tokenizer found there: {first_line(error)}") from error


def _loaded(path: str | Path) -> Any:
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer, PreTrainedConfig

    from .internvl_format import is_internvl_format
    from .internvl_format_files import config_of

    if not is_internvl_format(config_of(path)):  # a tokenizer alone has none
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not Path(path).is_dir():
        path = snapshot_download(str(path), allow_patterns=_TOKENIZER_FILES)
    if _settings(path).get("tokenizer_class") in _INTERNLM2 and not Path(path, "tokenizer.json").is_file():
        return _internlm2(Path(path))
    options = {"trust_remote_code": False, "config": PreTrainedConfig()}  # its own config would ask for its code
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if tokenizer.get_added_vocab().keys() >= set(IMAGE_NAMES.values()):
        tokenizer = AutoTokenizer.from_pretrained(path, **options, extra_special_tokens=IMAGE_NAMES)
    return tokenizer


def name_image_tokens(folder: str | Path, tokenizer: Any, vocab_size: int) -> None:
    """Let a saved tokenizer name its image tokens as processors of the native model ask for them.

    They ask for a token for videos, too: `<video>` where the model's embeddings have a row for it. Elsewhere it is one
    that stands in no prompt, and the processor takes images only.
    """
    from transformers import AutoTokenizer

    has_row = "<video>" in tokenizer.get_vocab() or len(tokenizer) < vocab_size
    video = "<video>" if has_row else IMAGE_NAMES["end_image_token"]
    names = IMAGE_NAMES | {"video_token": video}
    if all(getattr(tokenizer, name, None) == token for name, token in names.items()):
        return
    named = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, extra_special_tokens=names)
    named.save_pretrained(folder)


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Save it as transformers 4 reads it, too, on which InternVL's own code runs."""
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":  # the name of transformers 5
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := settings.get("extra_special_tokens"), list):  # a dictionary before
        del settings["extra_special_tokens"]
        settings["additional_special_tokens"] = extra
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def image_token_id(tokenizer: Any, token: str = IMAGE_NAMES["context_image_token"]) -> int:
    """The id of the token that stands for a place of an image, InternVL's or another family's.

    Raises:
        UserError: the tokenizer has none.
    """
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise UserError(f"the tokenizer has no {token} token: use the one of an InternVL checkpoint")
    return token_id


def _settings(path: str | Path) -> dict[str, Any]:
    file = Path(path, "tokenizer_config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# --- InternLM2 ------------------------------------------------------------------------------------


def _sentencepiece_model(path: Path) -> Any:
    """The content of a SentencePiece model, a `ModelProto`.

    Raises:
        UserError: sentencepiece is not installed, or the model is of a kind that is not rebuilt here.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise UserError(
            f"{path} needs sentencepiece: pip install 'internvl-pack[internlm2]', or save it as tokenizer.json"
        ) from None
    try:
        model = ModelProto.FromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise UserError(f"{path}: not a SentencePiece model ({error})") from error
    trained, normalizer = model.trainer_spec, model.normalizer_spec
    is_bpe = trained.model_type == trained.BPE and trained.byte_fallback
    if not is_bpe or normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise UserError(
            f"{path}: only byte-pair models with byte fallback and identity normalisation are rebuilt: "
            "save the tokenizer as tokenizer.json"
        )
    if normalizer.add_dummy_prefix:
        logger.warning(
            "%s puts a space before every text: the first token of an answer has one, which InternVL, that encodes "
            "answers together with their headers, has not",
            path,
        )
    return model


def _internlm2(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    settings = _settings(folder)
    tokenizer = _byte_pairs(folder, _added_tokens(folder, settings))
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {name: settings[name] for name in names if settings.get(name)}
    given = {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}
    if all(tokenizer.token_to_id(token) is not None for token in IMAGE_NAMES.values()):
        given["extra_special_tokens"] = IMAGE_NAMES
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=bool(settings.get("add_bos_token", True)),
        add_eos_token=bool(settings.get("add_eos_token", False)),
        clean_up_tokenization_spaces=bool(settings.get("clean_up_tokenization_spaces", False)),
        model_max_length=settings.get("model_max_length"),
        padding_side="right",
        **given,
    )
    fast.chat_template = settings.get("chat_template")
    return fast


def _byte_pairs(folder: Path, added: dict[int, Any]) -> Any:
    """The folder's SentencePiece model as a `tokenizers.Tokenizer`, with the added tokens at their ids.

    Raises:
        UserError: it is of another kind, or an added token would get another id.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model = _sentencepiece_model(folder / "tokenizer.model")
    prefix = model.normalizer_spec.add_dummy_prefix
    # Added tokens stand in the places of unused pieces, or after all.
    texts = [added[i].content if i in added else piece.piece for i, piece in enumerate(model.pieces)]
    unknown = next((p.piece for p in model.pieces if p.type == p.UNKNOWN), "<unk>")
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = _merges(texts, model.pieces)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    for i, piece in enumerate(model.pieces):
        if piece.type == piece.USER_DEFINED and i not in added:
            added[i] = AddedToken(piece.piece, normalized=False, special=False)
    for token_id, token in sorted(added.items()):
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        if (got := tokenizer.token_to_id(token.content)) != token_id:
            raise UserError(f"{folder}: added token {token.content!r} has id {token_id}, it would get {got}")
    return tokenizer


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, Any]:
    """Added tokens by id, from tokenizer_config.json and, of older folders, added_tokens.json."""
    from tokenizers import AddedToken

    out = {}
    older = folder / "added_tokens.json"
    if older.is_file():
        for content, token_id in json.loads(older.read_text(encoding="utf-8")).items():
            out[int(token_id)] = AddedToken(content, normalized=False, special=True)
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip", "normalized", "special", "single_word")}
        out[int(token_id)] = AddedToken(token["content"], **flags)
    return out


def _merges(texts: list[str], pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """The pairs of pieces that make up a third, better ones first, as SentencePiece merges."""
    normal = {
        text: i
        for i, (text, piece) in enumerate(zip(texts, pieces, strict=True))
        if piece.type in (piece.NORMAL, piece.USER_DEFINED, piece.UNUSED)
    }
    found = []
    for text, i in normal.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                found.append((-pieces[i].score, i, normal[left], normal[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
