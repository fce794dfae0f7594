"""The hostile inputs of the second round, as they lie beside the repository."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from helpers.encode_samples import SPEC, BytesRef

from internvl_pack.encode import Encoder
from internvl_pack.encode.images import decode_tiles, image_size_of
from internvl_pack.encode.tiles import plan_grid
from internvl_pack.errors import SampleError
from internvl_pack.sources.base import RawSample
from internvl_pack.sources.image_refs import FolderResolver

VERDICTS = {
    "loss_flag": "Good answer",
    "weight_flag": "Good answer",
    "system_field": "Ho",
    "tools_field": "unsupported_field",
    "toolcalls_then_text": "unsupported_field",
    "reasoning_content": "unsupported_field",
    "qwenvl_img": "A square.",
    "image_upper_noimg": "placeholder_mismatch",
    "image_numbered": "No.",
    "data_uri": "A square.",
    "bare_b64": "image_field",
    "nfc_name": "A square.",
}


@pytest.fixture(scope="module")
def cases(shared_dir) -> Path:
    folder = shared_dir / "cases" / "round2"
    if not folder.is_dir():
        pytest.skip("needs the second round of cases")
    return folder


def test_records_of_other_tools(cases, tokenizer, tmp_path):
    picture = (cases.parent / "images" / "good_448x448.jpg").read_bytes()
    (tmp_path / "sub").mkdir()
    for name in ("d.jpg", "sub/c.jpg", unicodedata.normalize("NFD", "한글 사진 é.jpg")):
        (tmp_path / name).write_bytes(picture)
    encoder, found = Encoder(tokenizer), {}
    for path in sorted(cases.glob("*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            try:
                raw = RawSample("d/0", row["id"], "d:0", row, FolderResolver(str(tmp_path)))
                encoded = encoder.encode(raw, SPEC)
                found[row["id"]] = tokenizer.decode(encoded.labels[encoded.labels != -100]).removesuffix("<|im_end|>")
            except SampleError as error:
                found[row["id"]] = error.reason
                assert len(str(error)) < 300
    assert found == VERDICTS


def test_a_table_joined_from_two_schemas(cases, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    from internvl_pack.sources.hf import DatasetSource

    rows = datasets.Dataset.from_parquet(str(cases / "union_columns.parquet"), cache_dir=str(tmp_path))
    source, encoder = DatasetSource("d", rows), Encoder(tokenizer)
    assert [len(encoder.load(source, row, SPEC).images) for row in (0, 1, 2, 3, 5)] == [1, 1, 0, 2, 0]
    with pytest.raises(SampleError, match=r"image_missing: .*jpg_icc\.jpg"):  # its path, without its bytes
        encoder.load(source, 4, SPEC)
    with pytest.raises(SampleError, match="placeholder_mismatch"):  # a struct of nulls
        encoder.load(source, 6, SPEC)


def test_images_that_decoders_were_too_strict_with_or_too_patient(cases):
    def tiles(name: str) -> np.ndarray:
        ref = BytesRef(name, (cases / name).read_bytes())
        return decode_tiles(ref, plan_grid(*image_size_of(ref)), 448)

    assert tiles("jpg_pad_before_eoi.jpg").any() and tiles("gif_anim_cut_in_frame5.gif").any()
    for name, reason in (
        ("heic_mif1.jpg", "is HEIC"),
        ("thin_1x4000000.png", "image_too_large"),
        ("jpeg_1000_scans_4096.jpg", "image_too_large"),
    ):
        with pytest.raises(SampleError, match=reason):
            tiles(name)
