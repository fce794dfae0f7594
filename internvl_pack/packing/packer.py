"""The packer of one lane."""

from __future__ import annotations

from collections.abc import Mapping

from internvl_pack.errors import SampleError
from internvl_pack.packing.budget import Budget


class LanePacker:
    def __init__(self, budget: Budget, *, policy: str = "subset_sum", buffer_size: int = 64, reservoir: int = 0):
        self.budget = budget
        self.buffer_size = buffer_size
        self._waiting: list = []

    @property
    def waiting(self) -> list:
        return list(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self.buffer_size

    def add(self, fragment) -> None:
        if fragment.num_tokens < 1:
            raise SampleError("sample_empty", f"fragment {fragment.key} has no tokens")
        if not self.budget.fits(fragment.num_tokens, fragment.num_tiles):
            raise SampleError("oversized_error", f"fragment {fragment.key} exceeds the budget")
        self._waiting.append(fragment)

    def pop(self) -> list:
        budget = self.budget
        tokens, tiles, cost = 0, 0, 0
        pack, rest = [], []
        order = self._waiting[:1] + sorted(self._waiting[1:], key=lambda f: -f.num_tokens)
        for f in order:
            length = budget.aligned(f.num_tokens)
            if (
                tokens + length <= budget.max_tokens
                and tiles + f.num_tiles <= budget.max_tiles
                and (budget.max_attention_cost is None or cost + length**2 <= budget.max_attention_cost)
            ):
                tokens, tiles, cost = tokens + length, tiles + f.num_tiles, cost + length**2
                pack.append(f)
            else:
                rest.append(f)
        taken = set(map(id, pack))
        self._waiting = [f for f in self._waiting if id(f) not in taken]
        return pack

    def state_dict(self) -> dict:
        return {"waiting": [list(f.key) for f in self._waiting]}

    def load_state_dict(self, state: dict, fragments: Mapping) -> None:
        self._waiting = [fragments[tuple(key)] for key in state["waiting"]]
