"""Training with DeepSpeed ZeRO 1, 2 and 3 in two processes against a plain PyTorch loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.factory import png, write_meta
from helpers.stepping import run_ranks

from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.config import PackingConfig
from internvl_pack.model.build import build_model
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import build_loader
from train.arguments import DataTrainingArguments

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
STEPS = 3
SEED = 47  # of the order: packs of like cost meet in a step, and here one of text alone and one of images
MAX_GRAD_NORM = 0.5
RUNS = {
    "zero1": {"deepspeed": "zero_stage1"},
    "zero2": {"deepspeed": "zero_stage2"},
    "zero3": {"deepspeed": "zero_stage3"},
    "plain": {"gradient_accumulation_steps": 2},  # in one process
}
# A large epsilon: Adam's first steps are otherwise signs of gradients, which rounding may turn.
ADAM = {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "adam_beta2": 0.99, "weight_decay": 0.0}
COMMON = {"max_packed_tokens": 320, "loss_reduction": "square", "data_seed": SEED, "max_grad_norm": MAX_GRAD_NORM}
COMMON |= {"max_steps": STEPS, "lr_scheduler_type": "constant", "logging_steps": 1, "grad_checkpoint": True, **ADAM}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """Rows of text alone beside rows of images: three long texts, and samples of two images each."""
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("made")
    (folder / "images").mkdir()
    records = []
    for i in range(18):
        text = f"{i} packs of rows and rows of tiles. " * (24 if i % 2 else 3)
        record = {"conversations": [{"from": "human", "value": f"Describe {i}."}, {"from": "gpt", "value": text}]}
        if i % 2 == 0:
            record["image"] = [f"{i}_{j}.png" for j in range(2)]
            for j, name in enumerate(record["image"]):
                (folder / "images" / name).write_bytes(png(56, 56, 10 * i + j))
        records.append(json.dumps(record))
    (folder / "made.jsonl").write_text("\n".join(records), encoding="utf-8")
    write_meta(folder, {"made": {"root": "images", "annotation": "made.jsonl"}})
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


@pytest.fixture(scope="module")
def runs(made) -> dict[str, tuple[Path, list[dict]]]:
    """Output folder and what each rank saw, by run."""
    # Nothing to compile with: DeepSpeed on a CPU must not need a compiler.
    env = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(made / "ext")}
    seen = {}
    for processes, names in ((2, ("zero1", "zero2", "zero3")), (1, ("plain",))):
        seen |= run_ranks(made, {name: COMMON | RUNS[name] for name in names}, processes=processes, **env)
    assert not (made / "ext").exists(), "an op was compiled"
    return {name: (made / name, ranks) for name, ranks in seen.items()}


@pytest.fixture(scope="module")
def reference(made, tokenizer) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of a loop of plain PyTorch over the same packs, one at a time."""
    # Packs of a step are of like cost, by the operations of the model that is trained.
    config = PackingConfig(max_packed_tokens=320, num_images_expected=8, cost_model=str(made / "model"), seed=SEED)
    data_args = DataTrainingArguments(meta_path=str(made / "meta.json"), force_image_size=56)
    encode = encode_config(vars(data_args), {})
    ranks = [
        PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=encode, rank=r, world_size=2)
        for r in range(2)
    ]
    batches = [list(build_loader(dataset, loss_reduction="square")) for dataset in ranks]
    model = build_model(made / "model", tokenizer=tokenizer, dtype=torch.float32, device="cpu")
    betas = (0.9, ADAM["adam_beta2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM["learning_rate"], betas=betas, eps=ADAM["adam_epsilon"], weight_decay=0.0
    )
    losses, norms = [], []
    for step in zip(*(rank[:STEPS] for rank in batches), strict=True):
        normalizer = sum(batch["loss_weight"].sum() for batch in step)
        loss = sum(model(**batch, loss_normalizer=normalizer).loss for batch in step)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.model.state_dict()


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_plain_pytorch(name, runs, reference):
    output_dir, seen = runs[name]
    losses, norms, weights = reference
    # The trainer logs the mean over ranks of their shares: each rank's loss times the number of ranks.
    torch.testing.assert_close(torch.tensor(seen[0]["losses"]), torch.tensor(losses), rtol=TOLERANCE, atol=0)
    assert min(norms) > MAX_GRAD_NORM, "clipping takes part"
    torch.testing.assert_close(torch.tensor(seen[0]["norms"]), torch.tensor(norms), rtol=TOLERANCE, atol=0)
    trained = load(output_dir).state_dict()
    assert trained.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(trained[key], value, rtol=0, atol=TOLERANCE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_one_rank_trained_without_an_image_while_the_other_had_some(name, runs):
    _, (first, second) = runs[name]
    assert any((a == 0) != (b == 0) for a, b in zip(first["tiles"], second["tiles"], strict=True))


def test_one_process_trains_the_same_samples_as_two(runs):
    def trained(name: str) -> list[list[str]]:
        """Ids by step, of all ranks."""
        by_rank = [rank["steps"] for rank in runs[name][1]]
        return [sorted(i for step in steps for i in step["sample_ids"]) for steps in zip(*by_rank, strict=True)]

    assert trained("plain") == trained("zero1")


@pytest.mark.parametrize("name", ["zero3", "plain"])
def test_output_is_an_ordinary_checkpoint_with_its_tokenizer(name, runs, tokenizer):
    from transformers import AutoTokenizer

    output_dir, _ = runs[name]
    saved = AutoTokenizer.from_pretrained(output_dir)
    assert saved("Describe <IMG_CONTEXT> packs.").input_ids == tokenizer("Describe <IMG_CONTEXT> packs.").input_ids
    model = load(output_dir)
    ids = torch.tensor([saved("Describe 3.").input_ids])
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (1, ids.shape[1] + 2)


def load(output_dir: Path):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(output_dir)


def test_the_reference_covers_a_row_without_images(made, tokenizer):
    config = PackingConfig(max_packed_tokens=320, num_images_expected=8)
    data_args = DataTrainingArguments(meta_path=str(made / "meta.json"), force_image_size=56)
    encode = encode_config(vars(data_args), {})
    rows = list(PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=encode))
    assert {bool(len(packed_collate_fn([row], image_size=56)["pixel_values"])) for row in rows} == {True, False}
