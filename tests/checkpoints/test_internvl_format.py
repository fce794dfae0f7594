"""Checkpoints in InternVL's own format: loaded and written again, and a forward pass by hand that computes the same."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from helpers.model_samples import SIZE, mixed_segments, packed_batch
from helpers.original_samples import (
    ARCHITECTURES,
    VISION_6B,
    VISION_300M,
    chat_config,
    chat_logits,
    chat_weights,
    tiny_chat_checkpoint,
    write_chat_checkpoint,
)
from transformers import AutoTokenizer, InternVLForConditionalGeneration

from internvl_pack.checkpoints.internvl_format import Groups
from internvl_pack.checkpoints.internvl_format_files import save_internvl_format
from internvl_pack.checkpoints.tokenizers import load_tokenizer
from internvl_pack.checkpoints.weight_files import LazyWeights
from internvl_pack.cli import main as cli
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model
from internvl_pack.model.images import normalize_tiles


def build(folder, tokenizer, **options):
    return build_model(folder, tokenizer=tokenizer, **({"device": "cpu", "dtype": torch.float32} | options))


def same_weights(folder, state):
    stored = LazyWeights(folder)
    assert set(stored) == set(state)
    for name, tensor in state.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name


# --- computes the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("vision", [VISION_300M, VISION_6B], ids=["300M", "6B"])
@pytest.mark.parametrize("llm", ARCHITECTURES)
def test_a_pack_of_a_loaded_checkpoint_has_the_logits_of_the_original_written_by_hand(llm, vision, tokenizer, tmp_path):
    config = chat_config(tokenizer, llm, vision, select_layer=-1 if vision is VISION_300M else -2)
    state = chat_weights(config)
    folder = write_chat_checkpoint(tmp_path, config, state, tokenizer)
    packed = build(folder, tokenizer).eval()
    segments = mixed_segments(tokenizer)
    with torch.no_grad():
        logits = packed(**packed_batch(segments), return_logits=True).logits[0]
        image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
        expected = [
            chat_logits(
                config,
                state,
                torch.from_numpy(s.input_ids).long(),
                normalize_tiles(torch.from_numpy(s.tiles), torch.float32),
                image,
            )
            for s in segments
        ]
    expected = torch.cat(expected)
    assert expected.std() > 0.5  # else any error would be small
    assert (logits - expected).abs().max() < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 2.0}])
def test_internlm2_rotary_scalings_are_those_of_the_native_model(scaling, tokenizer, tmp_path):
    changes = {"rope_scaling": scaling, "max_position_embeddings": 24, "rope_theta": 10000.0, "bias": True}
    config = chat_config(tokenizer, "internlm2", llm_config=changes)
    state = chat_weights(config)
    folder = write_chat_checkpoint(tmp_path, config, state, tokenizer)
    plain = InternVLForConditionalGeneration._from_config(build(folder, tokenizer).config)
    plain.load_state_dict(build(folder, tokenizer).model.state_dict())
    ids = torch.arange(40) % 200  # longer than max_position_embeddings, where dynamic scaling sets in
    with torch.no_grad():
        logits = plain.eval()(input_ids=ids[None], use_cache=False).logits[0]
        assert (logits - chat_logits(config, state, ids, [], -1)).abs().max() < 5e-5


def test_a_fused_projection_in_groups_splits_by_head_and_joins_again():
    rows = torch.arange(2 * (3 + 2) * 2)  # 2 key-value heads, 3 queries each, heads of 2 rows
    q, k, v = Groups(2, 3).split(rows)
    assert q.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert (k.tolist(), v.tolist()) == ([6, 7, 16, 17], [8, 9, 18, 19])
    assert torch.equal(Groups(2, 3).join((q, k, v)), rows)
    assert [p.tolist() for p in Groups(1, 1).split(torch.arange(6))] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("select_layer", "used"), [(-1, 3), (-3, 1), (1, 1), (3, 3)])
def test_vision_layers_after_the_selected_one_are_not_trained(select_layer, used, tokenizer, tmp_path):
    packed = build(tiny_chat_checkpoint(tmp_path, tokenizer, select_layer=select_layer), tokenizer).train()
    packed(**packed_batch(mixed_segments(tokenizer))).loss.backward()
    layers = packed.vision_modules[0].encoder.layer
    assert [all(p.requires_grad for p in layer.parameters()) for layer in layers] == [i < used for i in range(3)]
    assert all((p.grad is not None) == p.requires_grad for p in packed.parameters())


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [False, True], ids=["safetensors", "bin"])
def test_weights_in_several_files_are_read_by_their_index(bins, tokenizer, tmp_path):
    config = chat_config(tokenizer)
    state = chat_weights(config)
    one = build(write_chat_checkpoint(tmp_path / "one", config, state, tokenizer), tokenizer)
    many = write_chat_checkpoint(tmp_path / "many", config, state, tokenizer, num_files=3, bins=bins)
    several = build(many, tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), several.parameters(), strict=True))
    next(many.glob("*-00002-of-00003.*")).unlink()
    with pytest.raises(UserError, match=r"--model_name_or_path .*-00002-of-00003.* is not there"):
        build(many, tokenizer)


def test_what_is_loaded_no_longer_hangs_on_its_file(tokenizer, tmp_path):
    folder = tiny_chat_checkpoint(tmp_path, tokenizer)
    packed = build(folder, tokenizer)
    assert packed.generation_config.eos_token_id == [2]
    before = {name: p.clone() for name, p in packed.named_parameters()}
    with open(folder / "model.safetensors", "r+b") as file:  # in place, as a map of it would see
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert all(torch.equal(p, before[name]) for name, p in packed.named_parameters())


@pytest.mark.slow
def test_generation_settings_that_could_not_be_saved_are_left_out_with_a_warning(tokenizer, tmp_path, caplog):
    folder = tiny_chat_checkpoint(tmp_path / "source", tokenizer)
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.2}', encoding="utf-8")
    packed = build(folder, tokenizer)
    assert "generation_config.json is left out" in caplog.text
    packed.save_pretrained(tmp_path / "saved")


def test_a_pickle_that_is_more_than_tensors_is_refused(tokenizer, tmp_path):
    config = chat_config(tokenizer)
    folder = write_chat_checkpoint(tmp_path, config, {"mlp1.0.weight": Path("x")}, tokenizer, bins=True)
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read: .*[Ww]eights.only"):
        build(folder, tokenizer)


@pytest.mark.slow
def test_a_vision_tower_of_either_original_joins_a_language_model(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    from internvl_pack.testing.tiny import tiny_text_config

    config = chat_config(tokenizer, "qwen2", VISION_6B)
    state = chat_weights(config)
    whole = write_chat_checkpoint(tmp_path / "whole", config, state, tokenizer)
    tower = {n.removeprefix("vision_model."): t for n, t in state.items() if n.startswith("vision_model.")}
    alone = write_chat_checkpoint(tmp_path / "alone", config["vision_config"], tower, tokenizer)
    AutoModelForCausalLM.from_config(tiny_text_config("qwen2", vocab_size=len(tokenizer))).save_pretrained(
        tmp_path / "llm"
    )
    expected = build(whole, tokenizer).vision_modules[0].state_dict()
    for folder in (whole, alone):
        packed = build(None, tokenizer, vision_path=folder, llm_path=tmp_path / "llm")
        found = packed.vision_modules[0].state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    save_internvl_format(tmp_path / "joined", packed.config, packed.model.state_dict())
    again = build(tmp_path / "joined", tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(packed.parameters(), again.parameters(), strict=True))
    write_chat_checkpoint(alone, config["vision_config"], {k: t for k, t in tower.items() if "ls1" not in k}, tokenizer)
    with pytest.raises(UserError, match=r"--vision_path .* are missing: encoder.layers.0.ls1"):
        build(None, tokenizer, vision_path=alone, llm_path=tmp_path / "llm")


def test_weights_that_are_missing_unknown_or_of_another_shape_are_named(tokenizer, tmp_path):
    config = chat_config(tokenizer)
    state = chat_weights(config)
    qkv = "vision_model.encoder.layers.1.attn.qkv.weight"
    cases = {
        rf"that its config.json asks for are missing: {qkv}$": {k: v for k, v in state.items() if k != qkv},
        r"does not account for: language_model.model.rubbish$": state | {"language_model.model.rubbish": torch.ones(1)},
        rf"{qkv} is \(95, 32\), its config.json makes it \(96, 32\)$": state | {qkv: state[qkv][:-1].clone()},
    }
    for number, (message, weights) in enumerate(cases.items()):
        folder = write_chat_checkpoint(tmp_path / str(number), config, weights, tokenizer)
        with pytest.raises(UserError, match=message) as caught:
            build(folder, tokenizer)
        assert str(caught.value).startswith(f"--model_name_or_path {folder}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ps_version": "v1"}, "ps_version is 'v1'"),
        ({"pad2square": True}, "pad2square is true"),
        ({"force_image_size": 448}, "force_image_size is 448 and vision_config.image_size 56"),
        ({"rope_pos_id_version": "v2pe_fix"}, "rope_pos_id_version is 'v2pe_fix'"),
        ({"use_llm_lora": 16}, "use_llm_lora is 16: merge LoRA with"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights cannot be trained"),
        (
            {"llm_config": {"architectures": ["Phi3ForCausalLM"]}},
            "llm_config.architectures is 'Phi3ForCausalLM': Phi-3 .InternVL2-4B, .* by the longest sample of a row",
        ),
        (
            {"llm_config": {"architectures": ["InternLM3ForCausalLM"]}},
            "llm_config.architectures is 'InternLM3ForCausalLM': InternLM3 .InternVL3-9B. has its tokenizer as code",
        ),
        ({"llm_config": {"architectures": ["OPTForCausalLM"]}}, "llm_config.architectures is 'OPTForCausalLM': known"),
        ({"vision_config": {"use_moe": True}}, "vision_config.use_moe is true: a vision tower of experts"),
        ({"llm_config": {"num_attention_heads": "four"}}, "llm_config: .*num_attention_heads"),
        ({"vision_config": {"model_type": "siglip"}}, "vision_config.model_type is 'siglip'"),
        ({"vision_config": {"norm_type": "batch_norm"}}, "vision_config.norm_type is 'batch_norm'"),
        (
            {"vision_config": {"qk_normalization": True, "layer_norm_eps": 1e-5}},
            "layer_norm_eps is 1e-05 with qk_normalization",
        ),
    ],
)
def test_what_the_native_model_does_not_compute_is_refused_by_its_key(changes, message, tokenizer, tmp_path):
    config = chat_config(tokenizer, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        build(tmp_path, tokenizer)
    assert str(caught.value).startswith(f"--model_name_or_path {tmp_path}: config.json: ") and "\n" not in str(
        caught.value
    )


def test_a_rotary_scaling_that_internlm2_has_not_is_refused(tokenizer, tmp_path):
    config = chat_config(tokenizer, "internlm2", llm_config={"rope_scaling": {"type": "yarn", "factor": 2.0}})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"llm_config.rope_scaling is of type 'yarn', InternLM2's are"):
        build(tmp_path, tokenizer)


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("llm", ARCHITECTURES)
def test_loaded_and_saved_again_it_is_the_same_bit_for_bit(llm, dtype, tokenizer, tmp_path):
    config = chat_config(tokenizer, llm, VISION_6B, torch_dtype=str(dtype).removeprefix("torch."))
    state = {name: tensor.to(dtype) for name, tensor in chat_weights(config).items()}
    source = write_chat_checkpoint(tmp_path / "source", config, state, tokenizer)
    model = build(source, tokenizer, dtype=dtype).model
    target = tmp_path / "target"
    save_internvl_format(target, model.config, model.state_dict(), like=source, max_shard_size="40KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    same_weights(target, state)
    assert json.loads((target / "config.json").read_text()) == config
    left_out = {"model.safetensors"}
    for path in source.iterdir():
        if path.name not in left_out:
            assert path.name == "config.json" or (target / path.name).read_bytes() == path.read_bytes()
    again = build(target, tokenizer, dtype=dtype).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("with_head", [False, True], ids=["without its head", "with its head"])
def test_tied_embeddings_come_back_as_they_were_stored(with_head, tokenizer, tmp_path):
    config = chat_config(tokenizer, "qwen3", llm_config={"tie_word_embeddings": True})
    state = chat_weights(config)
    if with_head:
        state["language_model.lm_head.weight"] = state["language_model.model.embed_tokens.weight"].clone()
    source = write_chat_checkpoint(tmp_path / "source", config, state, tokenizer)
    model = build(source, tokenizer).model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    save_internvl_format(tmp_path / "target", model.config, model.state_dict(), like=source)
    same_weights(tmp_path / "target", state)
    if with_head:
        state["language_model.lm_head.weight"] += 1
        other = write_chat_checkpoint(tmp_path / "other", config, state, tokenizer)
        with pytest.raises(UserError, match=r"tie_word_embeddings is true, but .*lm_head.weight and .* differ"):
            build(other, tokenizer)


def test_a_second_save_with_other_shards_leaves_none_of_the_first(tokenizer, tmp_path):
    config = chat_config(tokenizer)
    state = chat_weights(config)
    model = build(write_chat_checkpoint(tmp_path / "source", config, state, tokenizer), tokenizer).model
    for size in ("40KB", "5GB", "80KB"):
        save_internvl_format(tmp_path / "target", model.config, model.state_dict(), max_shard_size=size)
        same_weights(tmp_path / "target", state)
        files = list((tmp_path / "target").glob("*.safetensors"))
        assert (len(files) == 1) == (size == "5GB")
    assert "auto_map" not in json.loads((tmp_path / "target" / "config.json").read_text())  # no code is there


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("llm", ARCHITECTURES)
def test_convert_there_and_back_is_the_same_checkpoint(llm, tokenizer, tmp_path, capsys):
    config = chat_config(tokenizer, llm, torch_dtype="bfloat16")
    state = {name: tensor.bfloat16() for name, tensor in chat_weights(config).items()}
    source = write_chat_checkpoint(tmp_path / "source", config, state, tokenizer, num_files=2)
    native, back = tmp_path / "native", tmp_path / "back"
    assert cli(["convert", str(source), str(native), "--to", "hf", "--max_shard_size", "60KB"]) == 0
    model = InternVLForConditionalGeneration.from_pretrained(native, dtype=torch.bfloat16)
    ours = build(source, tokenizer, dtype=torch.bfloat16).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))
    saved = AutoTokenizer.from_pretrained(native)
    assert saved.context_image_token_id == model.config.image_token_id
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert (native / "generation_config.json").is_file() and not list(native.glob("*.py"))
    assert cli(["convert", str(native), str(back), "--to", "internvl", "--like", str(source)]) == 0
    same_weights(back, state)
    assert json.loads((back / "config.json").read_text()) == config
    assert (back / "modeling_internvl_chat.py").read_text() == (source / "modeling_internvl_chat.py").read_text()
    assert "InternVLChatModel" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("llm", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_a_native_checkpoint_that_never_was_an_original_becomes_one(llm, tokenizer, tmp_path):
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    native = save_tiny_checkpoint(tmp_path / "native", tokenizer, llm, rope_parameters={"rope_theta": 5e5})
    target = tmp_path / "target"
    assert cli(["convert", str(native), str(target), "--to", "internvl"]) == 0
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["InternVLChatModel"] and config["llm_config"]["rope_theta"] == 5e5
    ids = torch.arange(30)
    pixels = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    ids[2:6] = image
    with torch.no_grad():
        model = InternVLForConditionalGeneration.from_pretrained(native)
        expected = model(input_ids=ids[None], pixel_values=pixels, use_cache=False).logits[0]
        state = dict(LazyWeights(target))
        assert (chat_logits(config, state, ids, pixels, image) - expected).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
    settings = json.loads((target / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # a name that transformers 4 knows
    loaded = build(target, tokenizer).config
    for part in ("text_config", "vision_config"):
        ours, theirs = (getattr(c, part).to_dict() for c in (loaded, model.config))
        same = {key for key in theirs if ours.get(key) == theirs[key]}
        assert theirs.keys() - same <= {"dtype", "architectures"}


def test_a_native_checkpoint_gets_the_code_of_the_one_it_shall_be_like(tokenizer, tmp_path):
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    native = save_tiny_checkpoint(tmp_path / "native", tokenizer)
    like = tiny_chat_checkpoint(tmp_path / "like", tokenizer)
    assert cli(["convert", str(native), str(tmp_path / "new"), "--to", "internvl", "--like", str(like)]) == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["auto_map"] == chat_config(tokenizer)["auto_map"]
    assert (tmp_path / "new" / "modeling_internvl_chat.py").is_file()


def test_mistakes_of_convert_are_one_line(tokenizer, tmp_path, capsys):
    source = tiny_chat_checkpoint(tmp_path / "source", tokenizer)
    cases = [
        ([source, source, "--to", "hf"], "DST .*source: exists and is not an empty folder"),
        (
            [source, tmp_path / "new", "--to", "internvl"],
            "SRC .*: no InternVLForCond.*internvl_chat",
        ),
        ([tmp_path / "nowhere", tmp_path / "new", "--to", "hf"], "nowhere: no such folder, and not to be had"),
        ([source, tmp_path / "new", "--to", "hf", "--like", source], "--like goes with --to internvl"),
    ]
    import re

    for words, message in cases:
        assert cli(["convert", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error) and error.count("\n") == 1, error
        assert not (tmp_path / "new").exists()


# --- tokenizers -----------------------------------------------------------------------------------


def test_the_tokenizer_of_an_original_names_its_image_tokens_without_new_ones(tokenizer, tmp_path):
    folder = tiny_chat_checkpoint(tmp_path, tokenizer)
    loaded = load_tokenizer(folder)
    assert loaded.context_image_token_id == tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    assert len(loaded) == len(tokenizer)
    text = "a question <img>你好</img>\n"
    assert loaded(text).input_ids == tokenizer(text).input_ids


def test_qwen2_files_as_published_give_the_same_tokens(tokenizer, tmp_path):
    folder = tiny_chat_checkpoint(tmp_path, tokenizer)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for path in folder.glob("*token*"):
        path.unlink()
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "additional_special_tokens": list(added),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(i): {"content": t, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for t, i in added.items()
        },
    }
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.context_image_token_id == tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = "<|im_start|>user\na question <img><IMG_CONTEXT></img> 你好<|im_end|>"
    assert loaded(text).input_ids == tokenizer(text).input_ids


@pytest.fixture(scope="module")
def sentences(demo_dir):
    from internvl_pack.testing.tiny import conversation_texts

    lines = [line for text in conversation_texts(demo_dir / "demo.jsonl") for line in text.splitlines()]
    return [line for line in lines if line.strip()] + ["你好世界，这是一个测试。", "数据 打包"] * 20


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_an_internlm2_tokenizer_is_rebuilt_from_its_sentencepiece_model(dummy_prefix, sentences, tmp_path, caplog):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        user_defined_symbols=["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"],
        character_coverage=0.999,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    size = original.get_piece_size()
    added = dict(enumerate(("<unk>", "<s>", "</s>")))
    added |= {original.piece_to_id(f"[UNUSED_TOKEN_{i}]"): t for i, t in ((1, "<|im_start|>"), (2, "<|im_end|>"))}
    added |= {size + i: token for i, token in enumerate(("<img>", "</img>", "<IMG_CONTEXT>"))}
    settings = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": token, "special": True} for i, token in added.items()},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}', encoding="utf-8")
    (tmp_path / "tokenization_internlm2.py").write_text("raise AssertionError\n", encoding="utf-8")
    rebuilt = load_tokenizer(tmp_path)
    assert rebuilt.context_image_token_id == size + 2 and len(rebuilt) == size + 3
    assert ("puts a space before every text" in caplog.text) == dummy_prefix
    rng = random.Random(0)
    typed = "abc def  \n\t你好世界é€😀123.,;"
    for number in range(400):
        text = rng.choice(sentences)[: rng.randint(1, 120)]
        if number % 2:
            text = "".join(rng.choices(typed, k=rng.randint(1, 30)))
        ids = original.encode(text)
        assert rebuilt(text, add_special_tokens=False).input_ids == ids, text
        assert rebuilt.decode(ids) == original.decode(ids)
    ids = rebuilt("<|im_start|>user\nhi<|im_end|>").input_ids
    assert ids[:2] == [1, original.piece_to_id("[UNUSED_TOKEN_1]")]
    rebuilt.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("<img>hi").input_ids == rebuilt("<img>hi").input_ids


@pytest.fixture
def internlm2_folder(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "InternLM2Tokenizer"}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("package", ["sentencepiece.sentencepiece_model_pb2", "google.protobuf.message"])
def test_without_the_library_an_internlm2_tokenizer_says_what_to_install(package, internlm2_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"needs sentencepiece: pip install 'internvl-pack\[internlm2\]'"):
        load_tokenizer(internlm2_folder)


def test_a_sentencepiece_model_that_is_damaged_or_not_bpe_is_named(internlm2_folder):
    for content, message in (
        (b"\x0a\xff", "tokenizer.model: not a SentencePiece model"),
        (b"\x0a\x05\x0a\x03abc\x12\x02\x18\x01", "only byte-pair models with byte fallback"),
    ):
        (internlm2_folder / "tokenizer.model").write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(internlm2_folder)
