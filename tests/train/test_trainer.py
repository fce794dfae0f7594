"""`PackTrainer` as a Hugging Face user writes it: a model, arguments, datasets."""

from __future__ import annotations

import json
import os

import pytest
from helpers.factory import TINY, write_jsonl

from internvl_pack import PackedDataset, PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model


@pytest.fixture
def environment():
    """Put back afterwards: arguments set what DeepSpeed and gloo want to find."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.mark.slow
def test_six_lines_train_a_dataset_and_evaluate_another(tokenizer, tmp_path, environment):
    from internvl_pack.testing.tiny import save_tiny_checkpoint
    from train.arguments import PackTrainingArguments
    from train.trainer import PackTrainer

    save_tiny_checkpoint(tmp_path / "model", tokenizer)
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16)
    datasets = [
        PackedDataset.from_meta(write_jsonl(tmp_path / name, count), tokenizer, each, encode=TINY)
        for name, count, each in (("train", 40, config), ("held_out", 6, PackingConfig(shuffle=False)))
    ]
    args = PackTrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        save_strategy="no",
        eval_strategy="epoch",
        report_to="none",
    )
    trainer = PackTrainer(
        model=build_model(tmp_path / "model", tokenizer=tokenizer, device="cpu"),
        args=args,
        train_dataset=datasets[0],
        eval_dataset=datasets[1],
        processing_class=tokenizer,
    )
    trainer.train()
    steps = sum(1 for _ in datasets[0].step_plan(0, 2))
    assert trainer.state.global_step == steps
    ledger = trainer.ledgers.of_ended()
    ledger.check()
    assert ledger.samples_packed == 40
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluation["eval_samples"] == 6
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == steps and losses[-1] < losses[0]


@pytest.mark.slow
def test_a_damaged_ledger_of_ended_epochs_is_told_in_one_line(tokenizer, tmp_path, environment):
    from internvl_pack.testing.tiny import save_tiny_checkpoint
    from train.arguments import PackTrainingArguments
    from train.checkpoint import PACKING_STATE
    from train.trainer import PackTrainer

    save_tiny_checkpoint(tmp_path / "model", tokenizer)
    dataset = PackedDataset.from_meta(
        write_jsonl(tmp_path / "train", 10), tokenizer, PackingConfig(max_packed_tokens=400), encode=TINY
    )

    def new_trainer():
        args = PackTrainingArguments(
            output_dir=str(tmp_path / "out"), use_cpu=True, num_train_epochs=1, save_strategy="epoch", report_to="none"
        )
        model = build_model(tmp_path / "model", tokenizer=tokenizer, device="cpu")
        return PackTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)

    new_trainer().train()
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    state = json.loads((checkpoint / PACKING_STATE).read_text())
    del state["ended"]["ledger"]["counts"]
    (checkpoint / PACKING_STATE).write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"the ledger of the ended epochs in .* is damaged .KeyError: 'counts'"):
        new_trainer().train(resume_from_checkpoint=str(checkpoint))
