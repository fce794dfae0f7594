"""What became of the samples, and the files that say so.

    train_summary.json           what was trained, how full rows were, how fast, and the ledger; at the end
    quarantine.jsonl             every sample that left the run, with its reason: one JSON object a line
    sample_ids/rank00000.jsonl   with --log_sample_ids, the samples of every optimizer step, a file a data rank

    {"id": "coyo/1841", "source": "coyo.jsonl:line 1842", "reason": "image_truncated", "detail": "...",
     "epoch": 0, "step": 17}
    {"step": 12, "epoch": 0, "ids": ["coyo/1841", "docs/7#2/3"]}

"docs/7#2/3" is the second of three fragments. The first rank writes quarantine.jsonl, at checkpoints and at ends of
epochs; samples that leave again on the way to where a resumed run had stopped are not written twice. sample_ids is
written as the steps are made, so that a loss spike, or a run that died, can be traced to its data; a run that resumes
first takes back the lines of the steps after its checkpoint, of all ranks that there were.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.batch.collate import NO_SAMPLES
from internvl_pack.errors import UserError
from internvl_pack.ledger import Ledger, Losses
from internvl_pack.options import count
from internvl_pack.stream.loader import PackLoader

from .metrics import tokens_per_second
from .ranks import Ranks

if TYPE_CHECKING:
    from .trainer import PackTrainer

SUMMARY = "train_summary.json"
QUARANTINE = "quarantine.jsonl"
SAMPLE_IDS = "sample_ids"
LAST_STEPS = 10  # steps whose mean is the last loss: single steps differ by what is in them
_KEY = ("id", "reason", "epoch")


# --- ledgers


class Ledgers(TrainerCallback):
    """The ledger of each epoch of a run. All ranks call what reads it together.

    Attributes:
        epochs: of the epochs that this process saw end.
        earlier, num_earlier: the sum of those that had ended before the checkpoint that the run goes on from.
    """

    def __init__(self, loader: PackLoader, ranks: Ranks) -> None:
        self.loader, self.ranks = loader, ranks
        self.epochs: list[Ledger] = []
        self.earlier, self.num_earlier = Ledger(), 0
        self._begun = 0

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begun += 1

    def end_epoch(self) -> None:
        """The epoch's ledger is closed.

        Raises:
            UserError: no sample of it could be trained on.
        """
        if self.loader.epoch < self.num_ended:  # the checkpoint was written after its end, with its ledger
            self._begun -= 1
            return
        ledger = self.of_epoch()
        for source in self.loader.packed_dataset.samples.sources:
            for damage in source.damage:  # broken parts of files, which belong to no row
                ledger.refuse(damage.reason)
        ledger.check()
        self.epochs.append(ledger)
        if not ledger.samples_packed:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted((ledger.dropped + ledger.quarantined).items()))
            raise UserError(f"no sample of the data can be trained on ({reasons}): quarantine.jsonl names them")

    @property
    def num_ended(self) -> int:
        """Epochs of the run that have ended, those before a resume included."""
        return self.num_earlier + len(self.epochs)

    def losses(self) -> Losses:
        """What no rank could decode in this epoch."""
        return Losses.merged(self.ranks.gather_from_leaders(self.loader.losses.state_dict()))

    def of_epoch(self) -> Ledger:
        """What became of the samples of this epoch so far."""
        return self.loader.ledger_of(self.losses())

    def of_ended(self) -> Ledger:
        """All epochs of the run that have ended."""
        return reduce(Ledger.merged, self.epochs, self.earlier)

    def of_run(self) -> Ledger:
        """All epochs of the run, and the one that was cut short, if one was."""
        return self.of_ended() if self._begun <= len(self.epochs) else self.of_ended().merged(self.of_epoch())

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.num_ended, "ledger": self.of_ended().state_dict()}

    def load_state_dict(self, state: dict[str, Any], checkpoint: str) -> None:
        """Take up the ledgers of a checkpoint.

        Raises:
            UserError: the state is damaged; names the checkpoint.
        """
        try:
            self.num_earlier = int(state["epochs"])
            self.earlier.load_state_dict(state["ledger"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"resume: the ledger of the ended epochs in {checkpoint} is damaged "
                f"({type(error).__name__}: {error}): resume from an earlier checkpoint"
            ) from None


# --- samples that left


class Quarantine(TrainerCallback):
    """Collects the loader's events and writes them on the first rank.

    Args:
        resumed: what the file holds stays; otherwise it is an earlier run's, in the same folder.
    """

    def __init__(self, loader: PackLoader, output_dir: str | Path, ranks: Ranks, *, resumed: bool) -> None:
        self.loader, self.ranks = loader, ranks
        self.path = Path(output_dir) / QUARANTINE
        self._known: set[tuple[Any, ...]] | None = None  # by _KEY, of the file's
        if ranks.is_first:
            _keep(self.path, lambda event: resumed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.flush()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.flush()

    def flush(self) -> None:
        """Gather and write; all ranks call it together."""
        events = self.ranks.gather_from_leaders(self.loader.take_events())
        if self.ranks.is_first:
            self._write(event for part in events for event in part)

    def flush_alone(self) -> None:
        """Write what this rank knows, without the others: for a run that ends by an error."""
        if self.ranks.is_group_leader:
            self._write(self.loader.take_events())

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events that the file does not hold yet."""
        if self._known is None:
            self._known = {tuple(event[k] for k in _KEY) for event in _entries(self.path)}
        new = []
        for event in events:
            key = tuple(event[k] for k in _KEY)
            if key not in self._known:
                self._known.add(key)
                new.append(event)
        if new:
            _append(self.path, *new)


# --- samples of each step


def batch_ids(batch: dict[str, Any]) -> list[str]:
    """Ids of a batch's samples with their fragments, of a tree once for each branch; what is no sample has none."""
    return [
        sample_id if count == 1 else f"{sample_id}#{index + 1}/{count}"
        for sample_id, (index, count) in zip(batch["sample_ids"], batch["fragments"], strict=True)
        if sample_id not in NO_SAMPLES
    ]


class SampleLog(TrainerCallback):
    """Appends this rank's line at the end of every step; of ranks that share rows, one does."""

    def __init__(self, trainer: PackTrainer) -> None:
        self.trainer = trainer
        self.path = trainer.output_dir / SAMPLE_IDS / f"rank{trainer.ranks.data_rank:05d}.jsonl"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # No rank ends a step before all have begun: the first step's reduction comes between.
        if self.trainer.ranks.is_first:
            for path in self.path.parent.glob("rank*.jsonl"):
                _keep(path, lambda entry: entry["step"] <= state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if trainer.ranks.is_group_leader:
            entry = {"step": state.global_step, "epoch": trainer.loader.epoch, "ids": trainer.step_sample_ids}
            _append(self.path, entry)


def read_sample_log(output_dir: str | Path) -> dict[int, list[str]]:
    """Ids by step, over all ranks."""
    steps: dict[int, list[str]] = {}
    for path in sorted(Path(output_dir, SAMPLE_IDS).glob("rank*.jsonl")):
        for entry in _entries(path):
            steps.setdefault(entry["step"], []).extend(entry["ids"])
    return steps


# --- the summary


def summarise(trainer: PackTrainer, ledger: Ledger, *, packing: str) -> dict[str, Any]:
    """The run's figures as JSON values. All counts are over all ranks; fills are shares of the budgets used.

    Args:
        packing: how rows were made, one of combinations.py.
    """
    args, total = trainer.args, trainer.metrics.total
    max_tokens, max_tiles = trainer.row_budget
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counts = ("num_real_tokens", "num_tokens", "num_loss_tokens", "num_tiles")
    return {
        "packed": packing != "padded",
        "packing": packing,
        "ranks": trainer.ranks.world_size,
        "sequence_parallel_size": trainer.ranks.sequence_parallel_size,
        "zero_stage": int(args.hf_deepspeed_config.get_value("zero_optimization.stage", 0)) if args.deepspeed else 0,
        "sharding": args.sharding,
        "device": str(args.device.type),
        "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        "attn_kernel": trainer.packed_model.attn_kernel.name,
        "fp8": trainer.packed_model.fp8,
        "steps": trainer.state.global_step,
        "steps_over_bound": steps_over_bound(trainer),
        "steps_empty": trainer.steps_without_samples,
        "epochs": trainer.ledgers.num_ended,
        "max_packed_tokens": max_tokens,
        "num_images_expected": max_tiles,
        "packs": int(total.get("num_packs", 0)),
        **{name: int(total.get(name, 0)) for name in counts},
        **trainer.metrics.fills(total),
        "samples_in": ledger.samples_in,
        "samples_packed": ledger.samples_packed,
        "samples_dropped": ledger.samples_dropped,
        "samples_quarantined": ledger.samples_quarantined,
        "samples_waiting": ledger.samples_waiting,
        "loss_first": losses[0] if losses else None,
        "loss_last": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        "evaluation": trainer.last_evaluation(),
        "tokens_per_s": tokens_per_second(trainer.metrics.step_times),
        "ledger": ledger.state_dict(),
    }


def steps_over_bound(trainer: PackTrainer) -> float | None:
    """Optimizer steps of the whole epochs against those that full packs would take; None before an epoch has ended.

    The bound is that of the sums of real tokens and tiles: ceil(packs / packs a step) for each epoch.
    """
    epochs = trainer.ledgers.num_ended
    total, (max_tokens, max_tiles) = trainer.metrics.total, trainer.row_budget
    full = max(total.get("num_real_tokens", 0) / max_tokens, total.get("num_tiles", 0) / max(1, max_tiles))
    if not epochs or not full:
        return None
    return trainer.state.global_step / (epochs * math.ceil(full / epochs / trainer.loader.packs_per_step))


def write_summary(summary: dict[str, Any], output_dir: str | Path) -> None:
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    Path(output_dir, SUMMARY).write_text(f"{text}\n", encoding="utf-8")


def summary_lines(summary: dict[str, Any], ledger: Ledger) -> list[str]:
    """The summary as people read it at the end of a run."""
    speed = summary["tokens_per_s"]
    rows = f"packed ({summary['packing']})" if summary["packed"] else "padded"
    shared = summary["sequence_parallel_size"]
    ranks = count(summary["ranks"], "ranks") + (f", {shared} a row" if shared > 1 else "")
    return [
        f"{count(summary['steps'], 'optimizer steps')} on {ranks}, {rows}, {count(summary['packs'], 'rows')} of "
        f"{summary['samples_per_pack']:.1f} samples, token fill {summary['token_fill']:.1%}, "
        f"tile fill {summary['tile_fill']:.1%}" + (f", {speed:,.0f} useful tokens/s" if speed else ""),
        *ledger.lines(),
        *([f"samples that left the run are named in {QUARANTINE}"] if ledger.dropped or ledger.quarantined else []),
    ]


# --- files of one JSON object a line


def _append(path: Path, *entries: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Those of a file, if it is there."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for line in text.split("\n"):  # ids may hold U+2028, which splitlines cuts at
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            yield json.loads(line)


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the wanted lines of a file; without any the file is removed."""
    kept = list(filter(wanted, _entries(path)))
    beside = path.with_suffix(".part")
    beside.unlink(missing_ok=True)
    if kept:
        _append(beside, *kept)
        os.replace(beside, path)
    else:
        path.unlink(missing_ok=True)
