"""`internvl-pack reference`: writes a table of log-probabilities (reference.py) with the options of a run.

It goes once through the run's data and its held-out data. Any number of ranks may write, and go on where others were
stopped: rows whose answers are all there are not computed again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from internvl_pack.batch.collate import to_device
from internvl_pack.errors import UserError
from internvl_pack.model.loss.preference import branch_sums
from internvl_pack.model.packed import PackedModel
from internvl_pack.stream.loader import PackLoader, packed_collator

from .data import once_each
from .environment import USER_ERROR, prepare_environment, report_error, set_up_logging, shut_down
from .finetune import begin, compute_dtype
from .options import parse
from .reference import FINISHED, MARKS, RECORD, check_marks, marks_of, read_parts

logger = logging.getLogger(__name__)


def main(argv: Sequence[str], program: str) -> int:
    """Write the table of a run with these options. Returns the exit code."""
    try:
        prepare_environment()
        set_up_logging()
        write(*parse(list(argv), program))
    except UserError as error:
        report_error(program, error, everyone=False)
        return USER_ERROR
    finally:
        shut_down()
    return 0


def write(model_args: Any, data_args: Any, args: Any) -> None:
    """Go through a run's data once, and write down what is not there yet.

    Raises:
        UserError: a mistake in the options or the data, or a table of another model or of other options.
    """
    if not args.reference_path:
        raise UserError("--reference_path is missing: give the folder of the table")
    for name, unused in (("deepspeed", None), ("sequence_parallel_size", 1)):
        if (value := getattr(args, name)) != unused:
            raise UserError(f"--{name} {value}: each process computes its part of a reference by itself; leave it out")
    if not data_args.meta_path:
        raise UserError("--meta_path is missing: a reference is of records, not of a preset")
    begun = begin(model_args, data_args, args)
    assert begun.loss is not None, "--reference_path is refused without"
    folder, rank = Path(args.reference_path), begun.ranks.rank
    prepare_folder(folder, marks_of(model_args, begun.data.train, compute_dtype(args)), rank)
    known = {record["key"].tobytes() for record in read_parts(folder)}
    model = begun.model.to(args.device, compute_dtype(args)).eval()
    train = once_each(data_args.meta_path, begun.data.train)
    for dataset in filter(None, (train, begun.data.held_out)):
        loader = PackLoader(
            dataset,
            collate_fn=packed_collator(dataset, branch_keys=True),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
        )
        written = write_rows(model, loader, folder / f"part-{rank:05d}.bin", known)
        for event in loader.take_events():
            logger.warning("%s is left out: %s: %s", event["id"], event["reason"], event["detail"])
        logger.info("%s answers written, %s in all", f"{written:,}", f"{len(known):,}")
    begun.ranks.barrier()
    if rank == 0:
        (folder / FINISHED).touch()


def prepare_folder(folder: Path, marks: dict[str, Any], rank: int) -> None:
    """Make the table's folder, or check that it is one of this run; rank by rank the same.

    Raises:
        UserError: it is of another model or of other options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MARKS).exists():
        check_marks(folder, marks)
        if rank == 0:
            (folder / FINISHED).unlink(missing_ok=True)  # there may be more data now
        return
    beside = folder / f"{MARKS}.{rank}"
    beside.write_text(json.dumps(marks, indent=2), encoding="utf-8")
    os.replace(beside, folder / MARKS)


@torch.no_grad()
def write_rows(model: PackedModel, loader: PackLoader, part: Path, known: set[bytes]) -> int:
    """Append the answers of a loader's rows that are not in `known`, which then has them; returns how many."""
    count = 0
    with open(part, "ab") as file:
        file.truncate(file.tell() - file.tell() % RECORD.itemsize)  # what a stopped run wrote of its last
        for batch in loader:
            keys = [bytes.fromhex(key) for key in batch["branch_keys"]]
            new = [place for place, key in enumerate(keys) if key and key not in known]
            if not new:
                continue
            outputs = model(**to_device(batch, model.device), return_logprobs=True)
            sums, _ = branch_sums(outputs.target_logprobs, outputs.target_positions, batch["cu_seqlens"])
            values = sums.tolist()
            file.write(np.array([(keys[place], values[place]) for place in new], dtype=RECORD).tobytes())
            file.flush()
            known.update(keys[place] for place in new)
            count += len(new)
    return count
