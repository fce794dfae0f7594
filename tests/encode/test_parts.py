"""A sample that was cut into many rows: each row is encoded from its own spans, as it stands in the whole sample."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.encode_samples import SPEC, jpeg, raw_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack import PackingConfig
from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode import sample as encode_sample
from internvl_pack.errors import SampleError

TINY = EncodeConfig(image_size=56, tokens_per_tile=4)
TURNS = st.lists(
    st.tuples(st.sampled_from(["human", "gpt"]), st.text(alphabet="ab <é图\n", max_size=40), st.integers(0, 2)),
    min_size=4,
    max_size=12,
)


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, TINY)


def conversation(turns, system="s"):
    images: dict[str, bytes] = {}
    written = [("system", system)] if system else []
    for role, text, count in [*turns, ("human", "q", 0), ("gpt", "a", 0)]:
        for _ in range(count if role == "human" else 0):
            text += "<image>\n"
            images[f"{len(images)}.jpg"] = jpeg(*((60, 40), (90, 30), (20, 90))[len(images) % 3])
        written.append((role, text))
    return raw_sample(written, images)


@pytest.mark.slow
@given(TURNS, st.sampled_from(["", "s", "be brief and kind"]), st.integers(60, 90), st.booleans())
@settings(max_examples=80, deadline=None)
def test_parts_are_the_pieces_of_the_whole(encoder, turns, system, budget, repeat):
    raw = conversation(turns, system)
    whole, outline = encoder.encode(raw, SPEC), encoder.outline(raw, SPEC)
    config = PackingConfig(max_packed_tokens=budget, num_images_expected=14, repeat_system_prompt=repeat)
    fragments = config.cut(whole.record, 5)
    for fragment in fragments if len(fragments) > 1 else ():
        part = encoder.encode_part(outline, fragment)
        start, stop = fragment.token_start - fragment.num_context_tokens, fragment.token_stop
        prefix = whole.input_ids[: fragment.num_prefix_tokens]
        untrained = fragment.num_prefix_tokens + fragment.num_context_tokens
        assert part.input_ids.tolist() == [*prefix, *whole.input_ids[start:stop]]
        assert (part.labels[:untrained] == -100).all()
        assert part.labels[untrained:].tolist() == whole.labels[fragment.token_start : stop].tolist()
        assert part.record.num_loss_tokens == whole.record.num_loss_tokens, "which weighs all of its tokens"
        tiles = encoder.decode(part)
        assert np.array_equal(tiles, encoder.decode(whole, fragment.tile_start, fragment.tile_stop))


def counted(monkeypatch, encoder) -> dict[str, int]:
    """Characters that are tokenized and image headers that are read from now on."""
    counts = {"characters": 0, "headers": 0}
    encode, size_of = encoder._text.encode, encode_sample.image_size_of

    def encoding(texts):
        counts["characters"] += sum(map(len, texts))
        return encode(texts)

    def reading(*args):
        counts["headers"] += 1
        return size_of(*args)

    monkeypatch.setattr(encoder._text, "encode", encoding)
    monkeypatch.setattr(encode_sample, "image_size_of", reading)
    return counts


def test_a_sample_of_many_rows_costs_as_much_as_its_rows(encoder, monkeypatch):
    raw = conversation([("human", f"what is {n}", 1) if n % 2 else ("gpt", f"this is {n}", 0) for n in range(160)])
    config = PackingConfig(max_packed_tokens=60, num_images_expected=14)
    outline = encoder.outline(raw, SPEC)
    counts = counted(monkeypatch, encoder)
    fragments = config.cut(encoder.encode(raw, SPEC).record, 0)
    once = dict(counts)
    assert len(fragments) > 40 and once["headers"] == 80
    for fragment in fragments:
        encoder.encode_part(outline, fragment)
    assert counts["headers"] == 2 * once["headers"], "each once more"
    assert counts["characters"] < 3 * once["characters"], "cuts inside of turns are the only ones that are read twice"


def test_a_part_of_a_sample_that_has_changed_is_refused(encoder):
    turns = [("human", "x " * 20, 0), ("gpt", "y " * 20, 0)] * 4
    config = PackingConfig(max_packed_tokens=60, num_images_expected=14)
    fragments = config.cut(encoder.encode(conversation(turns), SPEC).record, 0)
    longer = encoder.outline(conversation([*turns[:-1], ("gpt", "y " * 21, 0)]), SPEC)
    encoder.encode_part(longer, fragments[0])
    with pytest.raises(SampleError, match=r"part .* of .* lies in .* tokens and 0 tiles now, and was surveyed in"):
        for fragment in fragments:
            encoder.encode_part(longer, fragment)
    shorter = encoder.outline(conversation(turns[:2]), SPEC)
    with pytest.raises(SampleError) as refused:
        encoder.encode_part(shorter, fragments[-1])
    assert refused.value.reason == "changed_since_survey"
