"""What the tests of sequence parallelism run on every rank: one process a rank, started once, many cases.

Each case trains one step on the same packs with and without a sequence group, and tells how far apart they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helpers.model_samples import (
    gradients,
    mixed_segments,
    packed_batch,
    relative_error,
    segment,
    text_segments,
    tiny_packed,
)
from helpers.tree_samples import trees
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.selfcheck import IsolationError, check_isolation
from internvl_pack.parallel import enable_sequence_parallel, make_groups
from internvl_pack.parallel.slices import count_slice_targets
from internvl_pack.testing.tiny import tiny_tokenizer

WORLD = 4
MODES = ("ulysses", "ring")


def packs(tokenizer) -> dict[str, list]:
    text, answer, image = (lambda n: ("text", n)), (lambda n: ("answer", n)), (lambda n: ("image", n))
    plans = {
        "shorter than the group": [[text(1), answer(1)], [answer(3)], [text(2), answer(1)], [image(1), answer(2)]],
        "one-token segments": [[text(1)], [text(3), answer(6)], [answer(1)], [text(1)], [image(2), answer(5)]],
        "one segment": [[text(3), image(3), text(5), answer(30), image(2), answer(13)]],
        "all images on one rank's slice": [[image(5), answer(3)], [text(30), answer(60)], [answer(51)]],
        "one tile": [[text(2), image(1), answer(5)], [text(9), answer(20)]],
        "labels at every boundary": [[answer(64)]],
        "no label": [[text(9), image(1), text(20)]],
    }
    made = {
        name: [segment(tokenizer, plan, seed) for seed, plan in enumerate(segments)] for name, segments in plans.items()
    }
    made["trees"] = [*trees(tokenizer), made["one tile"][1]]
    return made | {"mixed": mixed_segments(tokenizer), "text only": text_segments(tokenizer)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of the model and the row, and how many ranks share it in which modes."""

    pack: str = "mixed"
    model: dict[str, Any] = field(default_factory=dict)
    frozen_vision: bool = False
    checkpointing: bool = False
    compiled: bool = False
    collate: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (4,)
    modes: tuple[str, ...] = MODES

    @property
    def groups(self) -> list[tuple[str, int]]:
        return [(mode, size) for mode in self.modes for size in self.sizes]


PACKS = (
    "mixed",
    "shorter than the group",
    "one segment",
    "all images on one rank's slice",
    "text only",
    "one-token segments",
    "one tile",
    "labels at every boundary",
    "no label",
)
PACKS_OF_ALL_SIZES = PACKS[:4]
ONE_KV_HEAD = {"num_key_value_heads": 1}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_layers": 2}

CASES: dict[str, Case] = {
    **{name: Case(pack=name, sizes=(2, 4) if name in PACKS_OF_ALL_SIZES else (4,)) for name in PACKS},
    "frozen vision": Case(frozen_vision=True),
    "frozen vision, one tile": Case(frozen_vision=True, pack="one tile"),
    "gradient checkpointing": Case(checkpointing=True),
    "one key/value head": Case(model=ONE_KV_HEAD, pack="one segment"),
    "q and k norms": Case(model={"llm": "qwen3"}, sizes=(2,)),
    "experts": Case(model={"llm": "qwen3_moe"}, pack="one tile"),
    "tied embeddings": Case(model={"tie_word_embeddings": True}, sizes=(2,)),
    "padded row": Case(collate={"pad_to": 160}),
    "aligned segments": Case(collate={"pad_seq_to_mult": 8}),
    "square weighting": Case(collate={"loss_reduction": "square"}, pack="one segment"),
    "prefix trees": Case(pack="trees", modes=("ulysses",), sizes=(2, 4)),
    "sliding windows": Case(model=WINDOWS, modes=("ulysses",)),
    "fewer heads than ranks": Case(model=FEW_HEADS, modes=("ring",)),
}
# A group of one goes the same ways; tracing in four processes takes longer than all others together.
COMPILED = {"compiled": Case(compiled=True, checkpointing=True, modes=("ulysses",), sizes=(1,))}


class Rank:
    """One process: its groups, and what it has computed."""

    def __init__(self, world: int) -> None:
        self.tokenizer = tiny_tokenizer(["a tiny tokenizer of bytes"], vocab_size=400)
        self.packs = packs(self.tokenizer)
        sizes = [size for size in (1, 2, 4) if world % size == 0]
        self.groups = {(mode, size): make_groups(world, size, mode) for mode in MODES for size in sizes}

    def model(self, case: Case):
        packed = tiny_packed(self.tokenizer, **case.model)
        packed.head.chunk_tokens = 8
        if case.frozen_vision:
            packed.vision_modules[0].requires_grad_(False)
        if case.checkpointing:
            packed.gradient_checkpointing_enable()
        if case.compiled:
            compile_blocks(packed, backend="eager")
        return packed

    def batch(self, case: Case, pack: str | None = None) -> dict[str, Any]:
        return packed_batch(self.packs[pack or case.pack], **case.collate)

    def compare(self, case: Case) -> dict[str, dict[str, float]]:
        """Errors of the loss and of the worst gradient against the same model by itself, for each of the groups."""
        packed = self.model(case)
        batch = self.batch(case)
        alone, expected = step(packed, batch)
        found = {}
        for mode, size in case.groups:
            group = self.groups[mode, size]
            enable_sequence_parallel(packed, group)
            packed.sequence_group = group  # one rank is none to the function
            outputs, ours = step(packed, batch, num_slice_loss_tokens=count_slice_targets(batch, group))
            enable_sequence_parallel(packed, None)
            found[f"{mode} {size}"] = errors(alone, expected, outputs, ours, group.process_group)
        return found

    def data_and_sequence(self, mode: str) -> dict[str, float]:
        """Two groups of two ranks with unlike packs; gradients averaged over all four, as DeepSpeed does."""
        packed = self.model(CASES["mixed"])
        batches = [self.batch(CASES["mixed"], pack) for pack in ("mixed", "text only")]
        normalizer = sum(float(b["loss_weight"].sum()) for b in batches)
        expected: dict[str, torch.Tensor] = {}
        loss = 0.0
        for batch in batches:
            outputs, part = step(packed, batch, loss_normalizer=normalizer)
            loss += outputs.loss.item()
            expected = {name: g + expected.get(name, 0.0) for name, g in part.items()}
        group = self.groups[mode, 2]
        enable_sequence_parallel(packed, group)
        outputs, ours = step(packed, batches[group.dp_rank], loss_normalizer=normalizer / WORLD)
        total = outputs.loss.detach().clone()
        dist.all_reduce(total)
        worst = 0.0
        for name in expected:
            dist.all_reduce(ours[name])
            ours[name] /= WORLD
            worst = max(worst, gradient_error(name, ours, expected))
        return {"loss": abs(total.item() / WORLD - loss), "gradient": worst, "dp_rank": group.dp_rank}

    def activations(self, mode: str) -> float:
        """Bytes kept for the backward pass, of a rank of WORLD over one by itself."""
        packed = self.model(CASES["mixed"])
        plans = [[("text", 20), ("image", 4), ("answer", 92)], [("text", 60), ("image", 4), ("answer", 52)]]
        batch = packed_batch([segment(self.tokenizer, plan, seed) for seed, plan in enumerate(plans * 4)])
        alone = saved_bytes(packed, batch)
        enable_sequence_parallel(packed, self.groups[mode, WORLD])
        return saved_bytes(packed, batch) / alone

    def isolation(self, mode: str) -> dict[str, Any]:
        packed = self.model(CASES["mixed"])
        enable_sequence_parallel(packed, self.groups[mode, WORLD])
        check_isolation(packed)
        ran = {"sound": True, "leak": ""}
        attention = packed.language_model.layers[1].self_attn
        handle = attention.register_forward_pre_hook(one_segment, with_kwargs=True)
        try:
            check_isolation(packed)
        except IsolationError as error:
            ran["leak"] = error.component
        handle.remove()
        return ran

    def logits(self, mode: str) -> float:
        packed = self.model(CASES["mixed"]).eval()
        batch = {k: v for k, v in self.batch(CASES["mixed"]).items() if k not in ("labels", "loss_weight")}
        with torch.no_grad():
            alone = packed(**batch).logits
            enable_sequence_parallel(packed, self.groups[mode, WORLD])
            return relative_error(packed(**batch).logits, alone)


def saved_bytes(packed, batch) -> int:
    """Of the memory behind what a forward pass keeps for the backward, weights aside; the head keeps gradients."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in packed.parameters()}
    alive = []  # so that no two have one address

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(**batch).loss.backward()
    packed.zero_grad(set_to_none=True)
    return sum(kept.values())


def one_segment(_module, args, kwargs):
    """An attention layer that takes the row for one segment."""
    bounds = kwargs["cu_seq_lens_q"][[0, -1]]
    return args, kwargs | {"cu_seq_lens_q": bounds, "max_length_q": int(bounds[-1])}


def step(packed, batch, **options):
    outputs = packed(**batch, **options)
    outputs.loss.backward()
    found = gradients(packed)
    trained = {name for name, p in packed.named_parameters() if p.requires_grad}
    assert set(found) == trained, f"no gradient: {sorted(trained - set(found))}"
    packed.zero_grad(set_to_none=True)
    return outputs, found


def gradient_error(name, ours, expected) -> float:
    """Norm of the difference over the norm.

    Without rotary positions a key's bias changes no probability: its gradient is rounding alone, and is held against
    that of the query's bias.
    """
    like = name.replace("k_proj.bias", "q_proj.bias") if "vision_tower" in name else name
    difference = (ours[name] - expected[name]).norm()
    return (difference / expected[like].norm().clamp(min=1e-30)).item() if difference > 0 else 0.0


def errors(alone, expected, outputs, ours, process_group) -> dict[str, float]:
    sums = torch.stack([outputs.loss.detach(), outputs.weighted_sum, outputs.weight_sum, outputs.ce_sum])
    counts = outputs.num_targets.clone()
    for tensor in (sums, counts):
        dist.all_reduce(tensor, group=process_group)
    theirs = torch.stack([alone.loss.detach(), alone.weighted_sum, alone.weight_sum, alone.ce_sum])
    positions: list[Any] = [None] * dist.get_world_size(process_group)
    own = (outputs.target_positions.tolist(), outputs.target_losses.tolist())
    dist.all_gather_object(positions, own, group=process_group)
    by_place = {p: loss for at, losses in positions for p, loss in zip(at, losses, strict=True)}
    assert sorted(by_place) == alone.target_positions.tolist() and len(by_place) == int(counts)
    losses = torch.tensor([by_place[p] for p in sorted(by_place)])
    worst = ("", 0.0)
    for name in expected:
        dist.all_reduce(ours[name], group=process_group)
        worst = max(worst, (name, gradient_error(name, ours, expected)), key=lambda pair: pair[1])
    return {
        "loss": abs((sums - theirs)[0].item()),
        "sums": ((sums - theirs).abs() / theirs.abs().clamp(min=1.0)).max().item(),
        "target_losses": (losses - alone.target_losses).abs().max().item() if len(losses) else 0.0,
        "gradient": worst[1],
        "where": worst[0],
    }


def run(what: dict[str, Any]) -> None:
    """One rank of the table of cases named, and of the other checks if they are asked for; the first writes what was
    found to `out`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    this = Rank(dist.get_world_size())
    cases: dict[str, Case] = {"CASES": CASES, "COMPILED": COMPILED}[what["cases"]]
    found: dict[str, Any] = {}
    for name, case in cases.items():
        found |= {f"{key}: {name}": errors_of_case for key, errors_of_case in this.compare(case).items()}
    for mode in MODES if what["with_checks"] else ():
        found[f"data and sequence: {mode}"] = this.data_and_sequence(mode)
        found[f"isolation: {mode}"] = this.isolation(mode)
        found[f"logits: {mode}"] = this.logits(mode)
        found[f"activations: {mode}"] = this.activations(mode)
    if dist.get_rank() == 0:
        with open(what["out"], "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()
