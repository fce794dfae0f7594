"""The scan of a shard: what it keeps of a sample, and how keys that come twice are found again."""

from __future__ import annotations

import io
import json
import tarfile
import tracemalloc

import numpy as np
import pytest

from internvl_pack.sources import shard_index
from internvl_pack.sources.shard_index import COLUMNS, scan_shard


def write_shard(path, names: list[str]) -> str:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
    return str(path)


def adjacent(count: int) -> list[str]:
    return [f"{n:09d}.{ending}" for n in range(count) for ending in ("jpg", "json")]


def by_ending(count: int) -> list[str]:
    return sorted(adjacent(count), key=lambda name: name.endswith("json"))


@pytest.mark.slow
@pytest.mark.parametrize("order", [adjacent, by_ending])
def test_a_scan_keeps_some_bytes_a_sample(order, tmp_path):
    peaks = []
    for count in (200, 1200):
        path = write_shard(tmp_path / "shard.tar", order(count))
        tracemalloc.start()
        assert len(scan_shard(path)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1000 * 200


def test_keys_of_one_hash_stay_apart(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "shard.tar", [*by_ending(3), "1.jpg", "1.5.json", "1.5.jpg", "2.json"])
    expected = scan_shard(path)
    monkeypatch.setattr(shard_index, "hash", lambda key: 0, raising=False)
    found = scan_shard(path)
    assert all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in COLUMNS)
    assert len(found) == 6 and found.content == expected.content


PICTURE = "data:image/png;base64,iVBORw0KGgo="
WHOLE = {
    "held by the record": [("json", json.dumps({"conversations": [], "image": [PICTURE, f" {PICTURE}"]}).encode())],
    "with a caption": [("jpg", b"picture"), ("txt", b"A cat.")],
}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("members", WHOLE.values(), ids=WHOLE)
def test_samples_that_are_whole_beside_damage_are_delivered(members, damaged, tmp_path):
    path = tmp_path / "shard.tar"
    places = []
    with tarfile.open(path, "w") as tar:
        for key in "abc":
            places.append(tar.offset)
            for ending, data in members:
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    content = path.read_bytes()[:end]  # without the end mark
    path.write_bytes(content[: places[1]] + b"x" * 512 * damaged + content[places[1] :])
    found = scan_shard(str(path))
    assert len(found) == 3
    assert [damage.reason for damage in found.damage] == ["shard_damaged"] * damaged
    assert not any(damage.lost for damage in found.damage)
    assert any("no end mark" in line for line in found.warnings)
