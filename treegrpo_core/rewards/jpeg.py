"""Compressibility: how small a picture is as a JPEG file."""

from __future__ import annotations

from io import BytesIO

import torch
from PIL import Image
from torch import Tensor

from . import check_pictures
from .helpers import pictures

QUALITY = 95


class JpegReward:
    """Minus the kilobytes (1000 bytes) of the picture as a JPEG file of quality 95. The prompt plays no part.

    It is easily hacked (an empty picture is the best one): use it to watch a training, or to see what hacking looks
    like.
    """

    name = "jpeg"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32, below 0. ValueError for any other shape."""
        check_pictures(images, prompts)
        return torch.tensor([-_kilobytes(picture) for picture in pictures(images)], dtype=torch.float32)


class JpegDetailReward:
    """The kilobytes (1000 bytes) of the picture as a JPEG file of quality 95: :class:`JpegReward` the other way round.

    Noise has most: use it with a reward that asks for a good picture.
    """

    name = "jpeg_detail"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32, above 0. ValueError for any other shape."""
        return -JpegReward().score(images, prompts)


def _kilobytes(picture: Image.Image) -> float:
    file = BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return file.tell() / 1000
