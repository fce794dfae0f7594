"""The encoder as a whole: records for planning, tiles for training, the same in every process."""

from __future__ import annotations

import csv
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from helpers.encode_samples import SPEC, BytesRef, file_of, jpeg, raw_sample, smooth_pixels
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.encode import EncodeConfig, Encoder, TileGrid
from internvl_pack.encode.augment import jpeg_quality, recompress
from internvl_pack.encode.images import decode_tiles, image_size_of
from internvl_pack.encode.tiles import max_tiles_per_image, plan_grid
from internvl_pack.errors import SampleError, UserError
from internvl_pack.records import Span
from internvl_pack.sources.meta import DatasetSpec

LENGTHS = Path(__file__).resolve().parents[2] / "benchmarks" / "real_mix_a.csv"
TINY = EncodeConfig(image_size=56, tokens_per_tile=4, dynamic_image_size=True, use_thumbnail=True)


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, TINY)


TURNS = st.lists(
    st.tuples(st.sampled_from(["human", "gpt"]), st.text(alphabet="ab <é图\n", max_size=12), st.integers(0, 2)),
    max_size=6,
)


@pytest.mark.slow
@given(TURNS, st.booleans())
@settings(max_examples=120, deadline=None)
def test_spans_cover_the_sample_and_mark_its_image_blocks(encoder, turns, with_system):
    images: dict[str, bytes] = {}
    conversation = [("system", "s")] if with_system else []
    for role, text, count in [*turns, ("human", "q", 0), ("gpt", "a", 0)]:
        for _ in range(count if role == "human" else 0):
            text += "<image>\n"
            images[f"{len(images)}.jpg"] = jpeg(*((60, 40), (90, 30), (20, 90))[len(images) % 3])
        conversation.append((role, text))
    encoded = encoder.encode(raw_sample(conversation, images), SPEC)
    record, ids, labels = encoded.record, encoded.input_ids, encoded.labels
    assert len(ids) == len(labels) == record.num_tokens == sum(span.num_tokens for span in record.spans)
    assert record.num_tiles == sum(span.num_tiles for span in record.spans)
    assert record.num_loss_tokens == (labels != -100).sum() > 0
    assert labels[0] == -100, "the first token has nothing to be predicted from"
    assert record.spans[-1].ends_turn and all(span.num_tokens > 0 for span in record.spans)
    grids = iter(encoded.images)
    end = 0
    for span in record.spans:
        start, end = end, end + span.num_tokens
        if span.num_tiles:
            context = [encoder.image_context_id] * (span.num_tiles * 4)
            assert ids[start:end].tolist() == [encoder.family.start_id, *context, encoder.family.end_id]
            assert (labels[start:end] == -100).all(), "image blocks are never trained"
            assert next(grids).grid.num_tiles == span.num_tiles
        else:
            assert encoder.image_context_id not in ids[start:end]
    assert next(grids, None) is None


def test_a_cut_is_preferred_after_an_answer_not_before_it(encoder, tokenizer):
    turns = [("system", "s"), ("human", "<image>\nq"), ("human", "more"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]
    encoded = encoder.encode(raw_sample(turns, {"a": jpeg(30, 30)}), SPEC)
    texts, start = [], 0
    for span in encoded.record.spans:
        text = tokenizer.decode(encoded.input_ids[start : start + span.num_tokens])
        texts.append((text.replace("<IMG_CONTEXT>", ""), span.ends_turn))
        start += span.num_tokens
    assert texts == [
        ("<|im_start|>system\ns<|im_end|>\n", True),
        ("<|im_start|>user\n", False),
        ("<img></img>", False),
        ("\nq<|im_end|>\n", True),
        ("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n", True),
        ("<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n", True),
    ]


def test_a_text_sample_has_no_tiles(encoder):
    encoded = encoder.encode(raw_sample([("human", "q"), ("gpt", "a")]), SPEC)
    assert (encoded.record.num_tiles, encoded.images) == (0, ())
    assert encoder.decode(encoded).shape == (0, 3, 56, 56)


# --- grids


@pytest.mark.parametrize("count, tiles", [(1, 12 + 1), (2, 6 + 1), (5, 2 + 1), (13, 1)])
def test_images_of_a_sample_share_the_maximum(encoder, count, tiles):
    images = {f"{n}.png": file_of(np.zeros((20, 240), np.uint8)) for n in range(count)}
    encoded = encoder.encode(raw_sample([("human", "q"), ("gpt", "a")], images), SPEC)
    assert [image.grid.num_tiles for image in encoded.images] == [tiles] * count


def test_a_data_sets_own_maximum_takes_precedence(encoder):
    raw = raw_sample([("human", "q"), ("gpt", "a")], {"a": file_of(np.zeros((20, 240), np.uint8))})
    assert encoder.encode(raw, DatasetSpec(name="x", max_dynamic_patch=3)).record.num_tiles == 4


def test_fixed_image_size_squeezes_each_image_into_one_tile(tokenizer):
    encoder = Encoder(tokenizer, EncodeConfig(image_size=56, tokens_per_tile=4))
    raw = raw_sample([("human", "q"), ("gpt", "a")], {"a": jpeg(300, 100), "b": jpeg(56, 56)})
    encoded = encoder.encode(raw, SPEC)
    assert [image.grid for image in encoded.images] == [TileGrid(1, 1)] * 2
    assert encoder.decode(encoded).shape == (2, 3, 56, 56)


def test_real_samples_have_the_measured_images_tiles_and_turns(shared_dir):
    """Against lengths that were measured by other code; tokens need the real tokenizer, see below."""
    measured = {row["id"]: row for row in csv.DictReader(LENGTHS.open(encoding="utf-8"))}
    folder, seen = shared_dir / "data" / "open", 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            if (row := measured.get(data["id"])) is None:
                continue
            names = data.get("image") or []
            names = [names] if isinstance(names, str) else names
            refs = [BytesRef(name, (folder / "images" / name).read_bytes()[: 1 << 16]) for name in names]
            most = max_tiles_per_image(12, len(names))
            tiles = sum(plan_grid(*image_size_of(ref), max_tiles=most).num_tiles for ref in refs)
            assert (len(names), tiles) == (int(row["num_images"]), int(row["num_tiles"])), data["id"]
            seen += 1
    assert seen > 200


@pytest.mark.skipif(
    "QWEN_TOKENIZER" not in os.environ, reason="needs QWEN_TOKENIZER, a folder of the Qwen2.5 tokenizer"
)
def test_real_samples_have_the_measured_tokens(shared_dir):
    from transformers import AutoTokenizer

    from internvl_pack.sources import open_source
    from internvl_pack.sources.meta import load_meta

    encoder = Encoder(AutoTokenizer.from_pretrained(os.environ["QWEN_TOKENIZER"]))
    measured = {row["id"]: row for row in csv.DictReader(LENGTHS.open(encoding="utf-8"))}
    seen = 0
    for spec in load_meta(shared_dir / "data" / "open" / "meta.json"):
        source = open_source(spec)
        for raw in map(source.read, range(len(source))):
            if (row := measured.get(raw.own_id)) is None:
                continue
            record = encoder.encode(raw, spec).record
            found = (record.num_tokens, record.num_loss_tokens, record.num_tiles, record.num_system_tokens)
            assert found == (int(row["num_tokens"]), int(row["num_loss_tokens"]), int(row["num_tiles"]), 37), raw.own_id
            seen += 1
    assert seen > 200


# --- pixels


def test_tiles_come_in_the_order_of_the_images(encoder):
    images = {"a": jpeg(90, 30), "b": file_of(smooth_pixels(56, 56)), "c": jpeg(30, 90)}
    encoded = encoder.encode(raw_sample([("human", "q"), ("gpt", "a")], images), SPEC)
    expected = [decode_tiles(image.ref, image.grid, 56) for image in encoded.images]
    assert np.array_equal(encoder.decode(encoded), np.concatenate(expected))
    first, second = expected[0].shape[0], expected[1].shape[0]
    assert np.array_equal(encoder.decode(encoded, first, first + second), expected[1])
    assert encoder.decode(encoded, first, first).shape[0] == 0
    batch = np.zeros((second + 2, 3, 56, 56), np.uint8)
    encoder.decode(encoded, first, first + second, out=batch[1:-1])
    assert np.array_equal(batch[1:-1], expected[1]) and not batch[0].any() and not batch[-1].any()


def test_an_image_that_fails_at_decoding_is_named(encoder):
    raw = raw_sample([("human", "q"), ("gpt", "a")], {"a.jpg": jpeg()[:-300]})
    encoded = encoder.encode(raw, SPEC)
    with pytest.raises(SampleError, match=r"image_truncated: a\.jpg: "):
        encoder.decode(encoded)


def test_the_encoder_is_the_same_in_another_process(encoder):
    other = pickle.loads(pickle.dumps(encoder))
    raw = raw_sample([("human", "<image>\nq <|im_end|> <box>"), ("gpt", "a")], {"a": jpeg()})
    one, two = encoder.encode(raw, SPEC), other.encode(raw, SPEC)
    assert np.array_equal(one.input_ids, two.input_ids) and np.array_equal(one.labels, two.labels)
    assert one.record == two.record and other.fingerprint() == encoder.fingerprint()


def test_the_fingerprint_tells_options_and_tokenizers_apart(encoder, tokenizer):
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<one_more>"])
    prints = [encoder, Encoder(tokenizer), Encoder(other, TINY)]
    prints = [json.dumps(each.fingerprint(), sort_keys=True) for each in prints]
    assert len(set(prints)) == 3


def test_encoding_changes_nothing_of_the_record(encoder):
    raw = raw_sample([("human", "q"), ("gpt", 4)], {"a": jpeg()})
    before = json.dumps(raw.data)
    encoder.encode(raw, SPEC)
    assert json.dumps(raw.data) == before


# --- augmentation

AUGMENTED = DatasetSpec(name="x", data_augment=True)


def test_augmentation_depends_on_sample_epoch_and_tile_alone(encoder):
    raw = raw_sample([("human", "q"), ("gpt", "a")], {"a": jpeg(90, 30), "b": jpeg(60, 40)})
    plain, encoded = encoder.encode(raw, SPEC), encoder.encode(raw, AUGMENTED)
    clean, tiles = encoder.decode(plain, epoch=3), encoder.decode(encoded, epoch=3)
    assert not np.array_equal(tiles, clean) and abs(tiles.astype(int) - clean).mean() < 6
    assert np.array_equal(tiles, encoder.decode(encoded, epoch=3)), "the same again"
    first = encoded.images[0].grid.num_tiles
    assert np.array_equal(tiles[first:], encoder.decode(encoded, first, epoch=3)), "the same in a fragment"
    assert not np.array_equal(tiles, encoder.decode(encoded, epoch=4))
    assert np.array_equal(clean, encoder.decode(plain, epoch=4))


def test_qualities_cover_75_to_100_evenly():
    counts = np.bincount([jpeg_quality(f"s/{n}", 0, n % 3) for n in range(5200)], minlength=101)
    assert not counts[:75].any() and (counts[75:] > 130).all() and (counts[75:] < 270).all()


def test_recompression_is_what_pillow_writes_at_that_quality():
    import io

    from PIL import Image

    pixels = smooth_pixels(56, 56)
    tile = np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]
    recompress(tile, "s/0", 0, 5)
    data = file_of(pixels, "JPEG", quality=jpeg_quality("s/0", 0, 5))
    expected = np.asarray(Image.open(io.BytesIO(data))).astype(int).transpose(2, 0, 1)
    assert abs(tile[0] - expected).max() <= 1


# --- options


@pytest.mark.parametrize(
    "options, named",
    [
        ({"image_size": 0}, "force_image_size is 0"),
        ({"min_dynamic_patch": 0}, "min_dynamic_patch is 0"),
        ({"max_dynamic_patch": 0}, "max_dynamic_patch is 0"),
        ({"max_image_pixels": 0}, "max_image_pixels is 0"),
        ({"min_dynamic_patch": 7, "max_dynamic_patch": 6}, "min_dynamic_patch=7 exceeds max_dynamic_patch=6"),
    ],
)
def test_impossible_options_are_named(options, named):
    with pytest.raises(UserError, match=named):
        EncodeConfig(**options)


def test_spans_of_a_plain_exchange_are_two(encoder):
    spans = encoder.encode(raw_sample([("human", "q"), ("gpt", "a")]), SPEC).record.spans
    assert [(span.num_tiles, span.ends_turn) for span in spans] == [(0, True)] * 2
    assert all(isinstance(span, Span) for span in spans)
