"""Rows of tables that were joined from two schemas: what a row lacks is null, and null is absent."""

from __future__ import annotations

import pytest
from helpers.encode_samples import SPEC, jpeg

from internvl_pack.encode import Encoder
from internvl_pack.sources.hf import DatasetSource


def turn(**filled: str) -> dict:
    return {"from": None, "value": None, "role": None, "content": None, **filled}


ROWS = [
    ({"image": {"bytes": jpeg(), "path": None}, "images": None}, "<image>\nq", 1),
    ({"image": {"bytes": None, "path": None}, "images": [{"bytes": jpeg(), "path": None}]}, "<image>\nq", 1),
    ({"image": None, "images": [{"bytes": jpeg(), "path": None}] * 2}, "<image><image>\nq", 2),
    ({"image": {"bytes": None, "path": None}, "images": []}, "q", 0),
    ({"image": "", "images": None}, "q", 0),
    ({"image": [], "images": [{"bytes": jpeg(), "path": None}]}, "q", 1),
]


@pytest.mark.parametrize("style", ["from", "role"])
def test_absent_columns_are_null(tokenizer, style):
    if style == "from":
        ask, answer = (lambda text: turn(**{"from": "human", "value": text})), turn(**{"from": "gpt", "value": "a"})
    else:
        ask, answer = (lambda text: turn(role="user", content=text)), turn(role="assistant", content="a")
    rows = [{**images, "system": None, "conversations": [ask(text), answer]} for images, text, _ in ROWS]
    source, encoder = DatasetSource("d", rows), Encoder(tokenizer)
    for row, (_, _, count) in enumerate(ROWS):
        encoded = encoder.load(source, row, SPEC)
        assert len(encoded.images) == count
        encoder.check_pixels(encoded)


def test_the_same_from_a_parquet_file(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    turns = [[turn(role="user", content=text), turn(role="assistant", content="a")] for _, text, _ in ROWS[:4]]
    columns = {name: [row[0][name] for row in ROWS[:4]] for name in ("image", "images")}
    path = str(tmp_path / "joined.parquet")
    datasets.Dataset.from_dict({"conversations": turns, **columns}).to_parquet(path)
    source, encoder = (
        DatasetSource("d", datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path))),
        Encoder(tokenizer),
    )
    assert [len(encoder.load(source, row, SPEC).images) for row in range(4)] == [1, 1, 2, 0]
