"""Processor files of what training writes: inference prepares images and chats as training did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import answer
from helpers.factory import TINY, write_meta
from helpers.native_samples import native_tokenizer
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.utils import is_torchvision_available

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.checkpoints.processor import PREPROCESSOR, PROCESSOR, VIDEO, save_processor
from internvl_pack.encode.formats import make_template
from internvl_pack.model.build import build_model
from internvl_pack.model.images import normalize_tiles
from internvl_pack.testing.tiny import save_tiny_checkpoint
from train.saving import Saving

NATIVE = ("qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5")
QUESTION = "how many tiles of the image"
ENCODE = replace(TINY, max_dynamic_patch=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A tiny model without processor files, an image, and a meta file of one sample."""
    folder = tmp_path_factory.mktemp("base")
    save_tiny_checkpoint(folder / "model", tokenizer)
    Image.effect_noise((200, 100), 80).convert("RGB").save(folder / "a.png")
    turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": "two and one"}]
    (folder / "one.jsonl").write_text(json.dumps({"image": "a.png", "conversations": turns}) + "\n")
    write_meta(folder, {"one": {"root": ".", "annotation": "one.jsonl"}})
    return folder


def save(base, tokenizer, out, saving, **options):
    model = build_model(base / "model", tokenizer=tokenizer, device="cpu", dtype=torch.float32, **options)
    saving.write(model, out, None, tokenizer)
    return out


def chat(image):
    parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def trained_on(base, tokenizer):
    """Ids of the prompt, and the normalised tiles, as the loader gives them."""
    dataset = PackedDataset.from_meta(base / "meta.json", tokenizer, PackingConfig(), encode=ENCODE)
    (batch,) = build_loader(dataset)
    first = int((batch["labels"][0] >= 0).nonzero()[0])
    return batch["input_ids"][0, :first].tolist(), normalize_tiles(batch["pixel_values"], torch.float32)


@pytest.mark.slow
def test_made_files_prepare_a_chat_as_training_did(base, tokenizer, tmp_path):
    out = save(base, tokenizer, tmp_path, Saving(source=str(base / "model"), encode=ENCODE))
    ids, tiles = trained_on(base, tokenizer)
    image = Image.open(base / "a.png")
    seen = AutoImageProcessor.from_pretrained(out)(image, crop_to_patches=True, return_tensors="pt")["pixel_values"]
    assert seen.shape == tiles.shape and len(tiles) > 1
    assert (seen - tiles).abs().max() < 2 / 255 / 0.224, "a level of rounding"
    saved = AutoTokenizer.from_pretrained(out)
    per_tile = json.loads((out / PROCESSOR).read_text())["image_seq_length"]
    block = saved.start_image_token + saved.context_image_token * per_tile * len(seen) + saved.end_image_token
    prompt = saved.apply_chat_template(chat(image), tokenize=False, add_generation_prompt=True)
    prompt = prompt.replace(saved.context_image_token, block)
    assert saved(prompt, add_special_tokens=False).input_ids == ids


def answers(question, images, folders):
    """Of helpers/answer.py."""
    command = [sys.executable, answer.__file__, question, ",".join(map(str, images)), *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    return [json.loads(line) for line in said.stdout.splitlines()[-len(folders) :]]


needs_torchvision = pytest.mark.skipif(
    not (is_torchvision_available() or "INTERNVL_PACK_TORCHVISION" in os.environ),
    reason="transformers' processors of whole models need torchvision; shell/test.sh names one",
)


@pytest.mark.slow
@needs_torchvision
def test_the_processor_of_native_resolution_makes_the_prompts_and_grids_of_training(base, tmp_path):
    """Of pictures of two sizes, one of which is made smaller; the model answers from the folder."""
    Image.effect_noise((90, 310), 80).convert("RGB").save(tmp_path / "b.png")
    images = [base / "a.png", tmp_path / "b.png"]
    question = f"left: <image> right: <image>{QUESTION}"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "two and one"}]
    record = {"image": [str(image) for image in images], "conversations": turns}
    (tmp_path / "two.jsonl").write_text(json.dumps(record) + "\n")
    meta = write_meta(tmp_path, {"two": {"root": "/", "annotation": "two.jsonl"}})
    expected = []
    for family in NATIVE:
        tokenizer, folder = native_tokenizer(family), tmp_path / family
        save_tiny_checkpoint(folder, tokenizer, family=family)
        content = json.loads((folder / "config.json").read_text())
        bounds = {"min_pixels": 1024, "max_pixels": 20_000}
        encode = encode_config({"conv_style": "chat_template"} | bounds, content)
        save_processor(folder, str(folder), tokenizer, encode, 0)
        config = PackingConfig(max_packed_tokens=512, num_images_expected=512)
        (batch,) = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=encode))
        first = int((batch["labels"][0] >= 0).nonzero()[0])
        grids = [[1, 2 * rows, 2 * columns] for rows, columns in batch["image_grids"]]
        expected.append((batch["input_ids"][0, :first].tolist(), grids, 4 * len(batch["pixel_values"])))
        assert grids[0][1:] != grids[1][1:]
    found = answers(question, images, [tmp_path / family for family in NATIVE])
    for family, told, (ids, grids, patches) in zip(NATIVE, found, expected, strict=True):
        assert (told["prompt"], told["grids"]) == (ids, grids), family
        assert told["tiles"][0] == patches and told["answer"] == told["pipeline"]


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize("options", [{}, {"use_llm_lora": 2}], ids=["whole", "lora"])
def test_autoprocessor_generate_and_pipeline_work_from_the_folder(options, base, tokenizer, tmp_path):
    out = save(base, tokenizer, tmp_path, Saving(source=str(base / "model"), encode=ENCODE), **options)
    (found,) = answers(f"<image>{QUESTION}", [base / "a.png"], [out])
    ids, tiles = trained_on(base, tokenizer)
    assert found["prompt"] == ids and found["tiles"] == list(tiles.shape)
    assert found["answer"] == found["pipeline"]


def test_a_bases_own_files_are_copied_beside_the_model_and_beside_adapters(base, tokenizer, tmp_path):
    own = {PREPROCESSOR: {"max_patches": 7}, VIDEO: {"num_frames": 3}, PROCESSOR: {"image_seq_length": 4}}
    save_tiny_checkpoint(tmp_path / "base", tokenizer)
    for name, content in own.items():
        (tmp_path / "base" / name).write_text(json.dumps(content))
    for merge, rank in ((True, 0), (False, 2)):
        saving = Saving(merge_lora=merge, source=str(tmp_path / "base"), encode=ENCODE)
        out = save(base, tokenizer, tmp_path / f"out{rank}", saving, use_llm_lora=rank)
        assert {name: json.loads((out / name).read_text()) for name in own} == own
        assert (out / "chat_template.jinja").read_text() == (tmp_path / "base" / "chat_template.jinja").read_text()
        assert (out / ("model.safetensors" if merge else "adapter_model.safetensors")).is_file()


def test_without_dynamic_tiles_an_image_is_one(base, tokenizer, tmp_path):
    encode = replace(ENCODE, dynamic_image_size=False)
    out = save(base, tokenizer, tmp_path, Saving(encode=encode))
    image = Image.open(base / "a.png")
    assert len(AutoImageProcessor.from_pretrained(out)(image, crop_to_patches=True)["pixel_values"]) == 1


@pytest.mark.parametrize("style", ["internvl2_5", "Hermes-2", "internlm2-chat"])
def test_a_chat_format_renders_as_it_is_trained(style, tokenizer):
    """Turns with a system turn and a history, texts with white space around them."""
    from internvl_pack.encode.chat import Turn

    template = make_template(style, tokenizer)
    turns = [("system", "user", "assistant", "user", "assistant"), (" be brief", "one ", "two", " three", "four\n")]
    messages = [{"role": role, "content": text} for role, text in zip(*turns, strict=True)]
    written = tokenizer.apply_chat_template(messages, chat_template=template.jinja(), tokenize=False)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    parts = template.layout([Turn(names[role], (text,)) for role, text in zip(*turns, strict=True)])
    texts = [
        part.value if part.kind == "text" else tokenizer.decode(part.value) for part in parts if part.kind != "end"
    ]
    assert written == "".join(texts)


def test_bounds_of_pictures_are_those_of_training_whatever_the_base_says(tmp_path):
    """Files of published Qwen2.5-VL have min_pixels and max_pixels, which would overrule `size`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    base, out = tmp_path / "base", tmp_path / "out"
    for folder in (base, out):
        folder.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    bounds = {"min_pixels": 3136, "max_pixels": 12845056}
    (base / PREPROCESSOR).write_text(json.dumps({"patch_size": 14, "merge_size": 2, "resample": 2, **bounds}))
    encode = EncodeConfig(family="qwen2_5_vl", image_size=28, tokens_per_tile=1, min_pixels=4096, max_pixels=50176)
    save_processor(out, str(base), None, encode, 0)
    processor = Qwen2VLImageProcessorPil.from_pretrained(out)
    assert processor.size["shortest_edge"] == 4096 and processor.size["longest_edge"] == 50176
    assert processor.resample == 2, "what else the base says is kept"
    (grid,) = processor(images=[Image.new("RGB", (800, 600))], return_tensors="pt")["image_grid_thw"].tolist()
    assert grid[1] * grid[2] * 14**2 <= 50176
