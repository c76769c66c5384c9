"""ImageReward v1.0 (arXiv 2304.05977, github.com/THUDM/ImageReward): BLIP trained on people's ratings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from . import Checkpoint, check_pictures, missing
from .aesthetic import Head
from .batch import in_batches
from .blip import Blip, Shape, shape_of
from .clip import BATCH
from .learned import LEARNED
from .prepare import cropped
from .tokens import BertTokenizer
from .weights import fill, read_weights

WINDOW = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the scores on the authors' data, which they subtract and divide by."""
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")
"""In the checkpoint, but without a part in the score."""


class Scorer(nn.Module):
    """BLIP and its head, under the names of the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blip = Blip(shape)
        self.mlp = Head()

    def forward(self, pixels: Tensor, ids: Tensor, there: Tensor) -> Tensor:
        """pixels: (N, 3, side, side); ids, there: (N, 35). Returns (N,)."""
        return (self.mlp(self.blip(pixels, ids, there))[:, 0] - MEAN) / STD


class ImageReward:
    """How well the picture fits the prompt and pleases, about -2.3 to 2; 0 is the mean of the authors' data."""

    name = "imagereward"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, vocabulary = map(locate, LEARNED[self.name].checkpoints)
        self.tokenizer = BertTokenizer(vocabulary)
        weights = {name: value for name, value in read_weights(file).items() if not name.startswith(_UNUSED)}
        shape = shape_of({name.removeprefix("blip."): value for name, value in weights.items()})
        with torch.device("meta"):
            scorer = Scorer(shape)
        self.module = fill(scorer, weights, file.name)

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size; prompts: N texts. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        device = self.module.blip.visual_encoder.cls_token.device
        ids, there = (each.to(device) for each in self.tokenizer(prompts, WINDOW))

        def work(part: slice) -> Tensor:
            pixels = cropped(images[part], self.module.blip.shape.side, odd="even")
            return self.module(pixels.to(device), ids[part], there[part])

        return in_batches(self.module, len(images), BATCH, work)
