"""Sharpness: how much a picture's brightness bends from pixel to pixel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import check_pictures
from .helpers import luma, wanted_number

HALF = 0.1
"""Bend that counts as sharpness 0.5."""
HIGHEST = 0.97
"""Just below chequers of one pixel: they bend by 4, so 4 / (4 + HALF) = 0.976."""


class SharpnessReward:
    """The sharpness s of the picture, or 1 - (s - wanted)² if a sharpness is wanted; both from 0 to 1.

    s = b / (b + 0.1), where b is the root mean square of the discrete Laplacian (four neighbours; the border is
    repeated) of the brightness. It is measured on the pixels as they are, so a picture made larger is less sharp. Noise
    is sharp: use it with a reward that asks for a good picture.
    """

    name = "sharpness"

    def __init__(self, source: str = "", locate: Any = None) -> None:
        """Source: the wanted sharpness, 0 to 0.97; empty: the more, the better. ValueError for anything else."""
        self.wanted = wanted_number(self.name, source, 0, HIGHEST) if source.strip() else None

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [0, 1]. ValueError for any other shape."""
        check_pictures(images, prompts)
        sharp = torch.cat([sharpness(image[None]) for image in images]).cpu()
        return sharp if self.wanted is None else 1 - (sharp - self.wanted).square()


def sharpness(images: Tensor) -> Tensor:
    """(N, H, W, 3) float in [0, 1] -> (N,) float32 from 0 (plain) to 0.976."""
    bright = F.pad(luma(images)[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    centre = bright[:, 1:-1, 1:-1]
    bend = bright[:, 1:-1, :-2] + bright[:, 1:-1, 2:] + bright[:, :-2, 1:-1] + bright[:, 2:, 1:-1] - 4 * centre
    strength = bend.square().mean((1, 2)).sqrt()
    return strength / (strength + HALF)
