"""Before the first step: every shape of row that a run can meet goes once through forward and backward.

A compiled layer is compiled for ranges of sizes: Inductor chooses another kernel where a row has few tokens or few
tiles, and one token, one tile or one label are cases of their own. Met in training, each costs seconds to minutes on
every rank, whenever the first such row comes. Here they are met before, on made-up rows: a full one, then halves of it
down to a single token, with tiles, with one, and without.

Nothing of it stays: no gradient, no state of a random generator, nothing of the optimizer or of the data.

What was compiled is kept in the output folder, so that a run that goes on has it at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.batch.loss_weights import IGNORE_INDEX
from internvl_pack.model.packed import PackedModel

if TYPE_CHECKING:
    from .trainer import PackTrainer

logger = logging.getLogger(__name__)

CACHE = "compiler_cache"  # folder within the output folder


def keep_compiled(output_dir: str | Path) -> None:
    """Let compilers keep what they make beside the checkpoints, unless the environment says where; called first."""
    folder = Path(output_dir).absolute() / CACHE
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def compilations() -> int:
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


def row_shapes(max_tokens: int, max_tiles: int, tokens_per_tile: int) -> list[tuple[int, int, int]]:
    """(tokens, tiles, labelled targets) of the rows to warm up with: the fullest first.

    >>> row_shapes(16384, 48, 256)[:3]
    [(16384, 48, 8192), (8192, 24, 4096), (4096, 12, 2048)]
    >>> row_shapes(16384, 48, 256)[-3:]
    [(4, 0, 2), (2, 0, 1), (1, 0, 0)]
    """
    shapes, tokens, tiles = [], max_tokens, max_tiles
    while tokens:
        tiles = min(tiles, tokens // tokens_per_tile) if tokens_per_tile else 0
        shapes.append((tokens, tiles, tokens // 2))
        tokens, tiles = tokens // 2, max(1, tiles // 2)
    return shapes


def made_up_row(tokens: int, tiles: int, targets: int, model: PackedModel, *, pairs: bool = False) -> dict[str, Any]:
    """A batch of one row, as the loader would give it: half of it or more one sample, the rest samples of a few
    tokens.

    Args:
        tokens, tiles, targets: of row_shapes.
        pairs: the first is the prefix of the others, which are answers two by two.
    """
    generator = torch.Generator().manual_seed(tokens)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=generator)
    pixels = None
    if model.tower is not None:
        image_id, size = model.config.image_token_id, model.tower.tile_size
        ids = model.as_text(ids)
        ids[0, : tiles * model.tokens_per_tile] = image_id
        pixels = torch.randint(256, (tiles, 3, *size), dtype=torch.uint8, generator=generator)
    rest = tokens // 3 if pairs else tokens // 2  # of equal sizes the compiler would take that they always are
    first = tokens - rest if tokens >= 4 else tokens
    lengths = [first, *[SHORT] * ((tokens - first) // SHORT)]
    if left := tokens - sum(lengths):
        lengths.append(left)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    labelled = torch.ones(tokens, dtype=torch.bool)
    labelled[starts[:-1]] = False  # the first token of a sample is predicted by nothing
    labels = torch.full_like(ids, IGNORE_INDEX)
    places = labelled.nonzero().squeeze(1)[:targets]
    labels[0, places] = ids[0, places]
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    links: dict[str, Any] = {}
    answers = len(lengths) - 1
    if pairs:
        links["pairs"] = torch.arange(1, answers - answers % 2 + 1, dtype=torch.int32).view(-1, 2)
    if pairs and answers:
        links["prefix_of"] = torch.tensor([-1, *[0] * answers], dtype=torch.int32)
        position_ids[first:] += first
    if model.grid_positions:
        links["image_grids"] = made_up_grids(tiles)
    return links | {
        "input_ids": ids,
        "labels": labels,
        "position_ids": position_ids.expand(3, 1, -1) if model.grid_positions else position_ids[None],
        "loss_weight": (labels != IGNORE_INDEX).float(),
        "cu_seqlens": starts.int(),
        "max_seqlen": max(lengths),
        "pixel_values": pixels,
        "num_loss_tokens": len(places),
        "num_image_tokens": tiles * model.tokens_per_tile if model.has_vision else 0,
    }


# Tokens of each of the made-up samples but the first.
SHORT = 128
SIDE = 16  # tokens along a made-up picture of native resolution


def made_up_grids(tiles: int) -> list[tuple[int, int]]:
    """(rows, columns) of pictures of SIDE x SIDE tokens, and of one of what is left."""
    squares, left = divmod(tiles, SIDE**2)
    return [(SIDE, SIDE)] * squares + ([(1, left)] if left else [])


class WarmUp(TrainerCallback):
    """Runs the rows of `row_shapes` when model and optimizer are ready, and says how long it took."""

    def __init__(self, trainer: PackTrainer, max_tokens: int, max_tiles: int) -> None:
        self.trainer, self.budget = trainer, (max_tokens, max_tiles)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        model, started, before = self.trainer.packed_model, time.perf_counter(), compilations()
        shapes = row_shapes(*self.budget, model.tokens_per_tile if model.has_vision else 0)
        for shape in shapes:
            row = made_up_row(*shape, model, pairs=self.trainer.objective is not None)
            forward_and_backward(self.trainer, row)
            if args.eval_strategy != "no":
                _evaluate(self.trainer, row)
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        logger.info(
            "warm-up: %d rows of %s tokens and %d tiles down to 1 token, %d graphs compiled, %.0f s",
            *(len(shapes), f"{shapes[0][0]:,}", shapes[0][1]),
            *(compilations() - before, time.perf_counter() - started),
        )


def forward_and_backward(
    trainer: PackTrainer, batch: dict[str, Any], between: Callable[[], None] = lambda: None
) -> None:
    """Those of a row, as in a step, leaving nothing behind; all ranks call it together.

    Args:
        between: called between forward and backward.
    """
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    inputs = trainer._prepare_inputs(batch)
    wrapped: Any = trainer.model_wrapped
    model = trainer.packed_model
    with torch.random.fork_rng(devices), trainer.compute_loss_context_manager():
        wrapped.train()
        if trainer.args.sharding:
            loss = _loss(trainer, wrapped, inputs)
            between()
            loss.backward()
            wrapped.zero_grad(set_to_none=True)
            return
        stage = getattr(wrapped, "zero_optimization_stage", None)
        if stage is None or stage() != 3:
            # Gradients are asked for, not accumulated: neither DDP's nor DeepSpeed's hooks, which reduce them, hear.
            loss = _loss(trainer, model, inputs)
            between()
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, trained, allow_unused=True)
            return
        wrapped.set_gradient_accumulation_boundary(False)
        loss = _loss(trainer, wrapped, inputs)
        between()
        wrapped.backward(loss, scale_wrt_gas=False)
        zero = wrapped.optimizer
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        zero._pre_step()  # the next gradients are written over these, not added


def _evaluate(trainer: PackTrainer, batch: dict[str, Any]) -> None:
    """A row as an evaluation runs it: without gradients layers are compiled once more."""
    model, inputs = trainer.model_wrapped, trainer._prepare_inputs(batch)
    model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        _loss(trainer, model, inputs)
    model.train()


def _loss(trainer: PackTrainer, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    if trainer.objective is not None:
        return trainer.objective.run(model, inputs)
    return model(**inputs, loss_normalizer=1.0)["loss"]
