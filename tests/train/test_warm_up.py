"""The warm-up: rows of all sizes before the first step, and nothing of them afterwards."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import native_samples as native
from helpers.launched import made_in
from helpers.model_samples import packed_batch, segment, tiny_packed
from helpers.pair_steps import objective_of, step
from helpers.stepping import run_ranks
from helpers.tree_samples import tree

from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.loss.preference import PreferenceLoss
from train.warm_up import CACHE, keep_compiled, made_up_row, row_shapes

STEPS = 4
WAYS = {
    "plain": {"drop_path_rate": 0.2},
    "zero1": {"deepspeed": "zero_stage1", "gradient_accumulation_steps": 2},
    "zero2": {"deepspeed": "zero_stage2", "gradient_accumulation_steps": 2},
    "zero3": {"deepspeed": "zero_stage3", "gradient_accumulation_steps": 2, "drop_path_rate": 0.2},
}


def test_shapes_go_from_the_full_row_to_one_token_with_and_without_tiles():
    assert row_shapes(40, 5, 4) == [(40, 5, 20), (20, 2, 10), (10, 1, 5), (5, 1, 2), (2, 0, 1), (1, 0, 0)]
    assert row_shapes(4, 8, 0) == [(4, 0, 2), (2, 0, 1), (1, 0, 0)], "a model without a vision tower"
    assert [tiles for _, tiles, _ in row_shapes(16384, 48, 256)][:7] == [48, 24, 12, 6, 3, 1, 1]


def test_a_made_up_row_is_a_batch_as_the_model_wants_it(tokenizer):
    model = tiny_packed(tokenizer)
    for tokens, tiles, targets in row_shapes(512, 16, model.tokens_per_tile):
        row = made_up_row(tokens, tiles, targets, model)
        assert row["input_ids"].shape == (1, tokens) and len(row["pixel_values"]) == tiles
        out = model(**row)  # which checks boundaries, positions and counts
        assert out.num_targets == row["num_loss_tokens"] == max(0, min(targets, tokens - len(row["cu_seqlens"]) + 1))


@pytest.mark.slow
def test_after_it_no_step_and_no_evaluation_of_pairs_is_compiled(tokenizer):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    packed, reference = tiny_packed(tokenizer), tiny_packed(tokenizer)
    for model in (packed, reference):
        compile_blocks(model, backend=counter)
    objective = objective_of(PreferenceLoss({"sigmoid": 1.0}), reference)
    for shape in row_shapes(128, 4, packed.tokens_per_tile):
        row = made_up_row(*shape, packed, pairs=True)
        objective.run(packed, row).backward()
        with torch.no_grad():
            objective.run(packed.eval(), row)
        packed.train()
    by_then = counter.frame_count
    for plans in ([("text", 5), ("image", 3)], [("text", 8)]), ([("text", 80)],), ([("image", 1), ("text", 1)],):
        batch = packed_batch([tree(tokenizer, plan, [2, 9], seed) for seed, plan in enumerate(plans)], pairs=True)
        step(objective, packed, batch)
        with torch.no_grad():
            objective.of(packed.eval(), batch)
        packed.train()
    assert counter.frame_count == by_then > 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_after_it_no_row_is_compiled_whatever_its_size(tokenizer):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    packed, counter = tiny_packed(tokenizer), CompileCounterWithBackend("eager")
    compile_blocks(packed, backend=counter)
    for shape in row_shapes(512, 16, packed.tokens_per_tile):
        packed(**made_up_row(*shape, packed)).loss.backward()
    by_then = counter.frame_count
    one_label = [("text", 30), ("answer", 1)]
    plans = [[("text", 1), ("answer", 1)], [("text", 9)], one_label, [("image", 1), ("text", 3), ("answer", 2)]]
    plans += [[("image", 16), ("text", 100), ("answer", 200)], [("text", 300), ("answer", 212)], [("answer", 1)]]
    for plan in plans:
        packed(**packed_batch([segment(tokenizer, plan)])).loss.backward()
    assert counter.frame_count == by_then > 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_after_it_no_row_with_windows_in_its_pictures_is_compiled():
    """Of native resolution: layers that see windows, and pictures, of any number and size."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    family = "qwen2_5_vl"
    tokenizer = native.native_tokenizer(family)
    packed, counter = native.tiny_packed(tokenizer, family), CompileCounterWithBackend("eager")
    compile_blocks(packed, backend=counter)
    for shape in row_shapes(256, 80, packed.tokens_per_tile):
        row = made_up_row(*shape, packed)
        assert sum(rows * columns for rows, columns in row["image_grids"]) == len(row["pixel_values"])
        packed(**row).loss.backward()
    by_then = counter.frame_count
    segments = native.segments_of(tokenizer, family)
    for some in (segments, *([each] for each in segments)):
        packed(**native.collated(tokenizer, family, some)).loss.backward()
    assert counter.frame_count == by_then > 0
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    made = made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)
    common = {"max_steps": STEPS, "lr_scheduler_type": "constant"}
    twice = {f"{name}{warm}": common | options for name, options in WAYS.items() for warm in ("", ", warm")}
    return run_ranks(made, twice, warm_up=tuple(name for name in twice if name.endswith(", warm")))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_run_is_the_same_after_it(name, runs):
    for cold, warm in zip(runs[name], runs[f"{name}, warm"], strict=True):
        assert warm["losses"] == cold["losses"]
        assert warm["norms"] == cold["norms"]
        assert warm["steps"] == cold["steps"], "weights, optimizer states and samples of each step"


def test_what_was_compiled_is_kept_beside_the_checkpoints(tmp_path, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    keep_compiled(tmp_path)
    assert all(os.environ[name].startswith(str(tmp_path / CACHE)) for name in names)
    monkeypatch.setenv(names[0], "/elsewhere")
    keep_compiled(tmp_path)
    assert os.environ[names[0]] == "/elsewhere", "the user's own"
