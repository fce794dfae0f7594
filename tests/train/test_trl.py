"""The losses of pairs in packed trees against TRL's DPOTrainer, on text: values and every parameter's gradient.

TRL tokenizes the texts by itself, and runs chosen and rejected answers as padded rows through transformers' own model.
That is in float64 here: TRL's sums of log-probabilities in float32 round by more than what is asked for.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from helpers.factory import write_meta
from helpers.model_samples import LOSS_TOLERANCE, assert_same_gradients, gradients, plain_twin, tiny_packed
from helpers.pair_steps import moved, objective_of, step, trained_gradients

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.model.loss.preference import PreferenceLoss

pytestmark = pytest.mark.slow

BETA, SMOOTHING = 0.2, 0.1
PAIRS = [
    ("What is 2 + 2?", "4.", "It is five."),
    ("Name a bird.", "A crane over the water.", "A dog."),
    ("Say nothing.", "...", "Nothing!"),
    ("Count to five, in words, one after the other.", "One, two, three, four, five.", "One, two, five."),
]
# TRL has no smoothing of its sigmoid, but the "robust" loss: with a of the pair as it is and b of the pair the wrong
# way round ((1 - s) a - s b) / (1 - 2 s). So (1 - s) a + s b is 2 (1 - s) sigmoid - (1 - 2 s) robust.
SMOOTHED = {"sigmoid": 2 * (1 - SMOOTHING), "robust": 2 * SMOOTHING - 1}
# Ours; TRL's losses and their weights. A first step has a delta of 0, which TRL's bco_pair always has.
CASES = {
    "sigmoid": (PreferenceLoss({"sigmoid": 1.0}, BETA), {"sigmoid": 1.0}),
    "label_smoothing": (PreferenceLoss({"sigmoid": 1.0}, BETA, SMOOTHING), SMOOTHED),
    "sigmoid_norm": (PreferenceLoss({"sigmoid_norm": 1.0}, BETA), {"sigmoid_norm": 1.0}),
    "bco_pair": (PreferenceLoss({"bco_pair": 1.0}, BETA), {"bco_pair": 1.0}),
    "mpo": (
        PreferenceLoss({"sigmoid": 0.8, "bco_pair": 0.2}, BETA, sft_weight=1.0),
        {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0},
    ),
}


@pytest.fixture(scope="module")
def batch(tokenizer, tmp_path_factory):
    """The pairs as one packed row."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [json.dumps({"question": q, "chosen": c, "rejected": r}) for q, c, r in PAIRS]
    (folder / "pairs.jsonl").write_text("".join(line + "\n" for line in lines))
    meta = write_meta(folder, {"pairs": {"root": "", "annotation": "pairs.jsonl"}})
    encode = EncodeConfig(image_size=56, tokens_per_tile=4, objective="dpo")
    packing = PackingConfig(max_packed_tokens=2048)
    (batch,) = build_loader(PackedDataset.from_meta(meta, tokenizer, packing, encode=encode))
    assert batch["num_pairs"] == len(PAIRS)
    return batch


def answers_of(batch):
    """Of each pair the ids of its prompt and of its answers up to their last trained token."""
    spans = list(pairwise(batch["cu_seqlens"].tolist()))
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    for pair in batch["pairs"].tolist():
        found = {}
        for name, number in zip(("chosen", "rejected"), pair, strict=True):
            (a, b), (c, d) = spans[batch["prefix_of"][number]], spans[number]
            whole, trained = ids[a:b] + ids[c:d], labels[a:b] + labels[c:d]
            places = [place for place, label in enumerate(trained) if label != -100]
            assert places == list(range(places[0], places[-1] + 1))
            found[name] = whole[: places[0]], whole[places[0] : places[-1] + 1]
        (prompt, chosen), (again, rejected) = found["chosen"], found["rejected"]
        assert prompt == again
        yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


@pytest.fixture
def trl_trainer(tokenizer, batch, tmp_path):
    """weights by loss -> TRL's trainer on the texts of the batch, its model's weights those of `packed`."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    pairs = list(answers_of(batch))
    texts = [{name.removesuffix("_ids"): tokenizer.decode(ids) for name, ids in pair.items()} for pair in pairs]

    def make(weights, beta, label_smoothing, packed, reference):
        args = trl.DPOConfig(
            output_dir=str(tmp_path),
            loss_type=list(weights),
            loss_weights=list(weights.values()),
            beta=beta,
            label_smoothing=label_smoothing,
            max_length=None,
            per_device_train_batch_size=len(pairs),
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
        )
        trainer = trl.DPOTrainer(
            plain_twin(packed).double(),
            plain_twin(reference).double(),
            args=args,
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer,
        )
        assert [{name: row[name] for name in pairs[0]} for row in trainer.train_dataset] == pairs
        return trainer

    return make


@pytest.mark.parametrize("case", CASES)
def test_packed_pairs_have_the_loss_and_gradients_of_trl(tokenizer, batch, trl_trainer, case):
    ours, theirs = CASES[case]
    packed, reference = tiny_packed(tokenizer), moved(tiny_packed(tokenizer))
    trainer = trl_trainer(theirs, ours.beta, ours.label_smoothing, packed, reference)
    expected = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    expected.backward()

    objective = objective_of(ours, reference)
    loss = step(objective, packed, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=LOSS_TOLERANCE)
    exact = gradients(trainer.model)
    assert_same_gradients(trained_gradients(gradients(packed.model), exact), exact)

    figures = objective.since_last_log()
    trainer.log({})
    logged = trainer.state.log_history[-1]
    names = [name for name in figures if name.startswith("rewards/")]
    assert len(names) == 4
    assert [figures[name] for name in names] == pytest.approx([logged[name] for name in names], abs=1e-5)
