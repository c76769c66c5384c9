"""Compressibility: how small a picture is as a JPEG file."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from . import check_pictures

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
        pixels = images.detach().float().clamp(0, 1).mul(255).round().byte().cpu().numpy()
        return torch.tensor([-_kilobytes(picture) for picture in pixels], dtype=torch.float32)


def _kilobytes(picture: Any) -> float:
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=QUALITY)
    return file.tell() / 1000
