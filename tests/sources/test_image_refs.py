"""Images that a record holds as `data:` URIs: the same pixels as files, from every kind of source."""

from __future__ import annotations

import base64
import io
import json
import tarfile

import numpy as np
import pytest
from helpers.factory import TINY, png

from internvl_pack import DatasetSource, Encoder, SampleError
from internvl_pack.commands.shard import members_of_sample
from internvl_pack.sources import DatasetSpec, FolderResolver, RawSample
from internvl_pack.sources.image_refs import DataRef
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.sources.shards import ShardSource

PICTURES = [png(112, 56, 10), png(56, 56, 200)]
TELL = {"role": "assistant", "content": "Tea."}


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def in_parts(images: list[str]) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": image, "detail": "auto"}} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, TELL]}


def in_field(images: list[str]) -> dict:
    return {"messages": [{"role": "user", "content": "<image>\n" * len(images) + "What?"}, TELL], "images": images}


def from_jsonl(record: dict, folder):
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    return JsonlSource("a", str(folder / "a.jsonl"), root=str(folder))


def from_shard(record: dict, folder):
    with tarfile.open(folder / "a.tar", "w") as archive:
        data = json.dumps(record).encode()
        member = tarfile.TarInfo("0.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return ShardSource("a", [str(folder / "a.tar")])


def from_rows(record: dict, folder):
    return DatasetSource("a", [record], root=str(folder))


SOURCES = [from_jsonl, from_shard, from_rows]


def ids_and_tiles(source, tokenizer) -> tuple[bytes, bytes]:
    encoder = Encoder(tokenizer, TINY)
    encoded = encoder.load(source, 0, DatasetSpec(name="a"))
    return encoded.input_ids.tobytes(), np.asarray(encoder.decode(encoded)).tobytes()


@pytest.mark.parametrize("form", [in_parts, in_field])
@pytest.mark.parametrize("source_of", SOURCES)
def test_pictures_in_the_record_are_read_as_their_files_are(source_of, form, tokenizer, tmp_path):
    for number, data in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(data)
    files = ids_and_tiles(from_jsonl(in_field(["0.png", "1.png"]), tmp_path), tokenizer)
    assert ids_and_tiles(source_of(form(list(map(uri, PICTURES))), tmp_path), tokenizer) == files
    broken = [uri(data)[:30] + base64.encodebytes(data).decode().replace("\n", "\r\n")[8:] for data in PICTURES]
    assert len(broken[0].splitlines()) > 2
    assert ids_and_tiles(source_of(form(broken), tmp_path), tokenizer) == files, "lines of 76 characters, as in MIME"
    broken = [one.replace("\r\n", "\r") for one in broken]
    assert ids_and_tiles(source_of(form(broken), tmp_path), tokenizer) == files, "a carriage return alone breaks lines"
    around = [f"\n {one}\t" for one in map(uri, PICTURES)]
    assert ids_and_tiles(source_of(form(around), tmp_path), tokenizer) == files, "space around a URL is no part of it"
    if source_of is not from_shard:  # one of each; a shard's sample names its members alone
        assert ids_and_tiles(source_of(form(["0.png", uri(PICTURES[1])]), tmp_path), tokenizer) == files


@pytest.mark.parametrize("source_of", SOURCES)
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (uri(PICTURES[0])[:-1], "image_corrupt"),  # cut
        (uri(PICTURES[0])[:40] + "*" + uri(PICTURES[0])[41:], "image_corrupt"),
        ("data:image/png;base64,", "image_empty"),
        ("data:image/svg+xml,<svg/>", "image_field"),
        ("data:" + "x" * 5000, "image_field"),
        (uri(b"no picture" * 500), "image_not_an_image"),
        (uri(PICTURES[0][:20]), "image_truncated"),
    ],
)
def test_a_uri_that_is_no_picture_is_named_with_its_row_in_a_short_line(source_of, broken, reason, tokenizer, tmp_path):
    with pytest.raises(SampleError) as error:
        ids_and_tiles(source_of(in_parts([uri(PICTURES[0]), broken]), tmp_path), tokenizer)
    assert error.value.reason == reason and error.value.source and len(error.value.detail) < 250
    assert len(broken) <= 40 or broken[:41] not in error.value.detail


def test_planning_decodes_the_first_bytes_alone_and_names_are_short():
    image = uri(PICTURES[0] + bytes(50_000)) + "*" * 4  # damage at the end, which only reading comes to
    ref = DataRef(image, 3)
    assert ref.name == "data:image/png (3)" and ref.head(100) == PICTURES[0][:100] and ref.uri is image
    assert image[:50] not in repr(ref)
    with pytest.raises(SampleError, match="image_corrupt"):
        ref.read()


def test_shards_are_written_with_the_pictures_as_members():
    sample = RawSample("a/0", None, "a:0", in_parts(list(map(uri, PICTURES))), FolderResolver(""))
    *images, (_, record) = members_of_sample(sample, "0")
    assert images == [("0.png", PICTURES[0]), ("1.png", PICTURES[1])]
    assert json.loads(record)["image"] == ["0.0.png", "0.1.png"]
