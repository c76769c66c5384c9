"""Pictures as the image towers of CLIP and BLIP were trained to see them.

Scores of published rewards are those of files, so a picture is first rounded to 8 bits a channel.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def eight_bit(images: Tensor) -> Tensor:
    """(N, H, W, 3) float in [0, 1], what is outside is cut -> uint8 on the CPU."""
    return images.detach().float().clamp(0, 1).mul(255).round().byte().cpu()


def normalised(pixels: Tensor) -> Tensor:
    """(N, 3, h, w) in [0, 1] -> the same with CLIP's mean and spread of each channel taken out."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def letterboxed(images: Tensor, side: int) -> Tensor:
    """HPSv2's way: the longest side becomes ``side``, black fills the square. (N, H, W, 3) -> (N, 3, side, side).

    Resized in floating point with a bicubic antialiasing filter, as the reference does (github.com/tgxs002/HPSv2).
    """
    pixels = eight_bit(images).permute(0, 3, 1, 2).float() / 255
    scale = side / max(pixels.shape[-2:])
    height, width = (max(1, round(length * scale)) for length in pixels.shape[-2:])
    if scale != 1:
        pixels = F.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    left, top = (side - width) // 2, (side - height) // 2
    return normalised(F.pad(pixels, (left, side - width - left, top, side - height - top)))


def cropped(images: Tensor, side: int, *, odd: Literal["down", "even"] = "down") -> Tensor:
    """CLIP's way: the shortest side becomes ``side``, the middle is kept. (N, H, W, 3) -> (N, 3, side, side).

    Resized by Pillow's bicubic filter in 8 bits, as the processors do that scores are published with. ``odd``: where
    the crop begins if the rest is odd: half a pixel ``down`` (transformers) or at the ``even`` one (torchvision).
    """
    rows, columns = images.shape[1:3]
    height, width = (int(side * length / min(rows, columns)) for length in (rows, columns))
    if odd == "down":
        left, top = (width - side) // 2, (height - side) // 2
    else:
        left, top = round((width - side) / 2), round((height - side) / 2)
    box = (left, top, left + side, top + side)
    pictures = [Image.fromarray(picture) for picture in eight_bit(images).numpy()]
    small = [np.asarray(each.resize((width, height), Image.Resampling.BICUBIC).crop(box)) for each in pictures]
    return normalised(torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255)
