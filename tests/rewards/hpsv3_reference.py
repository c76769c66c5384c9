"""Run as a program, with transformers 4.45.2 and the package hpsv3 1.0.0: its scores of the pictures in a folder.

``python hpsv3_reference.py FOLDER TOKENIZER`` reads HPSv3.safetensors, asked.pt (prompts) and 0.png, 1.png, ... in
FOLDER and the vocabulary in TOKENIZER, and prints a score a line. Of the package only the reward model and the texts
are taken, out of its files: importing it needs a dozen training libraries.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
import typing
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)

FOLDER, TOKENIZER = map(Path, sys.argv[1:])
PIXELS = 256 * 28 * 28
ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<|Reward|>",
]  # fmt: skip
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)


def taken(file: str, names: set[str], **known: Any) -> dict[str, Any]:
    """Classes, functions and constants of those names out of a file of the package."""
    package = importlib.util.find_spec("hpsv3")
    assert package is not None and package.submodule_search_locations
    body = ast.parse(Path(package.submodule_search_locations[0], file).read_text(encoding="utf-8")).body
    kept = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names]
    assigned = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names]
    future = ast.parse("from __future__ import annotations").body
    space = dict(known)
    exec(compile(ast.Module([*future, *assigned, *kept], []), file, "exec"), space)
    return space


def model() -> Any:
    weights = load_file(FOLDER / "HPSv3.safetensors")
    config = Qwen2VLConfig(
        vocab_size=len(weights["model.embed_tokens.weight"]), hidden_size=256, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, use_cache=False, image_token_id=151655,
        pad_token_id=151643, vision_config={"depth": 2, "embed_dim": 160, "hidden_size": 256, "num_heads": 2},
    )  # fmt: skip
    known = {"torch": torch, "nn": torch.nn, "Qwen2VLForConditionalGeneration": Qwen2VLForConditionalGeneration}
    made = taken("model/qwen2vl_trainer.py", {"Qwen2VLRewardModelBT"}, **known, **vars(typing))["Qwen2VLRewardModelBT"]
    built = made(config, output_dim=2, special_token_ids=[151657], rm_head_type="ranknet").eval()
    built.load_state_dict(weights, strict=True)
    return built


def main() -> None:
    rules = {"smart_resize", "round_by_factor", "ceil_by_factor", "floor_by_factor"}
    rules |= {"IMAGE_FACTOR", "MIN_PIXELS", "MAX_PIXELS", "MAX_RATIO"}
    smart_resize = taken("dataset/utils.py", rules, math=math)["smart_resize"]
    texts = taken("dataset/data_collator_qwen.py", {"INSTRUCTION", "prompt_with_special_token"})
    text = texts["INSTRUCTION"] + texts["prompt_with_special_token"]
    (FOLDER / "hpsv3_instruction.txt").write_text(text, encoding="utf-8")
    tokenizer = Qwen2TokenizerFast(str(TOKENIZER / "vocab.json"), str(TOKENIZER / "merges.txt"), padding_side="right")
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer)
    images, chats = [], []
    for number, prompt in enumerate(torch.load(FOLDER / "asked.pt")):
        image = Image.open(FOLDER / f"{number}.png").convert("RGB")
        height, width = smart_resize(image.height, image.width, min_pixels=PIXELS, max_pixels=PIXELS)
        images.append(image.resize((width, height), Image.BICUBIC))
        chats.append(CHAT.format(texts["INSTRUCTION"].format(text_prompt=prompt) + texts["prompt_with_special_token"]))
    batch = processor(text=chats, images=images, padding=True, return_tensors="pt")
    with torch.no_grad():
        for score in model()(return_dict=True, **batch)["logits"][:, 0].tolist():
            print(score)


if __name__ == "__main__":
    main()
