"""The data of a run: what is looked at before a model is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.factory import TINY

from internvl_pack import DatasetSource, Encoder, UserError
from internvl_pack.samples import Samples

ASK, TELL = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Tea."}
PLAIN = {"messages": [ASK, TELL]}
PAIR = {"messages": [ASK], "chosen": "Tea.", "rejected": "Tar."}


@pytest.mark.parametrize(
    ("objective", "rows", "said"),
    [
        ("sft", [PAIR] * 3, "dataset 'b': .*preference_data: .*--objective dpo or mpo"),
        ("dpo", [PLAIN] * 100, "dataset 'b': .*no_preference_data: "),
        ("sft", [PAIR, PLAIN], None),  # what is left out is counted in training
        ("sft", [PAIR] * 40 + [PLAIN], "preference_data"),
        ("dpo", ["no object", PLAIN], None),
        ("dpo", [PAIR], None),
        ("sft", [PLAIN], None),
    ],
)
def test_data_wholly_of_another_objective_is_refused_by_its_first_rows(objective, rows, said, tokenizer):
    good = PLAIN if objective == "sft" else PAIR
    sources = [DatasetSource("a", [good]), DatasetSource("b", rows)]
    samples = Samples.of(sources, Encoder(tokenizer, replace(TINY, objective=objective)))
    if said is None:
        samples.check_objective()
        return
    with pytest.raises(UserError, match=said):
        samples.check_objective()
