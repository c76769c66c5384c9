"""Reward models: what a picture is worth. One file per reward, found by name, imported only when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

REWARDS: dict[str, str] = {
    "text_image": ".text_image:TextImageReward",
    "jpeg": ".jpeg:JpegReward",
    "background_match": ".measured:BackgroundMatch",
    "size_match": ".measured:SizeMatch",
}
"""Name of each reward -> ``module:Class``; a module that starts with a dot is in this package."""


class Reward(Protocol):
    """Anything that scores pictures against their prompts; higher is better."""

    name: str

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]; prompts: N texts. Returns (N,) float32."""
        ...


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its share in the advantage. Weight 0: scored and logged, never trained on."""

    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight of reward {self.reward.name!r} is {self.weight}: give a finite number")


def load_reward(name: str) -> Reward:
    """The reward of that name, ready to score. Raises ValueError, listing the known names, for any other name."""
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}: choose one of {', '.join(sorted(REWARDS))}")
    module, class_name = REWARDS[name].split(":")
    return getattr(import_module(module, __package__), class_name)()


def score(weighted: Sequence[WeightedReward], images: Tensor, prompts: list[str]) -> Tensor:
    """Each reward's scores of the same N pictures, unweighted: (R, N) float32 on the CPU.

    images: (N, H, W, 3) float RGB in [0, 1]; prompts: N texts. Raises ValueError if a reward does not return N
    finite numbers.
    """
    import torch

    if not weighted:
        raise ValueError("there is no reward to score with: give at least one")
    check_pictures(images, prompts)
    rows = [_checked(each.reward.name, each.reward.score(images, prompts), prompts) for each in weighted]
    return torch.stack(rows)


def check_pictures(images: Tensor, prompts: list[str]) -> None:
    """Raises ValueError unless images is (N, H, W, 3) floating point and there are N prompts."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(
            f"images have shape {tuple(images.shape)}, expected (N, H, W, 3): "
            "convert grey pictures to RGB and drop the alpha channel first"
        )
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, expected floating point in [0, 1]: divide 8-bit values by 255")
    if len(prompts) != len(images):
        raise ValueError(f"{len(images)} images but {len(prompts)} prompts: give one prompt per image")


def _checked(name: str, scores: Tensor, prompts: list[str]) -> Tensor:
    import torch

    row = torch.as_tensor(scores).detach().to("cpu", torch.float32)
    if row.shape != (len(prompts),):
        wrong = min(row.shape[0], len(prompts)) if row.ndim else 0
        raise ValueError(
            f"reward {name!r} returned scores of shape {tuple(row.shape)} for {len(prompts)} pictures (first leaf "
            "without "
            f"a match: {wrong}): it must return one number per picture"
        )
    if not row.isfinite().all():
        leaf = int((~row.isfinite()).nonzero()[0])
        raise ValueError(
            f"reward {name!r} returned {row[leaf].item()} for leaf {leaf} ({prompts[leaf]!r}): "
            "look at that picture for broken pixels, lower the learning rate, or take this reward out"
        )
    return row
