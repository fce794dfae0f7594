"""`internvl-pack script`: launch scripts are read, not run, and become the command that does the same here."""

from __future__ import annotations

import os
import subprocess

import pytest

from internvl_pack.cli import main
from internvl_pack.errors import UserError
from train.script import FINETUNE, translate_script

SCRIPT = r"""
set -x
# torchrun internvl/train/internvl_chat_finetune.py --this_is a comment
GPUS=${GPUS:-8}
BATCH_SIZE=${BATCH_SIZE:-128}
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-4}
GRADIENT_ACC=$((BATCH_SIZE / PER_DEVICE_BATCH_SIZE / GPUS))
SRUN_ARGS=${SRUN_ARGS:-""}

export PYTHONPATH="${PYTHONPATH}:$(pwd)"
export MASTER_PORT=34229
export LAUNCHER=pytorch
TASK_NAME=$(basename "$0")
TASK_NAME="${TASK_NAME%.*}"
OUTPUT_DIR="work_dirs/${TASK_NAME}"

if [ ! -d "$OUTPUT_DIR" ]; then
  mkdir -p "$OUTPUT_DIR"
fi

torchrun \
  --nnodes=$NODES \
  --nproc_per_node=${GPUS} \
  --master_port=${MASTER_PORT} \
  ${SRUN_ARGS} \
  internvl/train/internvl_chat_finetune.py \
  --model_name_or_path "OpenGVLab/InternVL2_5-1B" \
  --conv_style "internvl2_5" \
  --use_fast_tokenizer False \
  --output_dir ${OUTPUT_DIR} \
  --meta_path "./shell/data/my data.json" \
  --vision_select_layer -1 \
  --gradient_accumulation_steps ${GRADIENT_ACC} \
  --warmup_ratio 0.03 \
  --use_custom_flash_attn True \
  --deepspeed "zero_stage3_config_100b_1e8.json" \
  2>&1 | tee -a "${OUTPUT_DIR}/training_log.txt"
"""


def options(command: list[str]) -> dict[str, str]:
    words = command[command.index(str(FINETUNE)) + 1 :]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_variables_are_filled_in_as_bash_does():
    found = translate_script("a/my_run.sh", SCRIPT, {"NODES": "1"})
    assert found.command[: found.command.index(str(FINETUNE))] == [
        "torchrun",
        "--nnodes=1",
        "--nproc_per_node=8",
        "--master_port=34229",
    ]
    assert options(found.command) == {
        "--model_name_or_path": "OpenGVLab/InternVL2_5-1B",
        "--conv_style": "internvl2_5",
        "--output_dir": "work_dirs/my_run",
        "--meta_path": "./shell/data/my data.json",
        "--gradient_accumulation_steps": "4",
        "--warmup_steps": "0.03",
        "--deepspeed": "zero_stage3_config_100b_1e8.json",
    }
    assert found.environment == {"MASTER_PORT": "34229"}, "what only InternVL's code reads is left out"


def test_variables_that_are_set_win_over_the_scripts_defaults():
    found = translate_script("run.sh", SCRIPT, {"GPUS": "2", "BATCH_SIZE": "64", "NODES": "1"})
    assert options(found.command)["--gradient_accumulation_steps"] == "8"
    assert "--nproc_per_node=2" in found.command


def test_what_only_the_run_knows_is_left_to_the_shell(tmp_path):
    text = SCRIPT.replace("/ GPUS))", "/ GPUS / WORLD_SIZE))")
    printed = str(translate_script("run.sh", text, {}))
    assert '"--nnodes=$NODES"' in printed and '"$((128 / 4 / 8 / WORLD_SIZE))"' in printed
    tool = tmp_path / "torchrun"
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "3", "WORLD_SIZE": "2"}
    done = subprocess.run(["bash", "-c", printed], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[0] == "--nnodes=3" and words[words.index("--gradient_accumulation_steps") + 1] == "2"
    assert words[words.index("--meta_path") + 1] == "./shell/data/my data.json"


def test_what_was_translated_or_dropped_is_said():
    notes = translate_script("run.sh", SCRIPT, {}).notes
    assert [note.split(" ")[0] for note in notes] == [
        "internvl/train/internvl_chat_finetune.py",
        "--use_fast_tokenizer",
        "--vision_select_layer",
        "--warmup_ratio",
        "--use_custom_flash_attn",
        "--deepspeed",
        "without",
    ]
    assert notes[5] == "--deepspeed zero_stage3_config_100b_1e8.json is train/configs/zero_stage3.json"
    assert "goes on from the newest checkpoint" in notes[6]


@pytest.mark.parametrize(
    ("program", "options", "added"),
    [
        ("mpo", "", ["--objective", "mpo"]),
        ("dpo", "", ["--objective", "dpo"]),
        ("dpo", " --loss_type sigmoid,bco_pair", []),
    ],
)
def test_a_program_of_preferences_is_an_objective(program, options, added):
    script = SCRIPT.replace("chat_finetune.py", f"chat_{program}.py").replace(
        "--warmup_ratio 0.03", f"--warmup_ratio 0.03{options}"
    )
    found = translate_script("run.sh", script, {})
    place = found.command.index("--model_name_or_path")
    assert found.command[place - len(added) : place] == added and found.command[place - len(added) - 1] == str(FINETUNE)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("chat_finetune.py \\", "chat_eval.py \\", "run.sh: internvl_chat_eval.py is no training program"),
        ("internvl/train/internvl_chat_finetune.py \\", "eval.py \\", "run.sh: it starts none of InternVL's training"),
        ("--warmup_ratio 0.03", "--ps_version v1", "run.sh: --ps_version v1: the native model"),
        ("--warmup_ratio 0.03", "--max_sequence_length 9", "run.sh: unknown option '--max_sequence_length'"),
        ('"internvl2_5"', '"vicuna_v1.1"', "run.sh: --conv_style vicuna_v1.1: choose one of"),
        ("100b_1e8.json", "huge.json", "run.sh: --deepspeed zero_stage3_config_huge.json: no such file"),
    ],
)
def test_what_cannot_be_done_here_is_one_line(before, after, message):
    assert before in SCRIPT
    with pytest.raises(UserError) as caught:
        translate_script("run.sh", SCRIPT.replace(before, after), {})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_the_command_prints_it(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["script", str(tmp_path / "run.sh")]) == 0
    assert "torchrun \\\n" in capsys.readouterr().out
    assert main(["script", str(tmp_path / "no.sh")]) == 2
    assert "FILE.sh" in capsys.readouterr().err
