"""Write a tiny InternVL or Qwen-VL checkpoint with a tokenizer trained on a meta file's texts: no hub, no download.

    python train/make_tiny_model.py --meta_path shell/data/demo/meta.json --output_dir work_dirs/tiny
    python train/make_tiny_model.py --family qwen3_vl --meta_path shell/data/demo/meta.json --output_dir work_dirs/tiny

Random weights, but the classes, special tokens and code paths of the published checkpoints, so that
`finetune.py --model_name_or_path work_dirs/tiny` exercises all of them within seconds on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import_module("train")  # before transformers: it keeps quiet what that imports

from internvl_pack.errors import UserError
from internvl_pack.testing.tiny import FAMILIES, LANGUAGE_MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="make_tiny_model", description=__doc__.partition("\n")[0])
    parser.add_argument("--meta_path", required=True, help="meta file whose texts train the tokenizer")
    parser.add_argument("--output_dir", required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--family", default="internvl", choices=FAMILIES, help="family of the whole model; default: %(default)s"
    )
    parser.add_argument("--llm", choices=LANGUAGE_MODELS, help="language model of an InternVL; default: qwen2")
    parser.add_argument(
        "--vocab_size", type=int, default=2048, help="tokens of the vocabulary at most; default: %(default)s"
    )
    parser.add_argument(
        "--image_size", type=int, help="side of an InternVL's tile, pixels, a multiple of 28; default: 56"
    )
    parser.add_argument(
        "--hidden_size", type=int, default=64, help="width of the language model, in 4 heads; default: %(default)s"
    )
    parser.add_argument("--num_layers", type=int, default=2, help="layers of the language model; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights; default: %(default)s")
    args = parser.parse_args(argv)
    try:
        write(args)
    except UserError as error:
        print(f"make_tiny_model: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def write(args: argparse.Namespace) -> None:
    """Train the tokenizer and write both.

    Raises:
        UserError: sizes that do not go together, or a meta file without texts.
    """
    import torch
    from safetensors import safe_open
    from transformers.utils import logging as transformers_logging

    from internvl_pack.sources import load_meta, open_source
    from internvl_pack.testing.tiny import save_tiny_checkpoint, source_texts, tiny_tokenizer

    if args.family != "internvl" and (given := next((n for n in ("llm", "image_size") if getattr(args, n)), None)):
        raise UserError(f"--{given} {getattr(args, given)}: of an InternVL, not of {args.family}; leave it out")
    image_size = 56 if args.image_size is None else args.image_size
    if image_size < 28 or image_size % 28:
        raise UserError(
            f"--image_size {args.image_size}: give a multiple of 28 pixels (patches of 14, merged in pairs)"
        )
    if args.hidden_size < 32 or args.hidden_size % 32:
        raise UserError(f"--hidden_size {args.hidden_size}: give a multiple of 32 (4 heads of a multiple of 8)")
    transformers_logging.disable_progress_bar()
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns where it has to find out
    texts: list[str] = []
    for spec in load_meta(args.meta_path):
        texts += source_texts([open_source(spec)])
    if not texts:
        raise UserError(f"--meta_path {args.meta_path}: no conversations to train a tokenizer on")
    tokenizer = tiny_tokenizer(texts, args.vocab_size, args.family)
    settings = {"seed": args.seed, "hidden_size": args.hidden_size, "num_layers": args.num_layers}
    if args.family == "internvl":
        settings["image_size"] = image_size
    folder = save_tiny_checkpoint(args.output_dir, tokenizer, args.llm or "qwen2", family=args.family, **settings)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        size = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    what = "InternVL" if args.family == "internvl" else args.family
    print(f"wrote {folder}: a tiny {what} ({size:,} parameters). To train it:")
    budgets = "--max_packed_tokens 1024 --num_images_expected " + ("16" if args.family == "internvl" else "1024")
    paths = ["--model_name_or_path", str(folder), "--meta_path", args.meta_path, "--output_dir", f"{folder}-run"]
    print(f"  internvl-pack train {shlex.join(paths)} --use_packed_ds True {budgets} --learning_rate 2e-3")


if __name__ == "__main__":
    sys.exit(main())
