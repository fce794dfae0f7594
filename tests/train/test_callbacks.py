"""What is told before the first step."""

from __future__ import annotations

import pytest

from train.callbacks import untrained_by_text


def parts(*names: str) -> dict[str, bool]:
    return {f"trains_{name}": name in names for name in ("vision", "projector", "language", "head")}


@pytest.mark.parametrize(
    "trained, num_tiles, told",
    [
        (("projector",), 0, "only projector is trained"),
        (("vision", "projector"), 0, "only vision and projector is trained"),
        (("projector",), 3, None),
        (("projector", "language"), 0, None),
        (("projector", "head"), 0, None),
        (("language",), 0, None),
        ((), 0, None),
    ],
)
def test_training_on_text_what_sees_images_only_is_told(trained, num_tiles, told):
    found = untrained_by_text(parts(*trained), num_tiles)
    assert (found is None) if told is None else (told in found)
