"""Diversity: how different the pictures of one prompt are from each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import check_pictures

SIDE = 32


class DiversityReward:
    """The mean distance of a picture to the others of the same prompt, so from 0 (all equal) to 1.

    The distance of two pictures is the root mean square of their differences in red, green and blue, after both are
    resized to 32 x 32: it sees colours and shapes, not grain. Pictures with the same prompt's text are one group (of a
    film, each frame is a picture); a picture without others has 0. Broken pictures differ most: use it with a small
    weight beside a reward that asks for a good picture.
    """

    name = "diversity"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]. Returns (N,) float32 in [0, 1]. ValueError for any other shape."""
        check_pictures(images, prompts)
        small = torch.cat([_small(image[None]) for image in images]).double()
        scores = torch.zeros(len(images))
        for prompt in set(prompts):
            group = torch.tensor([leaf for leaf, text in enumerate(prompts) if text == prompt])
            if len(group) > 1:
                # by differences: the quick way through products gives equal pictures a distance
                distance = torch.cdist(small[group], small[group], compute_mode="donot_use_mm_for_euclid_dist")
                scores[group] = (distance.sum(1) / small.shape[1] ** 0.5 / (len(group) - 1)).float()
        return scores


def _small(image: Tensor) -> Tensor:
    """(1, H, W, 3) -> (1, 3 * SIDE * SIDE) float32 on the CPU."""
    pixels = image.detach().float().clamp(0, 1).cpu().permute(0, 3, 1, 2)
    return F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True).flatten(1)
