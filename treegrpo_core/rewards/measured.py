"""Rewards that are measured, not judged: does the picture have the background and the size its caption asks for?"""

from __future__ import annotations

from torch import Tensor

from ..bundled import captions
from . import check_pictures


class BackgroundMatch:
    """1 where the background is the colour the caption asks for, else 0. Captions: ``[small] <thing> on <colour>``."""

    name = "background_match"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32. ValueError for any other shape or caption."""
        check_pictures(images, prompts)
        return captions.background_match(images, prompts)


class SizeMatch:
    """1 where the thing is small exactly if the caption says so, else 0. Captions: ``[small] <thing> on <colour>``."""

    name = "size_match"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32. ValueError for any other shape or caption."""
        check_pictures(images, prompts)
        return captions.size_match(images, prompts)
