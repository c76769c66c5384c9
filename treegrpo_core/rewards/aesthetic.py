"""LAION's aesthetic predictor v2 (github.com/christophschuhmann/improved-aesthetic-predictor): CLIP L/14 and a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Checkpoint, check_pictures, missing
from .batch import in_batches
from .clip import BATCH, ImageTower, load_image_tower
from .learned import LEARNED
from .prepare import cropped
from .weights import fill, read_weights

EMBEDDING = 768


class Head(nn.Module):
    """(N, 768) -> (N, 1): five linear layers with nothing but dropout between them, so linear as a whole.

    ImageReward has the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(EMBEDDING, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, embedding: Tensor) -> Tensor:
        return self.layers(embedding)


class Predictor(nn.Module):
    """(N, 3, side, side), normalised -> (N,)."""

    def __init__(self, visual: ImageTower, head: Head) -> None:
        super().__init__()
        self.visual = visual
        self.head = head

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.normalize(self.visual(pixels), dim=1))[:, 0]


class Aesthetic:
    """How beautiful people would call the picture, 1 to 10. The prompt plays no part."""

    name = "aesthetic"

    def __init__(self, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> None:
        """FileNotFoundError as ``locate`` says; ValueError if a file is not the right one."""
        file, clip = map(locate, LEARNED[self.name].checkpoints)
        with torch.device("meta"):
            head = Head()
        head = fill(head, read_weights(file), file.name)
        self.module = Predictor(load_image_tower(read_weights(clip), clip.name, quick_gelu=True), head).eval()
        if self.module.visual.proj.shape[1] != EMBEDDING:
            raise ValueError(f"{clip.name} is a CLIP of another size: the predictor needs OpenAI's ViT-L/14")

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1], any size. Returns (N,) float32 on the CPU."""
        check_pictures(images, prompts)
        side, device = self.module.visual.side, self.module.visual.proj.device
        return in_batches(
            self.module, len(images), BATCH, lambda part: self.module(cropped(images[part], side).to(device))
        )
