"""One rank of a fine-tuning run that writes down what it trained on: `finetune_worker.py OUT options of finetune.py`.

OUT/rank<r>.json: losses by step, gradient norms by step, tiles of every forward pass, ids of the samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import TrainerCallback

from train.environment import prepare_environment, set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse


def main(out: str, argv: list[str]) -> None:
    prepare_environment()
    set_up_logging()
    run = prepare(*parse(argv))
    tiles: list[int] = []
    run.trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: tiles.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    seen_ids: list[str] = []

    class Ids(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen_ids.extend(run.trainer.step_sample_ids)

    run.trainer.add_callback(Ids())
    run.train()
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    seen = {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "tiles": tiles,
        "sample_ids": seen_ids,
    }
    rank = run.trainer.loader.packed_dataset.rank
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
