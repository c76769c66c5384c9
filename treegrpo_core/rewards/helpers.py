"""What several measured rewards share: pixels as pictures, numbers given as text, optional packages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from PIL import Image
from torch import Tensor

RED, GREEN, BLUE = 0.2126, 0.7152, 0.0722
"""Shares of the channels in brightness (ITU-R BT.709)."""


def pictures(images: Tensor) -> Iterator[Image.Image]:
    """(N, H, W, 3) float in [0, 1] -> N pictures of 8 bits a channel, rounded; one at a time to save memory."""
    for image in images:
        yield Image.fromarray(image.detach().float().clamp(0, 1).mul(255).round().byte().cpu().numpy())


def luma(images: Tensor) -> Tensor:
    """(N, H, W, 3) float in [0, 1] -> (N, H, W) float32 in [0, 1]: the brightness of each pixel."""
    red, green, blue = images.detach().float().clamp(0, 1).unbind(-1)
    return RED * red + GREEN * green + BLUE * blue


def wanted_number(reward: str, source: str, low: float, high: float) -> float:
    """The number in ``source``. Raises ValueError unless it is one from low to high."""
    try:
        number = float(source)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise ValueError(f"source of reward {reward!r} is {source!r}: give a number from {low:g} to {high:g}")
    return number


def optional_module(reward: str, module: str, package: str) -> Any:
    """Import a module of an optional package. ModuleNotFoundError says which package to install, and how."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"reward {reward!r} needs the package {package}, which cannot be imported ({error}): "
            f"run `python -m pip install {package}` with ComfyUI's Python and start ComfyUI again"
        ) from error
