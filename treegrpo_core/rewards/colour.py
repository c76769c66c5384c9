"""Colour: how near a picture's mean colour is to a wanted one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from . import check_pictures


class ColourReward:
    """1 - the mean over red, green and blue of (mean of the picture - wanted)², so from 0 to 1.

    Differences are taken between values in [0, 1] as they are stored (sRGB). A picture has one mean: red and cyan
    halves make a grey.
    """

    name = "colour"

    def __init__(self, source: str, locate: Any = None) -> None:
        """Source: the colour as ``#rrggbb``, two hexadecimal digits a channel. ValueError for anything else."""
        if not re.fullmatch("#[0-9a-fA-F]{6}", source.strip()):
            raise ValueError(f"source of reward 'colour' is {source!r}: give a colour as #rrggbb, for example #3060c0")
        self.wanted = torch.tensor(list(bytes.fromhex(source.strip()[1:]))) / 255

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [0, 1]. ValueError for any other shape."""
        check_pictures(images, prompts)
        mean = images.detach().float().clamp(0, 1).mean((1, 2)).cpu()
        return 1 - (mean - self.wanted).square().mean(1)
