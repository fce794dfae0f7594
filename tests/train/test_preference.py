"""Options of training on pairs."""

from __future__ import annotations

import math

import pytest

from internvl_pack.errors import UserError
from train.preference import PreferenceArguments, preference_loss


def test_the_objective_has_weights_that_options_replace():
    loss = preference_loss("mpo", PreferenceArguments(loss_type="sigmoid_norm, bco_pair", rpo_alpha=0.0))
    assert loss is not None
    assert (loss.weights, loss.sft_weight) == ({"sigmoid_norm": 0.8, "bco_pair": 0.2}, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmoid,sigmoid"}, "--loss_type sigmoid,sigmoid: sigmoid is there twice"),
        ({"loss_type": "sigmoid,"}, "--loss_type '' is unknown"),
        ({"sigmoid_loss_weight": 0.0}, "have weight 0: nothing is trained"),
        ({"beta": math.inf}, "--beta inf: give a finite number"),
        ({"beta": math.nan}, "--beta nan: give more than 0"),
        ({"sigmoid_loss_weight": math.inf}, "--sigmoid_loss_weight inf: give a finite number"),
        ({"rpo_alpha": math.inf}, "--rpo_alpha inf: give a finite number"),
        ({"loss_type": "bco_pair", "label_smoothing": 0.1}, "--label_smoothing 0.1 with --loss_type bco_pair"),
        ({"loss_type": "bco_pair", "sigmoid_loss_weight": 0.5}, "--sigmoid_loss_weight 0.5 with --loss_type bco_pair"),
        ({"bco_pair_loss_weight": 0.2}, "--bco_pair_loss_weight 0.2 with --loss_type sigmoid: it is of bco_pair"),
    ],
)
def test_options_without_a_loss_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        preference_loss("dpo", PreferenceArguments(**options))
