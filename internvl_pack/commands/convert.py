"""`internvl-pack convert SRC DST --to hf|internvl`: a checkpoint in the other format, tensor by tensor."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..errors import UserError, naming

HELP = "Convert a checkpoint between InternVL's own format and transformers' native one."

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder or hub name of the checkpoint")
    parser.add_argument("target", metavar="DST", help="folder to write, which must be empty or new")
    parser.add_argument(
        "--to",
        required=True,
        choices=("hf", "internvl"),
        help="hf: InternVLForConditionalGeneration (published under names ending in -hf); internvl: InternVLChatModel",
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="with --to internvl: an InternVLChatModel whose Python files and tokenizer files are copied (not run), so "
        "that DST loads with trust_remote_code as that one does",
    )
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of weights (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    from ..checkpoints.internvl_format_files import local_folder

    source, target = local_folder(args.source), Path(args.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"DST {target}: exists and is not an empty folder")
    if args.like and args.to == "hf":
        raise UserError("--like goes with --to internvl")
    convert = _to_native if args.to == "hf" else _to_internvl_format
    architecture = convert(source, target, args)
    files = sorted(path for pattern in _WEIGHTS for path in target.glob(pattern))
    size = sum(path.stat().st_size for path in files)
    print(f"{target}: {architecture}, {size / 1e9:.2f} GB of weights")
    return 0


def _to_native(source: Path, target: Path, args: argparse.Namespace) -> str:
    from ..checkpoints.internvl_format import is_internvl_format
    from ..checkpoints.internvl_format_files import convert_to_native, read_config
    from ..checkpoints.tokenizers import image_token_id

    if not is_internvl_format(config := read_config(source)):
        raise UserError(f"SRC {source}: no InternVLChatModel: its config.json says {config.get('model_type')!r}")
    tokenizer = _tokenizer(source)
    convert_to_native(source, target, image_token_id(tokenizer), args.max_shard_size)
    tokenizer.save_pretrained(target)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    return "InternVLForConditionalGeneration"


def _to_internvl_format(source: Path, target: Path, args: argparse.Namespace) -> str:
    from ..checkpoints.internvl_format_files import convert_to_internvl_format, local_folder, read_config
    from ..checkpoints.tokenizers import save_tokenizer

    if (kind := read_config(source).get("model_type")) != "internvl":
        raise UserError(f"SRC {source}: no InternVLForConditionalGeneration: its config.json says {kind!r}")
    like = local_folder(args.like) if args.like else None
    convert_to_internvl_format(source, target, like, args.max_shard_size)
    if like is None:
        save_tokenizer(_tokenizer(source), target)
    return "InternVLChatModel"


def _tokenizer(source: Path) -> Any:
    from ..checkpoints.tokenizers import load_tokenizer

    with naming("SRC "):
        return load_tokenizer(source)
