"""Options of `finetune.py`: their names, their defaults, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser
from transformers.integrations.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig

from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.checkpoints.internvl_format_files import config_of
from internvl_pack.errors import UserError
from train import finetune
from train.arguments import DataTrainingArguments, ModelArguments, PackTrainingArguments
from train.environment import CONFIGS, SECONDS_FOR_THE_FIRST_RANK, find_deepspeed_config
from train.options import DROPPED, RENAMED, option_names, parse, translate

ROOT = Path(__file__).resolve().parents[2]
META = str(ROOT / "shell" / "data" / "demo" / "meta.json")
MODEL = ["--model_name_or_path", "/nowhere/model"]
DATA = ["--meta_path", META]

# --- names ----------------------------------------------------------------------------------------

INTERNVL_NAMES = {
    "model": "model_name_or_path vision_path llm_path freeze_llm freeze_backbone freeze_mlp unfreeze_vit_layers "
    "use_backbone_lora use_llm_lora grad_checkpoint drop_path_rate",
    "data": "max_seq_length force_image_size down_sample_ratio conv_style meta_path dynamic_image_size use_thumbnail "
    "min_dynamic_patch max_dynamic_patch",
    "packing": "use_packed_ds num_images_expected max_packed_tokens max_buffer_size loss_reduction "
    "loss_reduction_all_gather strict_mode replacement use_data_resampling log_freq",
}
DEFAULTS = {
    "force_image_size": None,
    "down_sample_ratio": None,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "use_packed_ds": False,
    "num_images_expected": None,  # 40, or of native resolution max_packed_tokens
    "max_packed_tokens": 8192,
    "max_buffer_size": 64,
}


@pytest.mark.parametrize("names", INTERNVL_NAMES.values(), ids=INTERNVL_NAMES)
def test_every_option_of_internvl_has_its_name_here(names):
    assert set(names.split()) <= set(option_names())


def test_no_option_is_both_offered_and_gone():
    assert not set(option_names()) & (RENAMED.keys() | DROPPED.keys())
    assert set(RENAMED.values()) <= set(option_names())


@pytest.mark.parametrize("given", [["--data", META], [f"--data={META}"], ["--meta_path", META]])
def test_data_is_named_by_either_option(given):
    assert "".join(translate(given)[0]).replace("=", "") == f"--meta_path{META}"


def test_a_folder_or_a_pattern_of_data_is_taken(tmp_path):
    for path in (str(tmp_path), f"{tmp_path}/train-*.parquet", f"{tmp_path}/s-{{0..3}}.tar"):
        assert DataTrainingArguments(meta_path=path).meta_path == path


def test_data_that_a_relative_path_misses_is_told_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"--meta_path dta/meta.json: no such file \(working folder: {tmp_path}\)"):
        DataTrainingArguments(meta_path="dta/meta.json")


def test_the_dataclasses_go_into_transformers_own_parser(own_process, tmp_path):
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, PackTrainingArguments))
    argv = [*MODEL, *DATA, "--output_dir", str(tmp_path), "--use_packed_ds", "True", "--grad_checkpoint"]
    model, data, args = parser.parse_args_into_dataclasses(argv)
    assert (model.grad_checkpoint, data.use_packed_ds, data.max_packed_tokens) == (True, True, 8192)
    assert args.logging_steps == 1 and "Token budget of a row" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_those_users_know(name, value):
    assert getattr(DataTrainingArguments(meta_path=META), name) == value


def test_data_options_reach_packing_and_encoding():
    data = DataTrainingArguments(
        meta_path=META,
        use_packed_ds=True,
        max_packed_tokens=4096,
        num_images_expected=24,
        max_seq_length=2048,
        oversize="drop",
        use_data_resampling=True,
        force_image_size=224,
        max_dynamic_patch=6,
    )
    packing, encode = data.packing_config(seed=7), encode_config(vars(data), {})
    assert (packing.max_packed_tokens, packing.num_images_expected, packing.max_seq_length) == (4096, 24, 2048)
    assert (packing.oversize, packing.use_data_resampling) == ("drop", True)
    assert (packing.seed, packing.packing) == (7, True)
    assert (encode.image_size, encode.tokens_per_tile, encode.max_dynamic_patch) == (224, 64, 6)
    assert not encode.dynamic_image_size


def test_without_packing_a_sample_is_bounded_by_max_seq_length():
    data = DataTrainingArguments(meta_path=META, max_packed_tokens=512, max_seq_length=1024)
    assert data.packing_config(seed=0).max_packed_tokens == 1024
    assert not data.packing_config(seed=0).packing


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [
    ("no model", DATA, "--model_name_or_path is missing"),
    ("half a model", ["--llm_path", "x", *DATA], "--model_name_or_path is missing"),
    ("two models", [*MODEL, "--llm_path", "x", *DATA], "--model_name_or_path excludes --vision_path"),
    ("no meta file", MODEL, "--meta_path is missing"),
    (
        "missing meta file",
        [*MODEL, "--meta_path", "/nowhere/meta.json"],
        "--meta_path /nowhere/meta.json: no such file",
    ),
    ("unknown option", [*MODEL, *DATA, "--max_packed_token", "1"], "did you mean --max_packed_tokens?"),
    ("bad value", [*MODEL, *DATA, "--max_packed_tokens", "many"], "argument --max_packed_tokens"),
    (
        "bad choice",
        [*MODEL, *DATA, "--loss_reduction", "mean"],
        "--loss_reduction 'mean' is unknown: use one of token",
    ),
    (
        "bad policy",
        [*MODEL, *DATA, "--oversize", "cut"],
        "--oversize 'cut' is unknown: use one of split",
    ),
    ("droppath", [*MODEL, *DATA, "--drop_path_rate", "1.5"], "--drop_path_rate 1.5"),
    ("lora", [*MODEL, *DATA, "--use_llm_lora", "-1"], "--use_llm_lora is -1: give at least 0"),
    ("no option", [*MODEL, *DATA, "--bf16", "True", "more"], "'more' is neither an option nor the value of one"),
    ("tiles", [*MODEL, *DATA, "--min_dynamic_patch", "0"], "--min_dynamic_patch is 0: give at least 1 tile"),
    ("normalisation", [*MODEL, *DATA, "--normalize_type", "siglip"], "--normalize_type siglip"),
    ("flash", [*MODEL, *DATA, "--attn_kernel", "flash_attn"], "--attn_kernel flash_attn needs"),
    ("kernel", [*MODEL, *DATA, "--attn_kernel", "magic"], "--attn_kernel 'magic' is unknown"),
    ("columns", [*MODEL, *DATA, "--remove_unused_columns", "True"], "--remove_unused_columns True"),
    ("averages", [*MODEL, *DATA, "--average_tokens_across_devices", "True"], "--average_tokens_across_devices True"),
    ("filter", [*MODEL, *DATA, "--logging_nan_inf_filter", "True"], "--logging_nan_inf_filter True"),
    ("smoothing", [*MODEL, *DATA, "--label_smoothing_factor", "0.1"], "--label_smoothing_factor 0.1"),
    ("compilation", [*MODEL, *DATA, "--torch_compile_backend", "inductor"], "--torch_compile_backend inductor does"),
    ("evaluation", [*MODEL, *DATA, "--bf16_full_eval", "True"], "--bf16_full_eval True"),
    ("drop", [*MODEL, *DATA, "--dataloader_drop_last", "True"], "--dataloader_drop_last True"),
    ("skip", [*MODEL, *DATA, "--ignore_data_skip", "True"], "--ignore_data_skip True"),
    ("signals", [*MODEL, *DATA, "--enable_jit_checkpoint", "True"], "--enable_jit_checkpoint True"),
    ("dispatch", [*MODEL, *DATA, "--accelerator_config", '{"dispatch_batches": true}'], "dispatch_batches=True"),
    (
        "accelerate",
        [*MODEL, *DATA, "--accelerator_config", "missing.json"],
        "--accelerator_config missing.json: no such file",
    ),
    ("epochs", [*MODEL, *DATA, "--num_train_epochs", "0"], "--num_train_epochs 0"),
    ("micro-batch", [*MODEL, *DATA, "--per_device_train_batch_size", "0"], "--per_device_train_batch_size is 0"),
    ("config", [*MODEL, *DATA, "--deepspeed", "zero_stage4"], "zero_stage1, zero_stage2, zero_stage3"),
    ("resume", [*MODEL, *DATA, "--resume_from_checkpoint", "/nowhere"], "--resume_from_checkpoint /nowhere"),
    ("model path", [*MODEL, *DATA], "--model_name_or_path /nowhere/model"),
]


@pytest.fixture
def run(own_process, capsys, tmp_path):
    """main() in this process -> exit code, lines on stderr."""

    def call(argv):
        capsys.readouterr()
        code = finetune.main([*argv, "--output_dir", str(tmp_path)])
        return code, capsys.readouterr().err.splitlines()

    return call


@pytest.mark.parametrize(("argv", "expected"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_option(argv, expected, run):
    code, lines = run(argv)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("finetune: error: ") and expected in lines[0]


def test_where_to_write_has_to_be_said(own_process, capsys):
    assert finetune.main([*MODEL, *DATA]) == 2
    assert "--output_dir is missing: give the folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tinyy", "./tinyy", "/nowhere/model"])
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(name, run):
    code, lines = run(["--model_name_or_path", name, *DATA, "--use_cpu", "True"])
    assert code == 2
    assert f"--model_name_or_path {name}: no such folder, and no hub name, which is owner/name" in lines[-1]


def test_a_folder_that_is_missing_beside_others_is_not_looked_up_either(tmp_path, monkeypatch):
    (tmp_path / "work_dirs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"work_dirs/nix: no such folder in {tmp_path / 'work_dirs'}"):
        config_of("work_dirs/nix")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer) -> str:
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer))


WITH_A_MODEL = [
    (["--conv_style", "vicuna"], "conv_style is 'vicuna'"),
    (["--force_image_size", "60"], "force_image_size 60 with patches of 14 pixels"),
    (["--use_packed_ds", "True", "--max_packed_tokens", "5"], "max_packed_tokens 5 is smaller than one tile"),
    (["--use_packed_ds", "True", "--max_seq_length", "5"], "max_seq_length 5 is smaller than one tile"),
    (["--num_images_expected", "0"], "num_images_expected is 0"),
    (
        ["--freeze_backbone", "True", "--unfreeze_vit_layers", "2"],
        "--unfreeze_vit_layers 2: the vision tower has layers",
    ),
    (["--min_dynamic_patch", "7", "--max_dynamic_patch", "6"], "min_dynamic_patch=7 exceeds max_dynamic_patch=6"),
    (["--eval_strategy", "steps"], "needs --eval_meta_path"),
    (["--freeze_llm", "True", "--freeze_backbone", "True", "--freeze_mlp", "True"], "nothing is left to train"),
]


@pytest.mark.parametrize(("argv", "expected"), WITH_A_MODEL)
def test_a_mistake_that_needs_the_model_is_one_line_too(argv, expected, tiny, run):
    code, lines = run(["--model_name_or_path", tiny, *DATA, "--force_image_size", "56", *argv])
    assert code == 2
    assert [line for line in lines if line.startswith("finetune: error: ") and expected in line] == lines[-1:]
    assert not any("Traceback" in line for line in lines)


def test_from_a_shell_a_mistake_exits_with_2_and_no_traceback():
    command = [sys.executable, str(ROOT / "train" / "finetune.py"), *MODEL, "--meta_path", "/nowhere/meta.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["finetune: error: --meta_path /nowhere/meta.json: no such file"]


def test_a_torchvision_of_another_torch_is_one_line(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    command = [sys.executable, str(ROOT / "train" / "finetune.py"), *MODEL]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("finetune: error: transformers cannot be imported: ")
    assert "torchvision::nms does not exist" in line and "pip uninstall torchvision" in line


def test_at_start_other_ranks_let_the_first_speak(monkeypatch, capsys):
    """torchrun ends all ranks when one fails: the first's line must be out before that."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    waited = []
    monkeypatch.setattr("train.environment.time.sleep", lambda s: waited.append((s, capsys.readouterr().err)))
    assert finetune.main(MODEL) == 2
    assert waited == [(SECONDS_FOR_THE_FIRST_RANK, "")]
    assert capsys.readouterr().err.startswith("finetune: error: rank 1: --meta_path is missing")


def test_under_torchrun_the_mistake_is_told_once():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "train" / "finetune.py"), *MODEL, "--meta_path", "/nowhere/meta.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if "finetune: error" in line]
    assert ours == ["finetune: error: --meta_path /nowhere/meta.json: no such file"]


# --- scripts of before ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["--use_custom_flash_attn", "True", "--bf16", "True"], ["--bf16", "True"]),
        (["--bf16", "True", "--group_by_length"], ["--bf16", "True"]),
        (["--use_liger=True", "--fp16"], ["--fp16"]),
        (["--warmup_ratio", "0.03"], ["--warmup_steps", "0.03"]),
        (["--warmup-ratio=0.03"], ["--warmup_steps=0.03"]),
        (["--evaluation_strategy", "no"], ["--eval_strategy", "no"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--pad_to_max_length", "True"], ["--strict_mode", "True"]),
        (["--gradient_checkpointing", "False"], ["--grad_checkpoint", "False"]),
        (["--gradient_checkpointing_kwargs", '{"use_reentrant": false}'], []),
        (["--normalize_type", "imagenet", "--num_lanes", "4", "--balance_reservoir=2"], []),
    ],
)
def test_flags_of_older_scripts_are_renamed_or_left_out(before, now):
    assert translate(before)[0] == now


def test_warmup_ratio_becomes_a_share_of_the_steps(own_process):
    *_, args = parse([*MODEL, *DATA, "--warmup_ratio", "0.1", "--output_dir", "x"])
    assert args.get_warmup_steps(200) == 20


FILES = {
    "run.json": json.dumps({"model_name_or_path": "m", "meta_path": META, "log_freq": 4, "output_dir": "x"}),
    "run.yaml": f"""
model_name_or_path: m
meta_path: {META}
log_freq: 4
output_dir: x
learning_rate: 1e-5
seed: null
""",
}


@pytest.mark.parametrize("name", FILES)
def test_options_come_from_a_file_too(name, tmp_path, own_process):
    path = tmp_path / name
    path.write_text(FILES[name])
    model, data, args = parse([str(path)])
    assert (model.model_name_or_path, data.log_freq, args.remove_unused_columns) == ("m", 4, False)
    assert args.learning_rate == (1e-5 if name.endswith("yaml") else 5e-5)
    model, data, _ = parse([str(path), "--log_freq", "5"])  # the command line takes precedence
    assert (model.model_name_or_path, data.log_freq) == ("m", 5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"meta_path": "m", "lanes": 4}', "unknown option '--lanes'"),
        ("run.json", "[1]", "give one object of options"),
        ("run.json", "{", "not JSON"),
        ("run.yaml", "a: b: c", "not YAML"),
        ("run.yaml", "- a", "give one object of options"),
        ("run.toml", "", "is no option: give --OPTION VALUE, or a file of options, .json or .yaml"),
        ("gone.json", None, "gone.json: the file of options cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_no_options_is_one_line(name, text, message, tmp_path, own_process):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        parse([str(tmp_path / name)])


# --- DeepSpeed configs ----------------------------------------------------------------------------

STAGES = {"zero_stage1": 1, "zero_stage2": 2, "zero_stage3": 3, "zero_stage3_offload": 3}


def test_every_shipped_config_is_listed_here():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(STAGES)


@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_configs_are_accepted_and_leave_the_trainer_its_part(name, stage, own_process):
    path = find_deepspeed_config(name)
    config = HfDeepSpeedConfig(json.loads(path.read_text(encoding="utf-8")))
    assert config.get_value("zero_optimization.stage") == stage
    assert config.is_zero3() == (stage == 3)
    assert config.is_offload() == name.endswith("offload")
    filled = HfTrainerDeepSpeedConfig(str(path))
    *_, args = parse([*MODEL, *DATA, "--max_grad_norm", "0.7", "--bf16", "True", "--output_dir", "x"])
    filled.trainer_config_process(args)
    assert filled.get_value("gradient_clipping") == 0.7
    assert filled.get_value("bf16.enabled") is True
    assert filled.get_value("train_micro_batch_size_per_gpu") == 1
    if stage == 3:
        assert filled.get_value("zero_optimization.stage3_gather_16bit_weights_on_model_save") is True


@pytest.mark.parametrize("name", ["zero_stage1", "zero_stage1.json", "zero_stage1_config.json"])
def test_shipped_configs_are_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_deepspeed_config(name) == CONFIGS / "zero_stage1.json"
    (tmp_path / name).write_text("{}")
    assert find_deepspeed_config(name) == Path(name), "a file of the user's comes first"


@pytest.mark.parametrize(
    "name, shipped",
    [
        ("zero_stage2_config.json", "zero_stage2"),
        ("zero_stage3_config_34b.json", "zero_stage3"),
        ("zero_stage3_config_100b.json", "zero_stage3"),
        ("zero_stage3_config_100b_1e8.json", "zero_stage3"),
        ("zero_stage3_config_100b_1e7_offload.json", "zero_stage3_offload"),
    ],
)
def test_every_name_of_internvls_configs_is_one_shipped_here(name, shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_deepspeed_config(name) == CONFIGS / f"{shipped}.json"


def test_a_config_in_a_folder_that_is_not_there_is_a_mistake():
    with pytest.raises(UserError, match="no such file"):
        find_deepspeed_config("configs/zero_stage1.json")
