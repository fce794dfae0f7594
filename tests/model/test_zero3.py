"""Rows that differ in everything under DeepSpeed ZeRO-3: the ranks still make the same collective calls."""

from __future__ import annotations

import json
import os

import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, segment, text_segments, tiny_packed
from helpers.ranks import run

from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.testing.tiny import tiny_tokenizer

STEPS = 3
CHUNK = 8  # labelled tokens a chunk of the head: rank 0 needs several, rank 1 one or none
LEARNING_RATE = 1e-3


def model_and_rows(rank: int):
    """The model, and each rank's row of each step: images and many labels here, none of either there."""
    tokenizer = tiny_tokenizer(["a tiny tokenizer of bytes"], vocab_size=400)
    packed = tiny_packed(tokenizer, tie_word_embeddings=True)
    packed.head.chunk_tokens = CHUNK
    packed.gradient_checkpointing_enable()
    mixed, text = mixed_segments(tokenizer), text_segments(tokenizer)
    unlabelled = [segment(tokenizer, [("text", 6)])]
    rows = [[mixed, text[:1]], [mixed[:2], unlabelled], [text, mixed]]
    return packed, [packed_batch(step[rank]) for step in rows]


def plain_losses() -> list[float]:
    """Both ranks' rows in one process, loss over the sum of weights of both."""
    packed, _ = model_and_rows(0)
    rows = list(zip(*(model_and_rows(rank)[1] for rank in range(2)), strict=True))
    optimizer = torch.optim.AdamW(packed.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in rows:
        normalizer = sum(batch["loss_weight"].sum() for batch in step)
        loss = sum(packed(**batch, loss_normalizer=normalizer).loss for batch in step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero3_rank(out: str) -> None:
    import deepspeed
    from torch import distributed as dist

    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    packed, rows = model_and_rows(rank)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(packed.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=packed, optimizer=optimizer, config=config)
    check_isolation(engine)
    losses = []
    for batch in rows:
        normalizer = batch["loss_weight"].sum()
        dist.all_reduce(normalizer)
        loss = engine(**batch, loss_normalizer=normalizer / 2).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(losses, file)
    dist.destroy_process_group()


@pytest.mark.slow
def test_zero3_ranks_with_unlike_rows_train_as_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    out = tmp_path / "losses.json"
    run(f"{__file__}:zero3_rank", str(out), 2, tmp_path / "log")
    expected = plain_losses()
    assert len(set(expected)) == STEPS
    assert json.loads(out.read_text()) == pytest.approx(expected, rel=1e-5)
