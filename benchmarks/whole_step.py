"""Where does a training step go? train/finetune.py itself, with random weights in the shape of a model.

    python benchmarks/whole_step.py --meta META.json --tokenizer DIR                           # 1B, ZeRO-1, one GPU
    python benchmarks/whole_step.py --meta META.json --tokenizer DIR --shape 8b8 --zero 3 --gpus 2
    python benchmarks/whole_step.py --meta META.json --tokenizer DIR --device cpu --gpus 2     # the script, in small

Options that this script does not know go to finetune.py and override what it is given here. On a GPU times are those of
its stream, between events that nobody waits for; on a CPU the host's. A step runs from the begin of its first forward
pass to that of the next one's:

    forward, backward     summed over micro-steps; with DeepSpeed gradients are reduced in the backward pass
    optimizer             norm, clipping, AdamW, new weights, and with ZeRO their exchange
    other                 what is left: logging, the next batch, idle device
    data                  of the host: for how long it waited for the step's batch, or for other ranks' word that they
                          have theirs (part of "other" where the device has run out of work by then)

"alone" is forward and backward of the same batches on the same weights, one after the other, in the same processes
after the last step; the ratio is that of whole steps' tokens/s to it, over steps' slowest ranks. With ZeRO-3 it holds
the gathering of weights. Steps that save a checkpoint are not among those measured: none is saved here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.finetune_runs import SHAPES, launcher, make_checkpoint, parser_of_runs, run_logged, training_options
from benchmarks.measuring import Table

PARTS = ("forward", "backward", "optimizer", "other")


class Clock:
    """Marks in the device's stream, and how far apart they are."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1e3 if self.on_cuda else later - earlier


class Marks(TrainerCallback):
    """Of each step: its rows, and marks around forward, backward and optimizer."""

    def __init__(self, trainer: Any, keep: int) -> None:
        self.trainer, self.clock, self.keep = trainer, Clock(trainer.args.device), keep
        self.steps: list[dict[str, Any]] = []
        self._watch("get_batch_samples", self._begin)
        self._watch("compute_loss", self._forward)

    def _watch(self, name: str, around: Any) -> None:
        method = getattr(self.trainer, name)
        setattr(self.trainer, name, lambda *args, **kwargs: around(method, *args, **kwargs))

    def _begin(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        batches, number = method(*args, **kwargs)
        if batches:
            from train.warm_up import compilations

            self.steps.append(
                {
                    "data": time.perf_counter() - started,
                    "forward": [],
                    "tokens": sum(b["num_real_tokens"] for b in batches),
                    "flops": self.trainer.metrics.cost(batches),
                    "inputs": [],
                    "compiled": compilations(),
                }
            )
            if len(self.steps) > self.keep:
                self.steps[-self.keep - 1]["inputs"] = []
        return batches, number

    def _forward(self, method: Any, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        # Kept as they are on the device: batches that are not let go would take new pinned memory for each, which
        # stops all launches meanwhile.
        self.steps[-1]["inputs"].append(inputs)
        begun = self.clock.mark()
        result = method(model, inputs, **kwargs)
        self.steps[-1]["forward"].append((begun, self.clock.mark()))
        return result

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self.trainer.model_wrapped
        if not hasattr(engine, "zero_optimization_stage"):
            return
        step = engine.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.on_pre_optimizer_step()
            result = step(*args, **kwargs)
            self.on_optimizer_step()
            return result

        engine.step = timed

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps[-1].setdefault("backward_end", self.clock.mark())

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps[-1].setdefault("optimizer_end", self.clock.mark())

    def parts(self) -> list[dict[str, float]]:
        """Seconds of each step but the last, which nothing comes after."""
        found, seconds = [], self.clock.seconds
        for step, following in zip(self.steps, self.steps[1:], strict=False):
            forward = step["forward"]
            whole = seconds(forward[0][0], following["forward"][0][0])
            part = {"forward": sum(seconds(*marks) for marks in forward)}
            part["backward"] = seconds(forward[0][0], step["backward_end"]) - part["forward"]
            part["optimizer"] = seconds(step["backward_end"], step["optimizer_end"])
            part["other"] = whole - sum(part.values())
            found.append(part | {"step": whole, **{name: step[name] for name in ("data", "tokens", "flops")}})
        return found


def one_rank(out: Path, measured: int, alone: bool, options: list[str]) -> None:
    """Train, then the same batches forward and backward alone; writes OUT/rank<r>.json."""
    from train.environment import prepare_environment, set_up_logging, shut_down
    from train.finetune import prepare
    from train.options import parse
    from train.warm_up import compilations, forward_and_backward

    prepare_environment()
    set_up_logging()
    log = BufferingHandler(capacity=10_000)
    logging.getLogger("train").addHandler(log)
    trainer = prepare(*parse(options)).trainer
    marks = Marks(trainer, measured + 1)
    trainer.add_callback(marks)
    with trainer.stop_request.listening():
        trainer.train()
    device = trainer.args.device
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    lines = [record.getMessage() for record in log.buffer]
    seen: dict[str, Any] = {"parts": marks.parts()[-measured:], "warm_up": [x for x in lines if "warm-up" in x]}
    seen["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9 if on_cuda else 0.0
    seen["compiled"] = compilations() - marks.steps[0]["compiled"]
    seen["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seen["alone"] = []
    if alone:
        steps = [step["inputs"] for step in marks.steps[-measured - 1 : -1]]
        for inputs in (steps[0], *steps):  # once to come to rest
            begun = marks.clock.mark()
            for row in inputs:
                forward_and_backward(trainer, row)
            seen["alone"].append((begun, marks.clock.mark()))
        if on_cuda:
            torch.cuda.synchronize(device)
        seen["alone"] = [marks.clock.seconds(*pair) for pair in seen["alone"][1:]]
    seen["card"] = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen), encoding="utf-8")
    shut_down()


# --- the parent process ---------------------------------------------------------------------------


def report(args: argparse.Namespace, ranks: list[dict[str, Any]]) -> None:
    from internvl_pack.model.flops import peak_flops

    table = Table(
        ("rank", 4), ("step ms", 8), *((part, 9) for part in PARTS), ("data", 7), ("alone", 8), ("peak GB", 8)
    )
    for number, rank in enumerate(ranks):
        parts, alone = rank["parts"], rank["alone"]
        means = (f"{statistics.mean(part[name] for part in parts) * 1e3:.1f}" for name in ("step", *PARTS, "data"))
        table.row(number, *means, f"{statistics.mean(alone) * 1e3:.1f}" if alone else "", f"{rank['peak_gb']:.1f}")
    steps = [max(part["step"] for part in parts) for parts in zip(*(rank["parts"] for rank in ranks), strict=True)]
    tokens, flops = (sum(part[key] for rank in ranks for part in rank["parts"]) for key in ("tokens", "flops"))
    peak = peak_flops(ranks[0]["card"])
    mfu = f", MFU {flops / sum(steps) / len(ranks) / peak:.1%}" if peak else ""
    median = statistics.median(steps)
    print(
        f"{len(steps)} steps: {tokens / sum(steps) / len(ranks):,.0f} useful tokens/s a GPU{mfu}; median "
        f"{median * 1e3:.0f} ms, slowest {max(steps) / median:.2f} of it; losses {ranks[0]['losses'][0]:.4f} to "
        f"{ranks[0]['losses'][-1]:.4f}"
    )
    if ranks[0]["alone"]:
        slowest = [max(times) for times in zip(*(rank["alone"] for rank in ranks), strict=True)]
        own = [sum(rank["alone"]) for rank in ranks]
        print(
            f"whole steps at {sum(slowest) / sum(steps):.3f} of forward and backward alone (the slowest rank of each "
            f"step; of the ranks' mean {statistics.mean(own) / sum(steps):.3f})"
        )
    compiled = max(rank["compiled"] for rank in ranks)
    print(
        f"graphs compiled since the first step: {compiled}; {' '.join(ranks[0]['warm_up']) or 'no warm-up'}", flush=True
    )


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--one_rank":
        one_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "alone", sys.argv[5:])
        return 0
    parser = parser_of_runs(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default 1b, on a CPU tiny")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="stage; 0: without DeepSpeed")
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured")
    parser.add_argument("--skip", type=int, default=3, help="steps before them")
    parser.add_argument("--no_alone", action="store_true", help="without forward and backward alone")
    parser.add_argument("--checkpoint", type=Path, help="folder for the random weights, found there the next time")
    parser.add_argument(
        "--output_dir", type=Path, help="of the run, where its compiler's cache is; default: thrown away"
    )
    args, more = parser.parse_known_args()
    args.shape = args.shape or ("tiny" if args.device == "cpu" else "1b")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        checkpoint = args.checkpoint or work / "checkpoint"
        found = (checkpoint / "config.json").is_file()
        if not found and not make_checkpoint(checkpoint, args.tokenizer, args.shape, args.device):
            return 1
        command = [*launcher(args.gpus), __file__, "--one_rank", str(work), str(args.steps)]
        command.append("no" if args.no_alone else "alone")
        options: dict[str, Any] = {"max_steps": args.skip + args.steps + 1, "log_freq": 0}
        if args.device == "cpu":
            options["dataloader_num_workers"] = 0
        if args.zero:
            options["deepspeed"] = f"zero_stage{args.zero}"
        command += [*training_options(args, checkpoint, args.output_dir or work / "run", **options), *more]
        if code := run_logged(command, args.log or work / "log", args.device):
            return code
        title = f"ZeRO-{args.zero}" if args.zero else "no DeepSpeed"
        print(f"\n{args.shape}, {title}, {args.gpus} process{'es' * (args.gpus > 1)} {' '.join(more)}")
        report(args, [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(args.gpus)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
