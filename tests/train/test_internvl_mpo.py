"""MPO in packed trees against the loss of InternVL's trainer, on pairs with images: values and every gradient.

Theirs is written here from its definition: the chosen and the rejected answers are padded rows of one batch, with the
images of every pair once for each; 0.8 sigmoid + 0.2 bco_pair as means over the pairs, + the cross-entropy of the
chosen answers as a mean over their tokens. Without what a step should not depend on, and without its faults:

* delta takes in the rewards of the current micro-batch; here it is the mean of the steps before.
* Each micro-batch counts alike in that mean; here each answer does.
* The mean of SFT is over a micro-batch; here a step is one.
* A release takes token 0 for one that is not trained; here it is one like others.
* Of a pair that cannot be read another one, drawn at random, takes the place. None is here.

Their trainer itself (OpenGVLab/InternVL at 2410d1d, trl 0.10.1) was held against ours by hand on steps as below, its
delta that of the steps before: the losses differ by 1.1e-7 of their value at most, the gradients by 1.7e-6.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.model_samples import (
    IGNORE,
    LOSS_TOLERANCE,
    assert_same_gradients,
    gradients,
    packed_batch,
    plain_twin,
    tiny_packed,
)
from helpers.pair_steps import moved, objective_of, step, trained_gradients
from helpers.tree_samples import tree

from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.loss.preference import PreferenceLoss

pytestmark = pytest.mark.slow

BETA = 0.2
# Of each step its pairs: the prompt's plan, the tokens of the chosen and of the rejected answer.
STEPS = [
    [([("text", 5), ("image", 3), ("text", 6)], [7, 4]), ([("text", 8)], [2, 9])],
    [([("image", 1), ("text", 3), ("image", 2), ("text", 2)], [5, 11])],
    [([("text", 9), ("image", 2), ("text", 1)], [1, 6]), ([("image", 4), ("text", 4)], [8, 3])],
]


def padded(pairs):
    """Ids, labels and attention mask of the chosen answers' rows and below them the rejected's; pixels of both."""
    alone = [s.unshared() for s in pairs]
    rows = [answers[place] for place in (0, 1) for answers in alone]
    longest = max(len(row.input_ids) for row in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), IGNORE)
    for number, row in enumerate(rows):
        ids[number, : len(row.input_ids)] = torch.from_numpy(row.input_ids)
        labels[number, : len(row.labels)] = torch.from_numpy(row.labels)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    tiles = torch.from_numpy(np.concatenate([s.tiles for s in pairs]))
    return ids, labels, mask, normalize_tiles(tiles, torch.float32).repeat(2, 1, 1, 1)


def log_probabilities(model, ids, labels, mask, pixels):
    """Of each row the sum over its trained tokens."""
    logits = model(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_cache=False).logits
    targets = labels[:, 1:]
    each = logits[:, :-1].log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return (each * (targets != IGNORE)).double().sum(1)


def internvl_loss(model, reference, pairs, earlier_rewards):
    """The loss of a step, and the rewards of its answers."""
    batch = padded(pairs)
    sums = log_probabilities(model, *batch)
    with torch.no_grad():
        held_against = log_probabilities(reference, *batch)
    chosen, rejected = (BETA * (sums - held_against)).chunk(2)
    delta = sum(earlier_rewards) / max(1, len(earlier_rewards))
    sigmoid = -F.logsigmoid(chosen - rejected).mean()
    bco = (-F.logsigmoid(chosen - delta) - F.logsigmoid(delta - rejected)).mean()
    sft = -sums[: len(pairs)].sum() / (batch[1][: len(pairs), 1:] != IGNORE).sum()
    return 0.8 * sigmoid + 0.2 * bco + 1.0 * sft, [*chosen.tolist(), *rejected.tolist()]


def test_packed_pairs_have_the_loss_and_gradients_of_internvl(tokenizer):
    packed, reference = tiny_packed(tokenizer), moved(tiny_packed(tokenizer))
    plain, held_against = plain_twin(packed), plain_twin(reference)
    objective = objective_of(PreferenceLoss({"sigmoid": 0.8, "bco_pair": 0.2}, BETA, sft_weight=1.0), reference)
    rewards, seed = [], 0
    for plans in STEPS:
        pairs = []
        for prompt, answers in plans:
            pairs.append(tree(tokenizer, prompt, answers, seed))
            seed += 1
        pairs[0].input_ids[-1] = pairs[0].labels[-1] = 0  # a token like others
        plain.zero_grad()
        expected, found = internvl_loss(plain, held_against, pairs, rewards)
        expected.backward()
        rewards += found
        loss = step(objective, packed, packed_batch(pairs, pairs=True))
        assert loss.item() == pytest.approx(expected.item(), rel=LOSS_TOLERANCE)
        exact = gradients(plain)
        assert_same_gradients(trained_gradients(gradients(packed.model), exact), exact)
    assert objective.mean.value.item() == pytest.approx(sum(rewards) / len(rewards), rel=1e-4)
