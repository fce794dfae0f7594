"""Mixtures of experts: the ways to multiply them agree, and the routers' sums do not depend on the packing."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from helpers.model_samples import (
    gradients,
    mixed_segments,
    packed_batch,
    padded_batch,
    segment,
    text_segments,
    tiny_packed,
)
from helpers.ranks import run

from internvl_pack.errors import UserError
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.experts import choose_experts, expert_blocks, real_tokens
from internvl_pack.testing.tiny import tiny_tokenizer
from train.router_loss import RouterLoss


def moe(tokenizer, experts="eager", **settings):
    packed = tiny_packed(tokenizer, "qwen3_moe", **settings)
    choose_experts(packed.language_model, experts)
    return packed


def assert_alike(found, wanted, what=""):
    """Within 1e-5 of each gradient's norm; the bias of keys has none but rounding, whose size the largest one gives."""
    assert found.keys() == wanted.keys()
    rounding = 1e-7 * max(gradient.norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + rounding, (what, name)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_every_product_of_experts_gives_the_loss_and_gradients_of_the_loop(tokenizer, experts):
    batch = packed_batch(mixed_segments(tokenizer))
    loop, other = moe(tokenizer), moe(tokenizer, experts)
    expected, found = loop(**batch).loss, other(**batch).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    found.backward()
    assert_alike(gradients(other), gradients(loop))


@pytest.mark.slow
def test_layers_of_experts_compile(tokenizer):
    batch = packed_batch(mixed_segments(tokenizer))
    plain, compiled = moe(tokenizer, "grouped_mm"), moe(tokenizer, "grouped_mm")
    compile_blocks(compiled, backend="aot_eager")
    assert compiled(**batch).loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    for model in (plain, compiled):
        model(**batch).loss.backward()
    assert_alike(gradients(compiled), gradients(plain))


def test_a_loop_over_experts_is_not_compiled(tokenizer):
    with pytest.raises(UserError, match="--compile with --experts_implementation eager"):
        compile_blocks(moe(tokenizer), backend="eager")


@pytest.mark.parametrize(
    "llm, experts, message",
    [
        ("qwen3", "grouped_mm", "'qwen3' language model has no experts"),
        ("qwen3_moe", "fast", "choose from auto, eager"),
    ],
)
def test_a_choice_that_there_is_not(tokenizer, llm, experts, message):
    with pytest.raises(UserError, match=f"--experts_implementation {experts}: .*{message}"):
        choose_experts(tiny_packed(tokenizer, llm).language_model, experts)


def test_a_balance_loss_needs_experts(tokenizer):
    with pytest.raises(UserError, match="--router_loss_coef: a 'qwen2' language model has no experts"):
        tiny_packed(tokenizer).balance_routers()


# --- sums of the routers --------------------------------------------------------------------------


def balanced(tokenizer, **settings):
    packed = moe(tokenizer, "grouped_mm", **settings)
    packed.balance_routers()
    return packed.train()


def sums(packed, batch, **options):
    found = packed(**batch, routing_only=True, **options)
    assert found.loss is None and found.logits is None
    return found.router_counts, found.router_probabilities


def sums_by_hand(packed, segments):
    """A sample at a time from the routers' own outputs, by the definition."""
    routers = [block.gate for block in expert_blocks(packed.language_model)]
    counts = torch.zeros(len(routers), routers[0].num_experts)
    probabilities = torch.zeros_like(counts)
    for one in segments:
        seen = []
        hooks = [router.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out)) for router in routers]
        packed(**packed_batch([one]))
        for hook in hooks:
            hook.remove()
        for layer, (logits, _, chosen) in enumerate(seen):
            for token_logits, experts in zip(logits, chosen, strict=True):
                probabilities[layer] += torch.softmax(token_logits.detach(), dim=0)
                for expert in experts.tolist():
                    counts[layer, expert] += 1
    return counts, probabilities


def test_sums_are_of_all_tokens_of_samples_however_they_are_packed(tokenizer):
    packed, segments = balanced(tokenizer), mixed_segments(tokenizer)
    counts, probabilities = sums_by_hand(packed, segments)
    tokens = sum(len(s.input_ids) for s in segments)
    assert counts.sum(dim=1).tolist() == [2 * tokens] * 2 and probabilities.sum().item() == pytest.approx(2 * tokens)
    long, short = packed_batch(segments, pad_to=512), packed_batch(segments, pad_seq_to_mult=8, pad_to=512)
    for name, batch in {"packed": packed_batch(segments), "pad segment": long, "pads in segments": short}.items():
        found = sums(packed, batch)
        assert torch.equal(found[0], counts), name
        assert torch.allclose(found[1], probabilities, rtol=1e-5, atol=1e-5), name
    found = sums(packed, padded_batch(segments))
    assert torch.equal(found[0], counts) and torch.allclose(found[1], probabilities, rtol=1e-5, atol=1e-5)


def test_a_row_without_samples_counts_nothing(tokenizer):
    packed = balanced(tokenizer)
    counts, probabilities = sums(packed, packed_batch([]))
    assert not counts.any() and not probabilities.any()


def test_real_tokens_are_distinguished_from_both_kinds_of_pads():
    """Segments of 3 and 2 tokens, each padded to a multiple of 4, and a pad segment of 4."""
    mask = real_tokens(torch.zeros(1, 12), 5, torch.tensor([0, 3, 5, 9]), torch.tensor([0, 4, 8, 12]), None)
    assert mask.int().tolist() == [[1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]]
    mask = real_tokens(torch.zeros(1, 9), 5, torch.tensor([0, 3, 5, 9]), None, None)
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_the_same_with_checkpointing_and_compiled(tokenizer, compiled):
    batch = packed_batch(mixed_segments(tokenizer))
    found = []
    for checkpointed in (False, True):
        packed = balanced(tokenizer)
        if checkpointed:
            packed.gradient_checkpointing_enable()
        if compiled and checkpointed:
            compile_blocks(packed, backend="aot_eager")
        counts, probabilities = sums(packed, batch)
        (counts * probabilities).sum().backward()
        found.append(gradients(packed))
    assert any("gate" in name for name in found[0])
    assert_alike(*found)


# --- the loss of a step ---------------------------------------------------------------------------

COEFFICIENT = 0.7


def step_gradients(packed, rows):
    """Loss and gradients of one optimizer step of a process, its micro-batches one after the other."""
    packed.zero_grad()
    router = RouterLoss(COEFFICIENT, processes=1)
    router.begin_step(rows, sum(row["num_real_tokens"] for row in rows))
    normalizer = sum(row["loss_weight"].sum() for row in rows)
    total = 0.0
    for row in rows:
        router.before_forward(packed, dict)
        out = packed(**row, loss_normalizer=normalizer)
        loss = out.loss + router.of(out)
        loss.backward()
        total += loss.item()
    return total, router.last(), gradients(packed)


def loss_by_hand(packed, segments):
    counts, probabilities = sums_by_hand(packed, segments)
    tokens = sum(len(s.input_ids) for s in segments)
    layers = [4 * (c / tokens * p / tokens).sum().item() for c, p in zip(counts, probabilities, strict=True)]
    return float(np.mean(layers))


@pytest.mark.slow
def test_the_loss_and_its_gradients_do_not_depend_on_packing_or_accumulation(tokenizer):
    packed, segments = balanced(tokenizer), mixed_segments(tokenizer)
    packed.gradient_checkpointing_enable()
    one_row = [packed_batch(segments)]
    ways = {
        "two micro-batches": [packed_batch(segments[:3]), packed_batch(segments[3:])],
        "one sample each, last first": [packed_batch([s]) for s in reversed(segments)],
        "padded to the budget, an empty row among them": [packed_batch(segments, pad_to=512), packed_batch([])],
    }
    total, router, expected = step_gradients(packed, one_row)
    assert router == pytest.approx(loss_by_hand(packed, segments), rel=1e-5)
    assert total == pytest.approx(packed(**one_row[0]).loss.item() + COEFFICIENT * router, rel=1e-5)
    for name, rows in ways.items():
        found = step_gradients(packed, rows)
        assert found[:2] == pytest.approx((total, router), rel=1e-5), name
        assert_alike(found[2], expected, name)


def test_the_mean_of_each_rows_own_loss_would_be_another_number(tokenizer):
    packed, segments = balanced(tokenizer), mixed_segments(tokenizer)
    whole = loss_by_hand(packed, segments)
    assert np.mean([loss_by_hand(packed, [s]) for s in segments]) != pytest.approx(whole, rel=1e-2)


# --- ZeRO-3 on two processes ----------------------------------------------------------------------

STEPS = 2


def zero3_model_and_rows(rank):
    """Rank 0 has several samples, rank 1 the same token over and over: all of it goes to one expert of each layer."""
    tokenizer = tiny_tokenizer(["a tiny tokenizer of bytes"], vocab_size=400)
    packed = balanced(tokenizer, num_experts_per_tok=1)
    packed.gradient_checkpointing_enable()
    alike = text_segments(tokenizer)[0]
    alike.input_ids[:] = 7
    alike.labels[alike.labels != -100] = 7
    mixed, text = mixed_segments(tokenizer), text_segments(tokenizer)
    steps = [[(mixed, [alike]), (text, [alike])], [(text, [alike]), (mixed[:3], [alike])]]
    return packed, [[packed_batch(row[rank]) for row in step] for step in steps]


def train(model, rows_of_ranks, step, processes, over_ranks):
    """Losses of the steps; `rows_of_ranks` are the rows of each step that this process trains."""
    router = RouterLoss(COEFFICIENT, processes)
    losses = []
    for rows in rows_of_ranks:
        tokens = over_ranks(torch.tensor(float(sum(row["num_real_tokens"] for row in rows)))).item()
        normalizer = over_ranks(sum(row["loss_weight"].sum() for row in rows)) / processes
        router.begin_step(rows, tokens)
        total = torch.zeros(())
        for row in rows:
            router.before_forward(model, dict)
            out = model(**row, loss_normalizer=normalizer)
            loss = out.loss + router.of(out)
            total += step(loss)
        losses.append(over_ranks(total).item() / processes)
    return losses, router.last()


def zero3_rank(out):
    import deepspeed
    from torch import distributed as dist

    from internvl_pack.model.experts import gather_experts_together

    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    packed, rows = zero3_model_and_rows(rank)
    gather_experts_together(packed.language_model)
    chosen = []
    for block in expert_blocks(packed.language_model):
        block.gate.register_forward_hook(lambda m, a, output: chosen.append(len(output[2].unique())))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=packed, optimizer=optimizer, config=config)

    def over_ranks(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    def step(loss):
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        return loss.detach()

    found = train(engine, rows, step, 2, over_ranks)
    assert set(chosen) == {1} if rank == 1 else max(chosen) > 1, chosen
    if rank == 0:
        with open(out, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


@pytest.mark.slow
def test_zero3_ranks_that_route_to_unlike_experts_train_as_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    out = tmp_path / "losses.json"
    run(f"{__file__}:zero3_rank", str(out), 2, tmp_path / "log")
    packed, _ = zero3_model_and_rows(0)
    of_ranks = [zero3_model_and_rows(rank)[1] for rank in range(2)]
    rows = [one + other for one, other in zip(*of_ranks, strict=True)]
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.1)
    numbers = iter([1, 2, 3, 4] * STEPS)  # micro-batches of a step: the last one steps

    def step(loss):
        loss.backward()
        if next(numbers) == 4:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    losses, router = train(packed, rows, step, 1, lambda value: value.detach().clone())
    found = json.loads(out.read_text())
    assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(router, rel=1e-5)
    assert losses[0] != losses[1]


def test_a_segment_of_one_token_over_and_over_goes_to_one_expert(tokenizer):
    """What the test above rests on."""
    packed = balanced(tokenizer, num_experts_per_tok=1)
    one = segment(tokenizer, [("text", 6), ("answer", 3)])
    one.input_ids[:] = 7
    counts, _ = sums(packed, packed_batch([one]))
    assert ((counts == 0) | (counts == 9)).all() and (counts == 9).sum() == 2
