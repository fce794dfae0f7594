"""What trained folders answer by transformers alone: README's lines, in a process of their own.

    python tests/helpers/answer.py QUESTION IMAGES FOLDER...    prints one JSON object a folder

In the question `<image>` stands for the next of the images, whose names are separated by commas.

The processor of InternVL needs torchvision, whose wheel on PyPI is built for CUDA: beside a torch without CUDA its
compiled operators do not load, and importing it fails on the names of two of them. Processors call none of the
operators, but transforms written in Python. So there the two names are declared, without anything behind them, and
images are opened by Pillow instead of torchvision's decoder.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from PIL import Image

DETECTION = ("nms", "qnms")  # what torchvision's import asks for


def import_torchvision() -> torch.library.Library | None:
    """Make torchvision importable, from the folder that INTERNVL_PACK_TORCHVISION names where it does.

    Returns:
        What keeps the declarations alive, where any were needed.
    """
    if folder := os.environ.get("INTERNVL_PACK_TORCHVISION"):
        sys.path.insert(0, folder)
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    else:
        return None
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in DETECTION:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

    return library


def main(question: str, images: str, *folders: str) -> None:
    _declared = import_torchvision()
    first, *others = question.split("<image>")
    parts = [{"type": "text", "text": first}] if first else []
    for image, text in zip(images.split(","), others, strict=True):
        parts += [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": text}]
    for folder in folders:
        print(json.dumps(answered(folder, [{"role": "user", "content": parts}])))


def answered(folder: str, chat: list[dict]) -> dict:
    from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(chat, **how)
    prompt = inputs["input_ids"][0].tolist()
    answer = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, len(prompt) :]
    (piped,) = pipeline("image-text-to-text", model=folder)(
        text=chat, max_new_tokens=3, return_full_text=False, generate_kwargs={"do_sample": False}
    )
    found = {"prompt": prompt, "tiles": list(inputs["pixel_values"].shape), "pipeline": piped["generated_text"]}
    if "image_grid_thw" in inputs:
        found["grids"] = inputs["image_grid_thw"].tolist()
    return found | {"answer": processor.decode(answer, skip_special_tokens=True)}


if __name__ == "__main__":
    main(*sys.argv[1:])
