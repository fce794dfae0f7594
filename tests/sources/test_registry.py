"""Kinds of sources that a plugin registers, and what is refused."""

from __future__ import annotations

import json

import pytest

from internvl_pack import (
    DatasetSource,
    EncodeConfig,
    Encoder,
    PackedDataset,
    PackingConfig,
    UserError,
    build_loader,
    register_source,
    register_template,
)
from internvl_pack.sources import load_meta, open_source

CONFIG = PackingConfig(max_packed_tokens=256, num_images_expected=8)


PLUGIN = """
from internvl_pack import ChatML, DatasetSource, register_source, register_template

@register_source('mine')
def mine(name, answer):
    turns = [{'from': 'human', 'value': 'Hi.'}, {'from': 'gpt', 'value': answer}]
    return DatasetSource(name, [{'conversations': turns}] * 3)

@register_source('half')
def half(name):
    return [1, 2]

@register_template('my_style')
def style(tokenizer):
    return ChatML(tokenizer, None, 'my_style')
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("INTERNVL_PACK_PLUGINS", "my_plugin")


def written(path, entries) -> str:
    path.write_text(json.dumps(entries))
    return str(path)


def mine(**options) -> dict:
    return {"a": {"source": "mine", "options": options}}


def test_kinds_that_no_plugin_registers_are_refused(tmp_path, tokenizer, monkeypatch):
    (spec,) = load_meta(written(tmp_path / "meta.json", {"a": {"source": "nobody's"}}))
    with pytest.raises(UserError, match=r"source \"nobody's\" is unknown.*datasets.*INTERNVL_PACK_PLUGINS"):
        open_source(spec)
    monkeypatch.setenv("INTERNVL_PACK_PLUGINS", "no_such_plugin")
    with pytest.raises(UserError, match="no module 'no_such_plugin'"):
        Encoder(tokenizer, EncodeConfig(conv_style="unheard of"))


def test_a_meta_file_names_a_registered_kind_of_a_plugin(tmp_path, plugin, tokenizer):
    meta = written(tmp_path / "meta.json", {"a": {**mine(answer="Ho.")["a"], "repeat_time": 2}})
    encode = EncodeConfig(conv_style="my_style", tokens_per_tile=4)
    dataset = PackedDataset.from_meta(meta, tokenizer, CONFIG, encode=encode)
    assert sum(b["num_samples"] for b in build_loader(dataset)) == 6


@pytest.mark.parametrize(
    "entries, message",
    [
        (mine(anser="Ho."), "source 'mine' has no option 'anser': did you mean 'answer'"),
        (mine(), "'options' of source 'mine'.*answer"),
        ({"a": {"source": "half"}}, "gives a list, not a Source"),
        ({"a": {"source": "datasets", "options": {}}}, "path"),
        ({"a": {"source": "datasets", "options": {"path": "x", "splitt": "y"}}}, "splitt"),
        ({"a": {"source": "datasets", "options": {"path": "nowhere"}}}, "nowhere does not exist"),
        ({"a": {"source": "datasets", "options": {"path": "my_plugin.py"}}}, "my_plugin.py is no saved Dataset"),
    ],
)
def test_what_a_source_is_not_made_of_is_refused(tmp_path, plugin, entries, message):
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match=message):
        open_source(load_meta(written(tmp_path / "meta.json", entries))[0])


def test_a_name_belongs_to_one_factory():
    def once_more():
        @register_source("test: twice")
        def factory(name):
            return DatasetSource(name, [])

        return factory

    assert once_more() is not once_more()  # a cell of a notebook that is run again
    with pytest.raises(UserError, match=r"source 'test: twice' is registered already, by .*once_more"):
        register_source("test: twice")(DatasetSource)
    with pytest.raises(UserError, match="conv_style 'internvl2_5' is registered already"):
        register_template("internvl2_5")(lambda tokenizer: None)
