"""Writes the tables of docs/recipes.md from the estimate of memory: `python docs/make_recipes.py`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack.model.memory import Sizes, memory
from internvl_pack.packing.cost import SIZES, FeedForward

PAGE = Path(__file__).with_name("recipes.md")
USED = 0.9  # share of a card that a row of the table may take by the estimate, which is right to 5 %
BUDGETS = ((32768, 96), (16384, 48), (8192, 40))
MACHINES = ((1, 24), (1, 48), (1, 80), (8, 80), (8, 141), (32, 80))  # GPUs, GB of each
STEP_TOKENS = 16 * 16384  # some 150 samples of the real mix
RANK = 16
# Peaks of whole steps that docs/measurements.md has, GB: model, GPUs, ZeRO stage, budget, checkpointing.
MEASURED = {("1B", 1, 1, BUDGETS[1], False): 65.1}


def main() -> None:
    """Put the tables between their marks."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page with its tables as they are computed now."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("full", table(adapters=False)), ("lora", table(adapters=True))):
        mark = f"<!-- {name} -->"
        text = re.sub(rf"{mark}.*?{mark}", lambda _, m=mark, r=rows: f"{m}\n{r}\n{m}", text, flags=re.S)
    return text


def table(*, adapters: bool) -> str:
    """A row for each model and machine where it fits."""
    head = ("model", "GPUs x GB", "tokens / tiles a row", "ZeRO", "`grad_checkpoint`", "accumulation", "peak GB", "")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name in SIZES:
        for gpus, card in MACHINES:
            row = choice(name, gpus, card, adapters)
            if row is not None:
                lines.append(f"| {name} | {gpus} x {card} | {row} |")
    return "\n".join(lines)


def choice(name: str, gpus: int, card: int, adapters: bool) -> str | None:
    """The cells of the first way that fits; None for none."""
    text, vision = SIZES[name]
    sizes = Sizes.of({"text_config": text, "vision_config": vision})
    for zero, budget, checkpointed in ways(gpus):
        trained = adapter_parameters(text) if adapters else None
        how = {"gpus": gpus, "zero": zero, "checkpointed": checkpointed, "trained": trained}
        peak = memory(sizes, tokens=budget[0], tiles=budget[1], **how).peak / 1e9
        if peak > USED * card:
            continue
        seen = None if adapters else MEASURED.get((name, gpus, zero, budget, checkpointed))
        cells = (
            f"{budget[0]} / {budget[1]}",
            f"{zero}",
            "auto" if checkpointed else "False",
            f"{max(1, STEP_TOKENS // (gpus * budget[0]))}",
            f"{seen or peak:.1f}",
            "measured" if seen else "computed",
        )
        return " | ".join(cells)
    return None


def ways(gpus: int) -> Iterator[tuple[int, tuple[int, int], bool]]:
    """(ZeRO stage, budget, whether layers are computed again), the fastest first."""
    stages = (1,) if gpus == 1 else (1, 2, 3)
    for zero in stages:
        for checkpointed in (False, True):
            for budget in BUDGETS[1:] if checkpointed else BUDGETS[:2]:
                yield zero, budget, checkpointed


def adapter_parameters(text: dict[str, Any]) -> int:
    """Parameters of adapters of rank RANK at all matrices of the decoder's layers but those of experts."""
    h, layers, mlp = text["hidden_size"], text["num_hidden_layers"], FeedForward.of(text)
    head = text.get("head_dim") or h // text["num_attention_heads"]
    queries, keys = head * text["num_attention_heads"], head * text["num_key_value_heads"]
    return RANK * (layers * (2 * (h + queries) + 2 * (h + keys)) + mlp.dense * 3 * (h + mlp.width))


if __name__ == "__main__":
    main()
