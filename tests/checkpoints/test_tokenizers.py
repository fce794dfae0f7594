"""Tokenizers that cannot be loaded: one line that names the folder."""

from __future__ import annotations

import pytest

from internvl_pack.checkpoints import tokenizers
from internvl_pack.errors import UserError


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError("not there\nlook elsewhere"), "not there"), (ValueError(), "ValueError"), (KeyError("model"), "'model'")],
)
def test_the_first_line_of_an_error_is_passed_on_or_its_kind(error, said, tmp_path, monkeypatch):
    def fails(path):
        raise error

    monkeypatch.setattr(tokenizers, "_loaded", fails)
    with pytest.raises(UserError) as caught:
        tokenizers.load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no tokenizer found there: {said}"
