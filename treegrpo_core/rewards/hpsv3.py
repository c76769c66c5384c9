"""HPSv3 (arXiv 2508.03789, github.com/MizzenAI/HPSv3): Qwen2-VL-7B that reads an instruction, the prompt, the picture.

The score is read at one more word, ``<|Reward|>``, near the end of the text, by a small head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from . import Checkpoint, check_pictures, missing
from .batch import in_batches
from .learned import LEARNED
from .prepare import eight_bit, normalised
from .qwen import MERGE, PATCH, ImageTower, Shape, TextTower, patches, shape_of
from .tokens import QwenTokenizer
from .weights import fill, read_weights

BATCH = 4
TOKENS = 256
"""What a picture becomes, about."""
_SIDE = PATCH * MERGE
IMAGE, REWARD, PADDING = 151_655, 151_657, 151_643
"""Ids of the words for a piece of the picture, for the score, and for nothing."""
_START, _END, _IMAGE_START, _IMAGE_END = 151_644, 151_645, 151_652, 151_653


class Scorer(nn.Module):
    """Both towers and the head, under the names of the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.visual = ImageTower(shape)
        self.model = TextTower(shape)
        head = [nn.Linear(shape.width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU()]
        self.rm_head = nn.Sequential(*head, nn.Linear(16, 2))

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """pixels: (N, 3, H, W), normalised; ids: (N, T) with one REWARD each. Returns (N, 2): mean and its spread."""
        rows, columns = pixels.shape[2] // _SIDE, pixels.shape[3] // _SIDE
        seen = self.visual(patches(pixels), rows, columns)
        x = self.model.embed_tokens(ids)
        x = x.masked_scatter((ids == IMAGE)[..., None], seen.to(x.dtype))
        return self.rm_head(self.model(x)[ids == REWARD].float())


class HpsV3:
    """The model's estimate of how people would rate the picture for this prompt; mostly -5 to 15."""

    name = "hpsv3"
    dtype = torch.bfloat16
    """Of both towers, as trained; the head is float32."""

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, instruction, vocabulary, merges = map(locate, LEARNED[self.name].checkpoints)
        self.tokenizer = QwenTokenizer(vocabulary, merges)
        self.instruction = _checked(instruction)
        weights = {name: value for name, value in read_weights(file).items() if name != "lm_head.weight"}
        with torch.device("meta"):
            scorer = Scorer(shape_of(weights))
        self.module = fill(scorer, weights, file.name, self.dtype)
        self.module.rm_head.float()

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        device = self.module.model.norm.weight.device
        height, width = size(*images.shape[1:3])
        tokens = height * width // (_SIDE * _SIDE)

        def work(part: slice) -> Tensor:
            pixels, ids = resized(images[part], height, width), self.ids(prompts[part], tokens)
            return self.module(pixels.to(device), ids.to(device))[:, 0]

        return in_batches(self.module, len(images), BATCH, work)

    def ids(self, prompts: list[str], tokens: int) -> Tensor:
        """N texts -> (N, T) token ids: Qwen2-VL's chat around the picture and the instruction, padded behind."""
        words = self.tokenizer
        head = [_START, *words("system\nYou are a helpful assistant."), _END, *words("\n"), _START, *words("user\n")]
        head += [_IMAGE_START, *[IMAGE] * tokens, _IMAGE_END]
        before, after = self.instruction.split("<|Reward|>")
        tail = [REWARD, *words(after), _END, *words("\n"), _START, *words("assistant\n")]
        rows = [[*head, *words(before.replace("{text_prompt}", prompt)), *tail] for prompt in prompts]
        longest = max(map(len, rows))
        return torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])


def _checked(path: Path) -> str:
    """The text around a prompt, with one place for the prompt and one for the score."""
    text = path.read_text(encoding="utf-8")
    for place in ("{text_prompt}", "<|Reward|>"):
        if text.count(place) != 1:
            raise ValueError(f"{path.name} has {text.count(place)} times {place!r}, and must have it once")
    return text


def size(height: int, width: int) -> tuple[int, int]:
    """Sides, multiples of 28, of about 256 tokens in the picture's proportions: Qwen2-VL's rule with min = max."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"pictures of {width} x {height} are too narrow for hpsv3: at most 200 times as long as wide")
    pixels = TOKENS * _SIDE * _SIDE
    rows, columns = (max(_SIDE, round(length / _SIDE) * _SIDE) for length in (height, width))
    if rows * columns == pixels:
        return rows, columns
    scale = math.sqrt(pixels / (height * width))
    if rows * columns < pixels:
        return math.ceil(height * scale / _SIDE) * _SIDE, math.ceil(width * scale / _SIDE) * _SIDE
    shrink = math.sqrt(height * width / pixels)
    return max(1, math.floor(height / shrink / _SIDE)) * _SIDE, max(1, math.floor(width / shrink / _SIDE)) * _SIDE


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """(N, H, W, 3) in [0, 1] -> (N, 3, height, width), normalised; by Pillow's bicubic filter in 8 bits."""
    pictures = [Image.fromarray(picture) for picture in eight_bit(images).numpy()]
    small = [np.asarray(each.resize((width, height), Image.Resampling.BICUBIC)) for each in pictures]
    return normalised(torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255)
