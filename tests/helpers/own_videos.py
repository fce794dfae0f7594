"""What transformers' processors make of videos, in a process of its own, which has torchvision (see answer.py).

    python tests/helpers/own_videos.py < cases.json    prints one JSON list

A case: "folder" of a processor, "text" with a video's placeholder, "frames" and "fps" of the video, its "size" (width,
height), and "sampled" for which frames there are if the processor is not to choose them. The answer to it: "ids",
"grid" (frame pairs, rows, columns of tokens), "frames" that were taken, "seconds" a pair for Qwen2.5-VL.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def made(processor: Any, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.video_utils import VideoMetadata

    frames, fps, (width, height) = case["frames"], case["fps"], case["size"]
    about = VideoMetadata(total_num_frames=frames, fps=fps, width=width, height=height, duration=frames / fps)
    options: dict[str, Any] = {}
    if sampled := case.get("sampled"):
        frames, about.frames_indices, options = len(sampled), sampled, {"do_sample_frames": False}
    video = np.zeros((frames, 3, height, width), dtype=np.uint8)
    found = processor(text=[case["text"]], videos=[video], video_metadata=[about], return_metadata=True, **options)
    pairs, rows, columns = found["video_grid_thw"][0].tolist()
    answer = {"ids": found["input_ids"][0], "grid": [pairs, rows // 2, columns // 2]}
    answer["frames"] = np.asarray(found["video_metadata"][0].frames_indices).tolist()
    return answer | ({"seconds": float(found["second_per_grid_ts"][0])} if "second_per_grid_ts" in found else {})


def main() -> None:
    from answer import import_torchvision

    _declared = import_torchvision()
    from transformers import AutoProcessor

    processors: dict[str, Any] = {}
    answers = []
    for case in json.load(sys.stdin):
        folder = case["folder"]
        processors[folder] = processors.get(folder) or AutoProcessor.from_pretrained(folder)
        answers.append(made(processors[folder], case))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
