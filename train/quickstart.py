"""What the quickstarts do beside training: pairs made of ordinary data, and the runs' figures as one line of JSON.

    python -m train.quickstart pairs ROWS.jsonl IMAGES FOLDER    # pairs.jsonl and pairs.json in FOLDER
    python -m train.quickstart compare PACKED_DIR PADDED_DIR     # a table, the ledger, "SUMMARY {json}"
    python -m train.quickstart preferences RUN_DIR               # "SUMMARY {json}"

Figures come from `train_summary.json` and `trainer_state.json` of the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from internvl_pack.errors import UserError
from internvl_pack.ledger import Ledger

from .accounting import LAST_STEPS, SUMMARY


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    programs: tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...] = (
        ("pairs", write_pairs, ("rows", "images", "folder")),
        ("compare", compare, ("packed", "padded")),
        ("preferences", preferences, ("run",)),
    )
    for name, program, paths in programs:
        command = commands.add_parser(name)
        command.set_defaults(program=program)
        for path in paths:
            command.add_argument(path, type=Path)
    given = vars(parser.parse_args(argv))
    try:
        given.pop("program")(**given)
    except UserError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    return 0


def write_pairs(rows: Path, images: Path, folder: Path) -> None:
    """Each row's last answer is chosen, the next row's is rejected."""
    records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    answers = [record["conversations"][-1]["value"] for record in records]
    lines = []
    for number, record in enumerate(records):
        rejected = next(a for a in (*answers[number + 1 :], *answers) if a != answers[number])
        pair = {"conversations": record["conversations"][:-1], "chosen": answers[number], "rejected": rejected}
        lines.append(json.dumps(record | pair, ensure_ascii=False) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    meta = {"pairs": {"root": str(images.resolve()), "annotation": "pairs.jsonl", "repeat_time": 40}}
    (folder / "pairs.json").write_text(json.dumps(meta), encoding="utf-8")


def preferences(run: Path) -> None:
    """Figures of a run on pairs; those that end with _last are means of its last steps."""
    figures = read(run)
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps = [entry for entry in history if "rewards/margins" in entry]
    taken = ("ranks", "steps", "samples_packed", "token_fill", "loss_first", "loss_last")
    print_summary(
        {name: figures[name] for name in taken}
        | {
            "margin_first": steps[0]["rewards/margins"],
            "margin_last": statistics.fmean(entry["rewards/margins"] for entry in steps[-LAST_STEPS:]),
            "accuracy_last": statistics.fmean(entry["rewards/accuracies"] for entry in steps[-LAST_STEPS:]),
        }
    )


def compare(packed: Path, padded: Path) -> None:
    """A packed run against a padded one; real tokens, fills as shares of budgets, loss_first of the first step."""
    own, other = read(packed), read(padded)
    avoided = 1.0 - own["num_tokens"] / other["num_tokens"]  # what the packed run did not have to compute
    print("\n".join(table(own, other, avoided)))
    taken = (
        *("ranks", "zero_stage", "device", "dtype", "attn_kernel", "steps", "steps_over_bound", "steps_empty"),
        *("packs", "samples_per_pack", "token_fill", "tile_fill"),
        *("samples_in", "samples_packed", "samples_dropped", "samples_quarantined", "loss_first", "loss_last"),
    )
    print_summary(
        {name: own[name] for name in taken}
        | {"padding_avoided": avoided, "tokens_per_s_packed": own["tokens_per_s"]}
        | {f"{name}_padded": other[name] for name in ("token_fill", "steps", "loss_last", "tokens_per_s")}
    )


def read(folder: Path) -> dict[str, Any]:
    """A run's figures.

    Raises:
        UserError: the run has not ended.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(f"{path} is missing: the run in {folder} did not end")
    return json.loads(path.read_text(encoding="utf-8"))


def print_summary(figures: dict[str, Any]) -> None:
    """The last line, with numbers of four places."""
    figures = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print("SUMMARY " + json.dumps(figures), flush=True)


def table(packed: dict[str, Any], padded: dict[str, Any], avoided: float) -> list[str]:
    """Lines for people: both modes side by side, then the ledger.

    Args:
        avoided: share of the padded run's tokens.
    """
    both = (packed, padded)
    over = packed["steps_over_bound"]
    rows: list[tuple[str, ...]] = [
        ("", "packed", "padded"),
        ("samples trained", *(f"{run['samples_packed']:,}" for run in both)),
        ("packs (padded: rows)", *(f"{run['packs']:,}" for run in both)),
        ("samples a row", *(f"{run['samples_per_pack']:.1f}" for run in both)),
        ("optimizer steps", *(f"{run['steps']:,}" for run in both)),
        ("steps over the bound", "-" if over is None else f"{over:.3f}", "-"),
        ("steps without samples", *(f"{run['steps_empty']:,}" for run in both)),
        ("tokens computed", *(f"{run['num_tokens']:,}" for run in both)),
        ("token fill", *(f"{run['token_fill']:.1%}" for run in both)),
        ("tile fill", f"{packed['tile_fill']:.1%}", "-"),
        ("padding avoided", f"{avoided:.1%}", "-"),
        ("useful tokens/s", *(f"{run['tokens_per_s']:,.0f}" if run["tokens_per_s"] else "-" for run in both)),
        ("first loss", *(f"{run['loss_first']:.4f}" for run in both)),
        (f"last loss (of {LAST_STEPS} steps)", *(f"{run['loss_last']:.4f}" for run in both)),
    ]
    ledger = Ledger()
    ledger.load_state_dict(packed["ledger"])
    title = (
        f"{packed['ranks']} ranks on {packed['device']}, {packed['dtype']}, ZeRO-{packed['zero_stage']}, "
        f"attention {packed['attn_kernel']}; budgets {packed['max_packed_tokens']:,} tokens, "
        f"{packed['num_images_expected']} tiles"
    )
    body = [f"  {name:<26}{left:>14}{right:>14}" for name, left, right in rows]
    if packed["steps"] != padded["steps"]:
        body.append(
            f"  the runs made {packed['steps']:,} and {padded['steps']:,} steps at one learning rate: "
            "more steps train further"
        )
    return ["", title, *body, "", "ledger of the packed run", *(f"  {line}" for line in ledger.lines()), ""]


if __name__ == "__main__":
    sys.exit(main())
