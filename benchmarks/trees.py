"""What do prefix trees save? Preference pairs, groups of answers and questions about an image, on one GPU.

    python benchmarks/trees.py                          # the 1B shape, all parts
    python benchmarks/trees.py --parts pairs errors     # some of them
    python benchmarks/trees.py --device cpu             # the script itself, in small

Random weights, pixels and token ids. Forward and backward without an optimizer, in bfloat16, compiled (as --compile)
but for the padded ones. Ways take turns in each repetition; the table has the median.

    pairs       a prompt of 7 tiles and 100 tokens, two answers of 300: MPO (0.8 sigmoid, 0.2 bco_pair, 1 SFT)
    answers     the same prompt with eight answers of 300: log-probabilities, weighted as GRPO does
    questions   an image of 13 tiles, eight questions of 40 tokens with answers of 60: the loss of SFT
    errors      one pair and one group of eight: log-probabilities and gradients in bfloat16 against float32 one by one,
                in multiples of those that bfloat16 has one by one

    shared      trees: the prompt with its tiles once
    apart       the same kernels and rows of as many tokens, the prompt with each answer
    padded      as InternVL does it: a pair a micro-batch, two rows of it, tiles twice, logits of all tokens,
                gradient checkpointing, sdpa, not compiled

"reference computed" runs the reference in each step, "stored" takes its log-probabilities from a table.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Table, in_turns, pinned, relative, relative_of_all, take_gradients, versions
from benchmarks.train_step import SHAPES, Way, make_model, packed_step, run_pass, set_up, to_device
from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.model.attention import KERNELS, register_packed_attention, select_kernel
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.loss import select_loss_kernel
from internvl_pack.model.loss.preference import Pairs, PreferenceLoss, branch_sums
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.vision import use_tile_attention
from internvl_pack.records import Branch
from internvl_pack.trees import logprobs

MPO = PreferenceLoss({"sigmoid": 0.8, "bco_pair": 0.2}, sft_weight=1.0)
PARTS = ("pairs", "answers", "questions", "errors")
CUDA_BUDGET, CPU_BUDGET = 16384, 512  # tokens of a row


# --- data -----------------------------------------------------------------------------------------


def make_tree(
    core: PackedModel, pixels: Tensor, tiles: int, text: int, untrained: int, trained: int, n: int, seed: int
):
    """A prompt of tiles and text with n branches, each of untrained tokens (one at least) and trained ones."""
    rng = np.random.default_rng(seed)
    image_id = core.config.image_token_id
    draw = lambda count: rng.integers(0, image_id, count).astype(np.int32)  # noqa: E731
    ids = [np.full(tiles * core.tokens_per_tile, image_id, dtype=np.int32), draw(text)]
    labels = [np.full(len(part), -100, dtype=np.int32) for part in ids]
    last = draw(untrained)
    for _ in range(n):
        answer = draw(trained)
        ids += [last, answer]
        labels += [np.full(untrained, -100, dtype=np.int32), answer]
    branches = tuple(Branch(untrained + trained, trained) for _ in range(n))
    joined = np.concatenate(ids), np.concatenate(labels)
    return Segment(str(seed), (0, 1), *joined, pixels[:tiles].numpy(), (tiles,), n * trained, branches)


def apart(trees: Sequence[Segment]) -> list[Segment]:
    return [alone for tree in trees for alone in tree.unshared()]


def rows_of(segments: Sequence[Segment], tokens: int, group: int) -> list[list[Segment]]:
    """As many as a row of `tokens` holds, `group` of them together."""
    each = max(1, tokens // sum(len(s.input_ids) for s in segments[:group])) * group
    return [list(segments[i : i + each]) for i in range(0, len(segments), each)]


def packed(core: PackedModel, rows: Sequence[Sequence[Segment]], pairs: bool = False) -> list[dict[str, Any]]:
    batches = []
    for row in rows:
        batch = packed_collate_fn([PackRow(row)], image_token_id=core.config.image_token_id)
        if pairs:
            bounds = np.arange(len(batch["cu_seqlens"]) - 1)
            prefix_of = batch.get("prefix_of")
            branches = bounds if prefix_of is None else bounds[prefix_of.numpy() >= 0]
            batch["pairs"] = torch.from_numpy(branches.reshape(-1, 2))
        batches.append(pinned(batch))
    return batches


# --- steps ----------------------------------------------------------------------------------------


def pair_sums(core: PackedModel, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of the pairs' answers, (P, 2) each."""
    out = core(**batch, return_logprobs=True)
    sums = branch_sums(out.target_logprobs, out.target_positions, batch["cu_seqlens"])
    return tuple(values[batch["pairs"]] for values in sums)


def pair_step(core: PackedModel, batch: dict[str, Any], computed: bool) -> Tensor:
    if computed:
        with torch.no_grad():
            reference, _ = pair_sums(core, batch)
    sums, num_tokens = pair_sums(core, batch)
    if not computed:
        reference = sums.detach() + 1.0
    return MPO.of(Pairs(sums, reference, num_tokens), 0.0, len(sums), float(batch["num_loss_tokens"]) / 2).loss


def padded_pair_step(core: PackedModel, batch: dict[str, Any]) -> Tensor:
    """A pair as two padded rows through transformers' own model, the reference first."""

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        pixels = normalize_tiles(batch["pixel_values"], core.dtype)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = core.model(**inputs, pixel_values=pixels, use_cache=False).logits
        targets = batch["labels"][:, 1:]
        trained = targets != -100
        of_targets = [  # row by row: log-probabilities of all tokens' whole vocabulary exist once
            row.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
            for row, target in zip(logits[:, :-1], targets, strict=True)
        ]
        nll = F.cross_entropy(logits[0, :-1], targets[0])
        return (torch.stack(of_targets) * trained).sum(-1).double()[None], trained.sum(-1)[None], nll

    with torch.no_grad():
        reference, *_ = forward()
    sums, num_tokens, nll = forward()
    without_sft = PreferenceLoss(MPO.weights)
    return without_sft.of(Pairs(sums, reference, num_tokens), 0.0, 1, 1).loss + nll


def answers_step(core: PackedModel, batch: dict[str, Any]) -> Tensor:
    out = core(**batch, return_logprobs=True)
    sums = branch_sums(out.target_logprobs, out.target_positions, batch["cu_seqlens"]).logprobs
    return (sums * torch.linspace(-1, 1, len(sums), device=sums.device)).sum() / batch["num_loss_tokens"]


# --- speed ----------------------------------------------------------------------------------------


def compare(core: PackedModel, title: str, unit: str, count: int, ways: list[Way], repeats: int, device) -> None:
    """Table of ways, each of which makes `count` units in a pass."""
    print(f"\n{title}; {count} {unit}, median of {repeats}")

    def one_pass(way: Way) -> float:
        with set_up(core, way):
            return run_pass(core, way, device)

    times = in_turns({way.name: partial(one_pass, way) for way in ways}, repeats, device)
    table = Table(
        ("way", 32), ("rows", 5), ("tokens", 8), ("tiles", 6), (f"{unit}/s", 12), ("spread", 7), ("peak GB", 8),
        ("the first is x", 14),
    )  # fmt: skip
    for way in ways:
        found, first = times[way.name], times[ways[0].name]
        totals = (sum(batch[key] for batch in way.batches) for key in ("num_tokens", "num_tiles"))
        table.row(
            way.name, len(way.batches), *(f"{total:,}" for total in totals), f"{count / found.median:,.2f}",
            found.spread, f"{found.peak_gb:.1f}", f"{found.median / first.median:.2f}",
        )  # fmt: skip


def speed(args: argparse.Namespace, core: PackedModel, pixels: Tensor, ours: dict[str, Any], device) -> None:
    small = device.type != "cuda"
    budget = CPU_BUDGET if small else CUDA_BUDGET
    by = 8 if small else 1  # everything of text by so much shorter
    way = partial(Way, compiled=True, **ours)
    if "pairs" in args.parts:
        trees = [make_tree(core, pixels, 7, 100 // by, 1, 300 // by, 2, seed) for seed in range(12)]
        shared = packed(core, rows_of(trees, budget, 1), pairs=True)
        single = packed(core, rows_of(apart(trees), budget, 2), pairs=True)
        two_rows = [pinned(padded_collate_fn([PackRow([tree])])) for tree in trees]
        stored, computed = (partial(pair_step, core, computed=c) for c in (False, True))
        ways = [
            way("shared, reference stored", shared, stored),
            way("apart, reference stored", single, stored),
            way("shared, reference computed", shared, computed),
            way("apart, reference computed", single, computed),
            Way("padded, reference computed", two_rows, partial(padded_pair_step, core), checkpointing=True,
                attention="sdpa"),
            Way("the same without checkpointing", two_rows, partial(padded_pair_step, core), attention="sdpa"),
        ]  # fmt: skip
        compare(core, "Pairs of 7 tiles, answers of 300 tokens: MPO", "pairs", 12, ways, args.repeats, device)
    if "answers" in args.parts:
        trees = [make_tree(core, pixels, 7, 100 // by, 1, 300 // by, 8, seed) for seed in range(3)]
        step = partial(answers_step, core)
        ways = [
            way("shared", packed(core, rows_of(trees, budget, 1)), step),
            way("apart", packed(core, rows_of(apart(trees), budget, 1)), step),
        ]
        compare(core, "Eight answers of 300 tokens on 7 tiles", "answers", 24, ways, args.repeats, device)
    if "questions" in args.parts:
        trees = [make_tree(core, pixels, 13, 10 // min(by, 4), 40 // by, 60 // by, 8, seed) for seed in range(6)]
        step = partial(packed_step, core)
        ways = [
            way("shared", packed(core, rows_of(trees, budget, 1)), step),
            way("apart", packed(core, rows_of(apart(trees), budget, 1)), step),
        ]
        compare(core, "Eight questions on 13 tiles: SFT", "samples", 48, ways, args.repeats, device)


# --- errors ---------------------------------------------------------------------------------------


def values_of(core: PackedModel, rows: Sequence[Sequence[Segment]], device) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all answers' tokens (n,), and gradients of their weighted sum by parameter, float32."""
    found, start = [], 0
    for row in rows:
        batch = to_device(packed(core, [row])[0], device)
        if "prefix_of" in batch:
            values = torch.cat(logprobs(core, batch))
        else:
            values = core(**batch, return_logprobs=True).target_logprobs
        weights = torch.arange(start, start + len(values), device=device).sin()  # of both signs
        ((values * weights).sum() / 100).backward()
        found.append(values.detach().float())
        start += len(values)
    return torch.cat(found), {name: gradient.cpu() for name, gradient in take_gradients(core).items()}


def errors(core: PackedModel, pixels: Tensor, ours: dict[str, Any], device) -> int:
    """Table of errors against float32 one by one; 1 where trees have more than twice those of bfloat16 one by one."""
    by = 8 if device.type != "cuda" else 1
    trees = [make_tree(core, pixels, 7, 100 // by, 1, 300 // by, n, seed) for seed, n in enumerate((2, 8))]
    one_by_one = [[alone] for alone in apart(trees)]
    torch.set_float32_matmul_precision("highest")
    expected = values_of(exact_twin(core, device), one_by_one, device)
    torch.set_float32_matmul_precision("high")
    gc.collect()
    names = ("one by one", "trees", "trees, compiled")
    rows = (one_by_one, [trees], [trees])
    found = {}
    for name, row in zip(names, rows, strict=True):
        with set_up(core, Way(name, [], packed_step, compiled="compiled" in name, **ours)):
            found[name] = values_of(core, row, device)
    print(
        f"\nErrors in {core.dtype} against float32 one by one: a pair and a group of eight, {len(expected[0])} tokens"
    )
    table = Table(
        ("way", 18), ("log-probabilities", 18), ("of bfloat16's", 13), ("gradients", 12), ("of bfloat16's", 13)
    )
    apart_by = {
        name: (relative(got[0], expected[0]), relative_of_all(got[1], expected[1])) for name, got in found.items()
    }
    base = apart_by[names[0]]
    for name, (of_values, of_gradients) in apart_by.items():
        table.row(
            name,
            f"{of_values:.2e}",
            f"{of_values / base[0]:.2f}",
            f"{of_gradients:.2e}",
            f"{of_gradients / base[1]:.2f}",
        )
    worst = max(value / own for pair in apart_by.values() for value, own in zip(pair, base, strict=True))
    return int(worst > 2)


def exact_twin(core: PackedModel, device: torch.device) -> PackedModel:
    """The same weights in float32, not compiled."""
    implementations = {"text_config": register_packed_attention("sdpa", device, torch.float32), "vision_config": "sdpa"}
    with device:
        model = type(core.model)._from_config(
            copy.deepcopy(core.model.config), attn_implementation=implementations | {"": "sdpa"}, dtype=torch.float32
        )
    model.load_state_dict(core.model.state_dict())
    return PackedModel(model).train()


# --- main -----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    small = device.type != "cuda"
    dtype = torch.float32 if small else torch.bfloat16
    kernel = select_kernel(args.kernel, device, dtype).name
    shape = args.shape or ("tiny" if small else "1b")
    print(versions(device))
    torch.set_float32_matmul_precision("high")
    core = make_model(shape, device, kernel, dtype)
    compile_blocks(core, recompute="language", backend="aot_eager" if small else "inductor")
    core.loss_kernels = {True: core.head.loss_kernel, False: select_loss_kernel("auto", device, dtype)}
    ours = {"attention": KERNELS[kernel].implementation, "tiles": use_tile_attention(core.model, KERNELS[kernel])}
    size = core.config.vision_config.image_size[0]
    pixels = torch.randint(256, (13, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    print(f"{shape}: {core.num_parameters() / 1e6:,.0f} M parameters, kernel {kernel}")
    speed(args, core, pixels, ours, device)
    return errors(core, pixels, ours, device) if "errors" in args.parts else 0


if __name__ == "__main__":
    sys.exit(main())
