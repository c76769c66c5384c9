"""Brightness: how near a picture's mean brightness is to a wanted one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import check_pictures
from .helpers import luma, wanted_number


class BrightnessReward:
    """1 - (mean brightness of the picture - wanted)², so from 0 to 1. Brightness: BT.709 luma of the stored values."""

    name = "brightness"

    def __init__(self, source: str, locate: Any = None) -> None:
        """Source: the brightness, from 0 (black) to 1 (white). ValueError for anything else."""
        self.wanted = wanted_number(self.name, source, 0, 1)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [0, 1]. ValueError for any other shape."""
        check_pictures(images, prompts)
        return 1 - (luma(images).mean((1, 2)).cpu() - self.wanted).square()
