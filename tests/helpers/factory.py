"""Small synthetic data sets: text of many lengths, tiny images, as jsonl or as tar shards."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from internvl_pack.encode.config import EncodeConfig
from internvl_pack.testing.tiny import WORDS

TINY = EncodeConfig(image_size=56, tokens_per_tile=4, max_dynamic_patch=6, dynamic_image_size=True, use_thumbnail=True)


def png(width: int, height: int, shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 255 - shade, shade // 2)).save(out, "PNG")
    return out.getvalue()


def samples(count: int, seed: int = 0) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
    """`count` records with their images by file name; two in three have an image, some have two."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        images = {}
        for j in range(rng.choice((0, 1, 1, 1, 2))):
            size = rng.choice(((56, 56), (112, 56), (56, 168), (112, 112)))
            images[f"{i:05d}_{j}.png"] = png(*size, shade=rng.randrange(256))
        question = "<image>\n" * len(images) + " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        answer = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        record: dict[str, Any] = {
            "id": f"s{i}",
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
        }
        if images:
            record["image"] = list(images)
        out.append((record, images))
    return out


def write_jsonl(folder: Path, count: int, seed: int = 0, name: str = "made", **spec: Any) -> Path:
    """A meta file over one jsonl of `count` samples."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as lines:
        for record, images in samples(count, seed):
            lines.write(json.dumps(record) + "\n")
            for file, data in images.items():
                (folder / "images" / file).write_bytes(data)
    return write_meta(folder, {name: {"root": "images", "annotation": f"{name}.jsonl"} | spec})


def write_shards(folder: Path, count: int, seed: int = 0, per_shard: int = 50, name: str = "made") -> Path:
    """A meta file over tar shards of the same samples."""
    folder.mkdir(parents=True, exist_ok=True)
    made = samples(count, seed)
    starts = range(0, count, per_shard)
    for shard, start in enumerate(starts):
        with tarfile.open(folder / f"{name}-{shard:04d}.tar", "w") as tar:
            for i, (record, images) in enumerate(made[start : start + per_shard], start):
                renamed = [f"{j}.png" for j in range(len(images))]
                record = record | ({"image": renamed} if images else {})
                members = {"json": json.dumps(record).encode()} | dict(zip(renamed, images.values(), strict=True))
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{i:05d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    last = len(starts) - 1
    return write_meta(folder, {name: {"root": "", "shards": f"{name}-{{0000..{last:04d}}}.tar"}})


def write_meta(folder: Path, meta: dict[str, Any]) -> Path:
    path = folder / "meta.json"
    defaults = {"data_augment": False, "repeat_time": 1}
    path.write_text(json.dumps({name: defaults | spec for name, spec in meta.items()}), encoding="utf-8")
    return path
