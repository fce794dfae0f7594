"""Data of which neighbouring rows begin alike, as JSON lines, shards and rows of a table."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from helpers.factory import png, write_meta

LONG = "one two three four five six seven eight nine ten " * 30


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]


# (images by name, conversation, further fields), and the runs of rows that are to be joined.
ROWS: list[tuple[list[str], list[dict[str, str]], dict[str, Any]]] = [
    (["a.png"], turns("<image>\nWhat is it?", "A crane."), {}),
    (["a.png"], turns("<image>\nWhat colour is it?", "Grey.", "Sure?", "Yes, I am."), {}),
    (["a.png"], turns("<image>\nHow many?", "Two of them."), {}),
    (["b.png"], turns("<image>\nHow many?", "Three."), {}),  # another image
    (["a.png"], turns("<image>\nAnd here?", "A crane again."), {}),  # no neighbour of the others
    ([], turns("Tell me of packs.", "They are full."), {}),
    ([], turns("Tell me of packs.", "They hold samples, and are full."), {}),
    ([], turns("Tell me of rows.", "They are long."), {}),
    (["c.png", "d.png"], turns("<image>\n<image>\nCompare.", "Alike."), {}),
    (["c.png", "d.png"], turns("<image>\n<image>\nWhich is left?", "The first."), {}),
    (["d.png", "c.png"], turns("<image>\n<image>\nWhich is left?", "The other."), {}),  # in another order
    (["c.png", "d.png"], turns("<image>\nA?", "B.", "<image>\nC?", "D."), {}),  # an image after an answer
    (["c.png", "d.png"], turns("<image>\nA?", "B.", "<image>\nE?", "F."), {}),
    (["e.png"], turns("<image>\nWhat?", "This."), {"system": "Be brief."}),
    (["e.png"], turns("<image>\nWhat?", "That."), {}),  # another system prompt
    (["e.png"], turns("<image>\nWhat?"), {}),  # no answer: it is refused
    (["e.png"], turns("<image>\nWhat now?", "This one."), {}),
    (["e.png"], turns("<image>\n" + LONG, "Long."), {}),  # alone it would be cut
    (["e.png"], turns("<image>\nAgain?", "Yes."), {}),
    (["e.png"], turns("<image>\nOnce more?", "No."), {}),
    ([], [{"from": "human", "value": "Which?"}], {"answers": ["This.", "That."]}),  # a tree already
    ([], [{"from": "human", "value": "Which?"}], {"answers": ["This.", "None."]}),
    (["f.png"], turns("<image>\nTrain?", "Not this."), {}),
    (["f.png"], turns("<image>\nTrain?", "This."), {}),
]
JOINED = [
    *([0, 1, 2], [3], [4], [5, 6], [7], [8, 9], [10], [11], [12], [13], [14], [15], [16], [17], [18, 19]),
    *([20], [21], [22, 23]),
]
BAD, LONGEST = 15, 17
IMAGES = {name: png(56 * (1 + number % 2), 56, 40 * number) for number, name in enumerate(f"{c}.png" for c in "abcdef")}


def write(folder: Path, kind: str) -> Path:
    """A meta file over ROWS, as `jsonl` or as `shards`."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"conversations": said, **more} for _, said, more in ROWS]
    if kind == "shards":
        with tarfile.open(folder / "made.tar", "w") as tar:
            for row, (record, (names, *_)) in enumerate(zip(records, ROWS, strict=True)):
                mine = [f"{place}.png" for place in range(len(names))]
                members = {"json": json.dumps(record | {"image": mine}).encode()}
                members |= {name: IMAGES[image] for name, image in zip(mine, names, strict=True)}
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{row:05d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return write_meta(folder, {"made": {"root": "", "shards": "made.tar"}})
    for name, data in IMAGES.items():
        (folder / name).write_bytes(data)
    with open(folder / "made.jsonl", "w", encoding="utf-8") as lines:
        for record, (names, *_) in zip(records, ROWS, strict=True):
            lines.write(json.dumps(record | ({"image": names} if names else {})) + "\n")
    return write_meta(folder, {"made": {"root": ".", "annotation": "made.jsonl"}})


def as_table() -> list[dict[str, Any]]:
    """ROWS as rows of a dataset whose images are bytes."""
    return [
        {"conversations": said, "image": [{"bytes": IMAGES[name], "path": None} for name in names], **more}
        for names, said, more in ROWS
    ]
