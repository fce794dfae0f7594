"""Launch scripts as InternVL publishes them start here with only the path of the program changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.factory import write_jsonl
from helpers.pairs import write_pairs
from helpers.ranks import run

from internvl_pack.errors import UserError
from train import finetune
from train.arguments import find_deepspeed_config
from train.environment import prepare_environment
from train.options import DROPPED, GONE, REFUSED, RENAMED, option_names, translate

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("internvl/train/internvl_chat_finetune.py", "internvl/train/internvl_chat_pretrain.py")
OF_PREFERENCES = ("internvl/train/internvl_chat_dpo.py", "internvl/train/internvl_chat_mpo.py")

# internvl2.5/2nd_finetune: full
FULL = r"""
set -x

GPUS=${GPUS:-8}
BATCH_SIZE=${BATCH_SIZE:-128}
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-4}
GRADIENT_ACC=$((BATCH_SIZE / PER_DEVICE_BATCH_SIZE / GPUS))

export PYTHONPATH="${PYTHONPATH}:$(pwd)"
export MASTER_PORT=34229
export TF_CPP_MIN_LOG_LEVEL=3
export LAUNCHER=pytorch

OUTPUT_DIR='work_dirs/internvl_chat_v2_5/internvl2_5_8b_dynamic_res_2nd_finetune_full'

if [ ! -d "$OUTPUT_DIR" ]; then
  mkdir -p "$OUTPUT_DIR"
fi

torchrun \
  --nnodes=1 \
  --node_rank=0 \
  --master_addr=127.0.0.1 \
  --nproc_per_node=${GPUS} \
  --master_port=${MASTER_PORT} \
  internvl/train/internvl_chat_finetune.py \
  --model_name_or_path "OpenGVLab/InternVL2_5-8B" \
  --conv_style "internvl2_5" \
  --use_fast_tokenizer False \
  --output_dir ${OUTPUT_DIR} \
  --meta_path "./shell/data/internvl_1_2_finetune_custom.json" \
  --overwrite_output_dir True \
  --force_image_size 448 \
  --max_dynamic_patch 6 \
  --down_sample_ratio 0.5 \
  --drop_path_rate 0.1 \
  --freeze_llm False \
  --freeze_mlp False \
  --freeze_backbone True \
  --vision_select_layer -1 \
  --dataloader_num_workers 4 \
  --bf16 True \
  --num_train_epochs 1 \
  --per_device_train_batch_size ${PER_DEVICE_BATCH_SIZE} \
  --gradient_accumulation_steps ${GRADIENT_ACC} \
  --evaluation_strategy "no" \
  --save_strategy "steps" \
  --save_steps 200 \
  --save_total_limit 1 \
  --learning_rate 4e-5 \
  --weight_decay 0.05 \
  --warmup_ratio 0.03 \
  --lr_scheduler_type "cosine" \
  --logging_steps 1 \
  --max_seq_length 8192 \
  --do_train True \
  --grad_checkpoint True \
  --group_by_length True \
  --dynamic_image_size True \
  --use_thumbnail True \
  --ps_version 'v2' \
  --deepspeed "zero_stage1_config.json" \
  --report_to "tensorboard" \
  2>&1 | tee -a "${OUTPUT_DIR}/training_log.txt"
"""
# internvl2.5/2nd_finetune: LoRA
LORA = (
    FULL.replace("2nd_finetune_full", "2nd_finetune_lora")
    .replace("--drop_path_rate 0.1", "--drop_path_rate 0.0")
    .replace("--freeze_llm False", "--freeze_llm True")
    .replace("--freeze_mlp False", "--freeze_mlp True")
    .replace("--freeze_backbone True", "--freeze_backbone True \\\n  --use_llm_lora 16")
    .replace("zero_stage1_config.json", "zero_stage3_config_34b.json")
)
# internvl2.5/stage1.5: packed, under Slurm
PACKED = r"""
set -x

PARTITION=${PARTITION:-"Intern5"}
GPUS=${GPUS:-256}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
QUOTA_TYPE=${QUOTA_TYPE:-"reserved"}
NODES=$((GPUS / GPUS_PER_NODE))
CPUS_PER_TASK=${CPUS_PER_TASK:-10}
SRUN_ARGS=${SRUN_ARGS:-""}
BATCH_SIZE=${BATCH_SIZE:-512}
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-1}
GRADIENT_ACC=$((BATCH_SIZE / PER_DEVICE_BATCH_SIZE / GPUS))

export PYTHONPATH="${PYTHONPATH}:$(pwd)"
export MASTER_PORT=34229
export TF_CPP_MIN_LOG_LEVEL=3

OUTPUT_DIR='work_dirs/internvl_chat_v2_5/internvl2_5_8b_dynamic_res_stage1_5'

if [ ! -d "$OUTPUT_DIR" ]; then
  mkdir -p "$OUTPUT_DIR"
fi

srun -p ${PARTITION} \
  --gres=gpu:${GPUS_PER_NODE} \
  --nodes=${NODES} \
  --ntasks=${GPUS} \
  --ntasks-per-node=${GPUS_PER_NODE} \
  --cpus-per-task=${CPUS_PER_TASK} \
  --kill-on-bad-exit=1 \
  --quotatype=${QUOTA_TYPE} \
  ${SRUN_ARGS} \
  python -u internvl/train/internvl_chat_pretrain.py \
  --model_name_or_path "OpenGVLab/InternVL2_5-8B" \
  --conv_style "internvl2_5" \
  --output_dir ${OUTPUT_DIR} \
  --meta_path "./shell/data/internvl_1_2_finetune_custom.json" \
  --overwrite_output_dir True \
  --force_image_size 448 \
  --min_dynamic_patch 1 \
  --max_dynamic_patch 12 \
  --down_sample_ratio 0.5 \
  --drop_path_rate 0.1 \
  --min_num_frame 8 \
  --max_num_frame 32 \
  --freeze_llm True \
  --freeze_mlp False \
  --freeze_backbone False \
  --unfreeze_vit_layers 0 \
  --use_backbone_lora 0 \
  --use_llm_lora 0 \
  --vision_select_layer -1 \
  --use_data_resampling False \
  --dataloader_num_workers 8 \
  --bf16 True \
  --max_steps 2 \
  --per_device_train_batch_size ${PER_DEVICE_BATCH_SIZE} \
  --gradient_accumulation_steps ${GRADIENT_ACC} \
  --evaluation_strategy "no" \
  --save_strategy "steps" \
  --save_steps 100 \
  --save_total_limit 2 \
  --learning_rate 1e-5 \
  --weight_decay 0.05 \
  --warmup_steps 100 \
  --lr_scheduler_type "cosine" \
  --logging_steps 1 \
  --max_seq_length 16384 \
  --do_train True \
  --grad_checkpoint True \
  --group_by_length False \
  --dynamic_image_size True \
  --use_thumbnail True \
  --ps_version 'v2' \
  --deepspeed "zero_stage1_config.json" \
  --report_to "tensorboard" \
  --use_packed_ds True \
  --num_images_expected 48 \
  --max_packed_tokens 16384 \
  --max_buffer_size 20 \
  --log_freq 1000 \
  --strict_mode False \
  --replacement True \
  --allow_overflow False \
  --remove_unused_columns False \
  --split_annotations True \
  --loss_reduction "square" \
  --loss_reduction_all_gather True \
  2>&1 | tee -a "${OUTPUT_DIR}/training_log.txt"
"""
# internvl2.0_mpo/preference_optimization: MPO by its losses, one pair a GPU
OF_PAIRS = "./shell/data/pairs.json"
DPO = (
    FULL.replace("internvl_chat_finetune.py", "internvl_chat_dpo.py")
    .replace("./shell/data/internvl_1_2_finetune_custom.json", OF_PAIRS)
    .replace("PER_DEVICE_BATCH_SIZE:-4", "PER_DEVICE_BATCH_SIZE:-1")
    .replace(
        "--freeze_backbone True", "--freeze_backbone False \\\n  --use_data_resampling False \\\n  --pad2square False"
    )
    .replace("--learning_rate 4e-5", "--learning_rate 5e-6")
    .replace("--max_seq_length 8192", "--max_seq_length 6144")
    .replace("--group_by_length True", "--group_by_length False")
    .replace(
        '--report_to "tensorboard"',
        '--report_to "tensorboard" \\\n  --loss_type sigmoid,bco_pair \\\n  --sigmoid_loss_weight 0.8 \\\n'
        "  --bco_pair_loss_weight 0.2 \\\n  --rpo_alpha 1",
    )
)
# internvl3_5_qwen3: MPO by its program
MPO = (
    FULL.replace("internvl_chat_finetune.py", "internvl_chat_mpo.py")
    .replace("./shell/data/internvl_1_2_finetune_custom.json", OF_PAIRS)
    .replace("PER_DEVICE_BATCH_SIZE:-4", "PER_DEVICE_BATCH_SIZE:-1")
    .replace("--freeze_backbone True", "--freeze_backbone False \\\n  --min_num_frame 8 \\\n  --max_num_frame 32")
    .replace("--drop_path_rate 0.1", "--drop_path_rate 0.0")
    .replace("--learning_rate 4e-5", "--learning_rate 2e-7")
    .replace("--max_seq_length 8192", "--max_seq_length 16384 \\\n  --split_annotations False")
    .replace("--grad_checkpoint True", "--grad_checkpoint True \\\n  --gradient_checkpointing True")
    .replace("--ps_version 'v2'", "--ps_version 'v2' \\\n  --use_custom_flash_attn True")
    .replace("zero_stage1_config.json", "zero_stage3_config.json")
)
SCRIPTS = {"full": FULL, "lora": LORA, "packed": PACKED}
DROPPED_IN = {
    "full": {"use_fast_tokenizer", "vision_select_layer", "group_by_length", "ps_version"},
    "packed": {"vision_select_layer", "group_by_length", "ps_version", "allow_overflow"} | {"split_annotations"},
}
DROPPED_IN["lora"] = DROPPED_IN["full"]
RENAMED_IN = {"full": {"warmup_ratio", "evaluation_strategy"}, "packed": {"evaluation_strategy"}}
RENAMED_IN["lora"] = RENAMED_IN["full"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """Where the scripts run: the checkpoint and the meta file are where they look for them."""
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("InternVL")
    save_tiny_checkpoint(folder / "OpenGVLab" / "InternVL2_5-8B", tokenizer, image_size=448)
    data = folder / "shell" / "data"
    meta = write_jsonl(data, 5, root=str(data / "images"), annotation=str(data / "made.jsonl"))
    meta.rename(data / "internvl_1_2_finetune_custom.json")
    pairs = data / "of_pairs"
    meta = write_pairs(pairs, 4, root=str(pairs / "images"), annotation=str(pairs / "made.jsonl"))
    meta.rename(data / "pairs.json")
    return folder


def words_of(script: str, folder: Path, tmp_path: Path, **env: str) -> list[str]:
    """What the script starts, run by bash with a launcher that writes down its command line."""
    for program in (*PROGRAMS, *OF_PREFERENCES):
        script = script.replace(program, str(ROOT / "train" / "finetune.py"))
    seen = tmp_path / "argv.json"
    for launcher in ("torchrun", "srun"):
        tool = tmp_path / "bin" / launcher
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(seen)!r}, 'w'))\n")
        tool.chmod(0o755)
    (tmp_path / "run.sh").write_text(script)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(tmp_path / "run.sh")]
    subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path} | env, check=True, capture_output=True)
    words = json.loads(seen.read_text())
    return words[words.index(str(ROOT / "train" / "finetune.py")) + 1 :]


@pytest.fixture
def process(monkeypatch):
    """A process of its own for `main`, as far as the environment goes."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_script_trains_here(name, folder, tmp_path, process, monkeypatch, capsys):
    if name == "lora":
        pytest.importorskip("peft")
    batch_size = "1" if name == "packed" else "4"
    words = words_of(SCRIPTS[name], folder, tmp_path, GPUS="1", GPUS_PER_NODE="1", BATCH_SIZE=batch_size)
    words += ["--dataloader_num_workers", "0"]  # the machine's size is not the script's business
    out = folder / words[words.index("--output_dir") + 1]
    monkeypatch.chdir(folder)
    if name == "full":
        log = run("train.finetune:main", words, 1, tmp_path / "log").told()
    else:  # without DeepSpeed, which starts once in a process
        place = words.index("--deepspeed")
        assert find_deepspeed_config(words[place + 1]).is_file()
        status = finetune.main(words[:place] + words[place + 2 :])
        log = capsys.readouterr().err
        assert status == 0, log[-3000:]
    summary = json.loads((out / "train_summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["packed"] == (name == "packed")
    assert list(folder.glob("**/events.out.tfevents.*"))
    told = log.splitlines()
    for flag in DROPPED_IN[name]:
        assert f"--{flag} has no effect here and is ignored: {DROPPED[flag]}" in told
    for flag in RENAMED_IN[name]:
        assert f"--{flag} is now --{RENAMED[flag]}" in told
    assert sum("has no effect here" in line for line in told) == len(DROPPED_IN[name])


@pytest.mark.slow
@pytest.mark.parametrize(("script", "objective"), [(DPO, ()), (MPO, ("--objective", "mpo"))], ids=["dpo", "mpo"])
def test_a_published_script_of_preferences_trains_here(
    script, objective, folder, tmp_path, process, monkeypatch, capsys
):
    words = [*words_of(script, folder, tmp_path, GPUS="1", BATCH_SIZE="2"), *objective, "--dataloader_num_workers", "0"]
    place, out = words.index("--deepspeed"), folder / words[words.index("--output_dir") + 1]
    monkeypatch.chdir(folder)
    status = finetune.main([*words[:place], *words[place + 2 :], "--max_dynamic_patch", "2"])
    assert status == 0, capsys.readouterr().err[-3000:]
    logs = [e for e in json.loads((out / "trainer_state.json").read_text())["log_history"] if "loss" in e]
    assert len(logs) == 2
    parts = [logs[1][f"loss/{name}"] for name in ("sigmoid", "bco_pair", "sft")]
    assert logs[1]["loss"] == pytest.approx(0.8 * parts[0] + 0.2 * parts[1] + parts[2], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vision_select_layer", "-4"], "--vision_select_layer -4: the checkpoint's config says which layer"),
        (["--ps_version", "v1"], "--ps_version v1: the native model"),
        (["--pad2square", "True"], "--pad2square True: images are not padded"),
        (["--allow_overflow"], "--allow_overflow True: a row never exceeds its budgets"),
        (["--unfreeze_lm_head=True"], "--unfreeze_lm_head True: the head is trained"),
        (["--mlp_path", "mlp.pth"], "--mlp_path: a projector is not loaded"),
    ],
)
def test_a_flag_that_would_train_something_else_is_refused_by_name(words, message):
    with pytest.raises(UserError) as caught:
        translate(words)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_the_same_flags_at_harmless_values_are_left_out():
    words = ["--vision_select_layer", "-1", "--ps_version", "v2", "--pad2square", "False", "--allow_overflow=False"]
    assert translate([*words, "--unfreeze_lm_head", "False", "--bf16", "True"])[0] == ["--bf16", "True"]
    assert REFUSED.keys() <= DROPPED.keys()
    assert not GONE.keys() & (DROPPED.keys() | set(option_names()))


def test_a_task_of_srun_finds_its_place(process, tmp_path, monkeypatch):
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    tool.chmod(0o755)
    slurm = {"PROCID": "9", "LOCALID": "1", "NTASKS": "16", "NTASKS_PER_NODE": "8", "JOB_ID": "41234"}
    for key, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[3-4]")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    prepare_environment()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["9", "1", "16", "8", "node3", "21234"]


def test_a_task_of_srun_without_scontrol_is_told_what_to_set(process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert finetune.main([]) == 2
    assert "set MASTER_ADDR" in capsys.readouterr().err
