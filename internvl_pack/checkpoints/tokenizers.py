"""Tokenizers of checkpoints, without the code that some of their folders bring.

InternLM2's (`tokenizer.model` of SentencePiece, with a Python class of its own) is rebuilt from the file: byte-pair
encoding with byte fallback, the added tokens at their ids. What the file asks for beyond that is refused by name.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError

logger = logging.getLogger(__name__)

#: The names by which processors of the native InternVL ask a tokenizer for its image tokens.
IMAGE_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_INTERNLM2 = ("InternLM2Tokenizer", "InternLM2TokenizerFast", "InternLMTokenizer")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder or hub name.

    That of an InternVLChatModel also names its image tokens as processors of the native model ask for them.

    Raises:
        OSError, ValueError: as AutoTokenizer.
        UserError: a SentencePiece model that is not rebuilt here.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    from .internvl_format import is_original
    from .internvl_format_files import config_of

    if not is_original(config_of(path)):  # a tokenizer alone has none
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not Path(path).is_dir():
        path = _download(str(path))
    if _settings(path).get("tokenizer_class") in _INTERNLM2 and not Path(path, "tokenizer.json").is_file():
        return _internlm2(Path(path))
    options = {"trust_remote_code": False, "config": PreTrainedConfig()}  # its own config would ask for its code
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if not IMAGE_NAMES.keys() - _names_in(tokenizer).keys():
        tokenizer = AutoTokenizer.from_pretrained(path, **options, extra_special_tokens=IMAGE_NAMES)
    return tokenizer


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


def _download(name: str) -> str:
    """The files of a hub name that a tokenizer may need."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*token*", "*.txt", "vocab*.json", "*.jinja", "config.json"])


def image_token_id(tokenizer: Any) -> int:
    """The id of the token that stands for a place of an image.

    Raises:
        UserError: the tokenizer has none.
    """
    token = IMAGE_NAMES["context_image_token"]
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise UserError(f"the tokenizer has no {token} token: use the one of an InternVL checkpoint")
    return token_id


def _names_in(tokenizer: Any) -> dict[str, str]:
    vocabulary = tokenizer.get_added_vocab()
    return {name: token for name, token in IMAGE_NAMES.items() if token in vocabulary}


def _settings(path: str | Path) -> dict[str, Any]:
    file = Path(path, "tokenizer_config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# --- SentencePiece --------------------------------------------------------------------------------


class Piece(NamedTuple):
    text: str
    score: float
    kind: int  # 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte


class SentencePieceModel(NamedTuple):
    """What a tokenizer needs of a `tokenizer.model` (sentencepiece_model.proto)."""

    pieces: list[Piece]
    is_bpe: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a SentencePiece model.

    Raises:
        UserError: the file cannot be read as one.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                fields = dict(_fields(value))
                score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
                pieces.append(Piece(fields[1].decode("utf-8"), score, fields.get(3, 1)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model ({error})") from error
    return SentencePieceModel(
        pieces,
        is_bpe=trainer.get(3, 1) == 2,
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message's fields: integers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == 2:
            size, position = _varint(data, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field of wire type {kind}")
        if position + size > len(data):
            raise ValueError("it is cut off")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


# --- InternLM2 ------------------------------------------------------------------------------------


def _internlm2(folder: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.model"
    model = read_sentencepiece(path)
    if not model.is_bpe or not model.byte_fallback or model.charsmap or model.remove_extra_whitespaces:
        raise UserError(
            f"{path}: only byte-pair models with byte fallback and identity normalisation are rebuilt: "
            "save the tokenizer as tokenizer.json"
        )
    if model.add_dummy_prefix:
        logger.warning(
            "%s puts a space before every text: the first token of an answer has one, which InternVL, that encodes "
            "answers together with their headers, has not",
            path,
        )
    settings = _settings(folder)
    added = _added_tokens(folder, settings)
    # Added tokens stand in the places of unused pieces, or after all.
    texts = [added[i].content if i in added else piece.text for i, piece in enumerate(model.pieces)]
    unknown = next((p.text for p in model.pieces if p.kind == 2), "<unk>")
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = _merges(texts, [piece.score for piece in model.pieces], [piece.kind for piece in model.pieces])
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
    )
    steps = [normalizers.Prepend("▁")] if model.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, *([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else [])])
    for i, piece in enumerate(model.pieces):
        if piece.kind == 4 and i not in added:
            added[i] = AddedToken(piece.text, normalized=False, special=False)
    for token_id in sorted(added):
        tokenizer.add_special_tokens([added[token_id]]) if added[token_id].special else tokenizer.add_tokens(
            [added[token_id]]
        )
        if (got := tokenizer.token_to_id(added[token_id].content)) != token_id:
            raise UserError(f"{folder}: added token {added[token_id].content!r} has id {token_id}, it would get {got}")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {name: settings[name] for name in names if settings.get(name)}
    given = {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}
    if not IMAGE_NAMES.keys() - {n for n, t in IMAGE_NAMES.items() if tokenizer.token_to_id(t) is not None}:
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


def _merges(texts: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, better pieces first, as SentencePiece merges."""
    normal = {text: i for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind in (1, 4, 5)}
    found = []
    for text, i in normal.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                found.append((-scores[i], i, normal[left], normal[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
