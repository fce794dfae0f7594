"""Prefix trees made by hand, and their answers one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from helpers.model_samples import IGNORE, segment
from internvl_pack.batch.row import Segment
from internvl_pack.records import Branch


def tree(tokenizer, prompt, answers, seed=0, weights=None, **changes) -> Segment:
    """A prompt, by the plan that `segment` takes, with answers of so many tokens each.

    The prefix is the prompt without its last token, which begins every branch.
    """
    root = segment(tokenizer, [*prompt, ("text", 1)], seed)
    rng = np.random.default_rng(1000 + seed)
    ids, labels, branches = [root.input_ids[:-1]], [root.labels[:-1]], []
    for number, count in enumerate(answers):
        words = rng.integers(0, 256, count).astype(np.int32)
        ids += [root.input_ids[-1:], words]
        labels += [np.array([IGNORE], dtype=np.int32), words]
        trained = count + int((root.labels[1:] != IGNORE).sum())
        branches.append(Branch(1 + count, trained, 1.0 if weights is None else weights[number]))
    changes = {"branches": tuple(branches), "num_loss_tokens": sum(b.num_loss_tokens for b in branches)} | changes
    return replace(root, input_ids=np.concatenate(ids), labels=np.concatenate(labels), **changes)


TREES = {
    "pair with an image": ([("text", 5), ("image", 3), ("text", 6)], [7, 4]),
    "eight answers": ([("image", 2), ("text", 4)], [3, 1, 9, 5, 2, 6, 4, 8]),
    "several images, long prompt": ([("text", 30), ("image", 1), ("text", 9), ("image", 2), ("text", 3)], [5, 12]),
    "text only": ([("text", 8)], [6, 1, 2]),
    "trained turns in the prefix": ([("text", 4), ("answer", 5), ("text", 3)], [4, 6]),
    "one branch": ([("image", 1), ("text", 2)], [5]),
}


def trees(tokenizer, *names) -> list[Segment]:
    return [tree(tokenizer, *TREES[name], seed) for seed, name in enumerate(names or TREES)]
