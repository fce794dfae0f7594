"""Weak scaling of whole training steps (forward, backward, optimizer) with DeepSpeed ZeRO, on lengths of the real mix.

    for n in 1 2; do torchrun --nproc_per_node $n benchmarks/scaling.py --stage 1; done
    for n in 1 2; do torchrun --nproc_per_node $n benchmarks/scaling.py --stage 3; done
    torchrun --nproc_per_node 2 benchmarks/scaling.py --device cpu --stage 1      # the script itself, in small

All ranks share one plan; a rank has as many samples whatever their number. With `--groups` of several values each is
measured on the same engine: 1 trains the packs of a step in groups of like cost, as training does, 0 as they come.
Efficiency is useful tokens/s/GPU over that of one rank. "Even" is mean over largest of the ranks' operations in a step
(model/flops.py), averaged over steps: what is lost to the slowest at best.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import peak_gb, seconds_of
from benchmarks.train_step import Sample, draw_samples, make_batches, make_model, packed_step, to_device
from internvl_pack.config import PackingConfig
from internvl_pack.estimate.simulate import LengthTable
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.flops import flop_counts
from internvl_pack.packing.cost import CostModel
from internvl_pack.plan.groups import StepPlan, deal
from internvl_pack.plan.online import OnlinePacks

EVERY_ROW = 10**12  # tokens; the pool holds many packs, so all rows of the mix stand ready


def rank_packs(
    samples: list[Sample], budget: tuple[int, int], rank: int, num_ranks: int, balanced: bool, num_steps: int
) -> list[list[Sample]]:
    """This rank's packs of the first steps of an epoch of these samples."""
    tokens, tiles = (np.array([getattr(s, name) for s in samples], np.int64) for name in ("num_tokens", "num_tiles"))
    lengths = LengthTable(tokens, tiles)
    config = PackingConfig(max_packed_tokens=budget[0], num_images_expected=budget[1])
    packs = OnlinePacks(lengths, lengths.mixture(), config, CostModel.from_name("1B"))
    plan = StepPlan(packs, num_ranks, seed=0, epoch=0, balanced=balanced)
    shares = (deal(step, num_ranks)[rank] for step in islice(plan, num_steps))
    return [[samples[f.position] for f in pack.fragments] for share in shares for batch in share for pack in batch]


def train(engine: Any, batch: dict[str, Any], device: torch.device) -> None:
    engine.backward(packed_step(engine, to_device(batch, device)))
    engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--budget", type=int, nargs=2, default=[8192, 40], metavar=("TOKENS", "TILES"))
    parser.add_argument("--steps", type=int, default=12, help="measured, after 2 to warm up")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--compile", action="store_true", help="not with stage 3")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    small = args.device == "cpu"
    if small:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops
    import torch.distributed as dist

    if small:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for half a minute otherwise
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu") if small else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not small:
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if small else "nccl")
    dtype = torch.float32 if small else torch.bfloat16
    core = make_model("tiny" if small else "1b", device, args.kernel, dtype)
    if args.compile:
        compile_blocks(core, backend="aot_eager" if small else "inductor")
    counts = flop_counts(core.config)
    tokens, tiles = (512, 40) if small else args.budget
    config = {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": not small},
        "zero_optimization": {"stage": args.stage, "overlap_comm": True, "contiguous_gradients": True},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-6, fused=not small)
    engine, *_ = deepspeed.initialize(model=core, optimizer=optimizer, config=config)
    size = core.config.vision_config.image_size[0]
    pixels = torch.randint(256, (tiles, 3, size, size), dtype=torch.uint8)
    for groups in args.groups:
        count = args.steps + 2
        scale = 16 if small else 1
        samples = draw_samples(EVERY_ROW, tokens * scale, tiles, seed=100, scale=scale) * world
        fit = [s for s in samples if s.num_tokens <= tokens]
        packs = rank_packs(fit, (tokens, tiles), rank, world, bool(groups), count)
        assert len(packs) == count, "a rank with fewer packs would leave the others waiting"
        batches = make_batches(packs, core, pixels, padded=False)
        seconds, useful, costs = [], [], []
        for step, batch in enumerate(islice(batches, count)):
            dist.barrier()
            spent = seconds_of(partial(train, engine, batch, device), device)
            if step >= 2:
                seconds.append(spent)
                useful.append(batch["num_real_tokens"])
                costs.append(counts.of(batch))
        everyones = [torch.zeros(len(costs), dtype=torch.float64, device=device) for _ in range(world)]
        dist.all_gather(everyones, torch.tensor(costs, dtype=torch.float64, device=device))
        by_rank = torch.stack(everyones)
        even = (by_rank.mean(0) / by_rank.max(0).values).mean().item()
        own = torch.tensor([sum(seconds), sum(useful)], dtype=torch.float64, device=device)
        slowest, total = own.clone(), own.clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        if rank == 0:
            print(
                f"ZeRO-{args.stage}, {world} GPU{'s' * (world > 1)}, {tokens}/{tiles}, groups {groups}: "
                f"{total[1].item() / slowest[0].item() / world:,.0f} useful tokens/s/GPU, step "
                f"{statistics.median(seconds) * 1e3:.0f} ms (median of {len(seconds)}), even {even:.3f}, "
                f"peak {peak_gb(device):.1f} GB",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
