"""The end of `shell/quickstart.sh`: packed against padded, as a table and as one line of JSON.

    python -m train.quickstart_report work_dirs/quickstart/packed work_dirs/quickstart/padded

Every figure comes from the two runs' `train_summary.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from internvl_pack.errors import UserError
from internvl_pack.ledger import Ledger

from .accounting import LAST_STEPS, SUMMARY


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the summary. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if len(argv) != 2:
        print("usage: python -m train.quickstart_report PACKED_DIR PADDED_DIR", file=sys.stderr)
        return 2
    try:
        packed, padded = (read(folder) for folder in argv)
    except UserError as error:
        print(f"quickstart_report: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(packed, padded)))
    print("SUMMARY " + json.dumps(summary(packed, padded)), flush=True)
    return 0


def read(folder: str) -> dict[str, Any]:
    """A run's figures.

    Raises:
        UserError: the run has not ended.
    """
    path = Path(folder) / SUMMARY
    if not path.is_file():
        raise UserError(f"{path} is missing: the run in {folder} did not end")
    return json.loads(path.read_text(encoding="utf-8"))


def summary(packed: dict[str, Any], padded: dict[str, Any]) -> dict[str, Any]:
    """The figures of the last line; real tokens, fills as shares of budgets, loss_first of the first step."""
    taken = (
        *("ranks", "zero_stage", "device", "dtype", "attn_kernel", "steps", "steps_over_bound", "steps_empty"),
        *("packs", "samples_per_pack", "token_fill", "tile_fill"),
        *("samples_in", "samples_packed", "samples_dropped", "samples_quarantined", "loss_first", "loss_last"),
    )
    out = {key: packed[key] for key in taken}
    out |= {
        "token_fill_padded": padded["token_fill"],
        "padding_avoided": padding_avoided(packed, padded),
        "steps_padded": padded["steps"],
        "loss_last_padded": padded["loss_last"],
        "tokens_per_s_packed": packed["tokens_per_s"],
        "tokens_per_s_padded": padded["tokens_per_s"],
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in out.items()}


def padding_avoided(packed: dict[str, Any], padded: dict[str, Any]) -> float:
    """Share of the padded run's tokens that the packed run did not have to compute."""
    return 1.0 - packed["num_tokens"] / padded["num_tokens"]


def table(packed: dict[str, Any], padded: dict[str, Any]) -> list[str]:
    """Lines for people: both modes side by side, then the ledger."""
    rows: list[tuple[str, str, str]] = [
        ("", "packed", "padded"),
        ("samples trained", f"{packed['samples_packed']:,}", f"{padded['samples_packed']:,}"),
        ("packs (padded: rows)", f"{packed['packs']:,}", f"{padded['packs']:,}"),
        ("samples a row", f"{packed['samples_per_pack']:.1f}", f"{padded['samples_per_pack']:.1f}"),
        ("optimizer steps", f"{packed['steps']:,}", f"{padded['steps']:,}"),
        ("steps over the bound", _ratio(packed["steps_over_bound"]), "-"),
        ("steps without samples", f"{packed['steps_empty']:,}", f"{padded['steps_empty']:,}"),
        ("tokens computed", f"{packed['num_tokens']:,}", f"{padded['num_tokens']:,}"),
        ("token fill", f"{packed['token_fill']:.1%}", f"{padded['token_fill']:.1%}"),
        ("tile fill", f"{packed['tile_fill']:.1%}", "-"),
        ("padding avoided", f"{padding_avoided(packed, padded):.1%}", "-"),
        ("useful tokens/s", _speed(packed), _speed(padded)),
        ("first loss", f"{packed['loss_first']:.4f}", f"{padded['loss_first']:.4f}"),
        (f"last loss (of {LAST_STEPS} steps)", f"{packed['loss_last']:.4f}", f"{padded['loss_last']:.4f}"),
    ]
    ledger = Ledger()
    ledger.load_state_dict(packed["ledger"])
    title = (
        f"{packed['ranks']} ranks on {packed['device']}, {packed['dtype']}, ZeRO-{packed['zero_stage']}, "
        f"attention {packed['attn_kernel']}; budgets {packed['max_packed_tokens']:,} tokens, "
        f"{packed['num_images_expected']} tiles"
    )
    body = [f"  {name:<26}{left:>14}{right:>14}" for name, left, right in rows]
    return ["", title, *body, "", "ledger of the packed run", *(f"  {line}" for line in ledger.lines()), ""]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _speed(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_s']:,.0f}" if run["tokens_per_s"] else "-"


if __name__ == "__main__":
    sys.exit(main())
