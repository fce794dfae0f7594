"""What can be seen of a run's options and data before its first step, and would show in hours otherwise."""

from __future__ import annotations

from collections.abc import Mapping


def untrained_by_text(trained: Mapping[str, bool], num_tiles: float) -> str | None:
    """A line where only parts are trained that see images, and the data holds none; else None.

    Args:
        trained: `model.flops.trained_parts`.
        num_tiles: of the samples that were looked at.
    """
    of_images = trained["trains_vision"] or trained["trains_projector"]
    if num_tiles or not of_images or trained["trains_language"] or trained["trains_head"]:
        return None
    parts = " and ".join(name for name in ("vision", "projector") if trained[f"trains_{name}"])
    return (
        f"nothing will be learnt: of the model only {parts} is trained, and no sample that was looked at has an image; "
        "add data with images, or train the language model (--freeze_llm False)"
    )
