"""A reward that a server computes: pictures and prompts out, numbers back, as docs/remote_reward.md describes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import check_pictures
from .helpers import pictures
from .web import MAX_REQUEST, Endpoint, png_base64

BATCH = 16
"""Most pictures in a request."""


class RemoteReward:
    """The server's scores, unchanged. Pictures are sent as PNG files of 8 bits a channel."""

    name = "remote"
    waits = True

    def __init__(self, source: str, locate: Any = None, *, timeout: float = 120.0, wait: float = 0.5) -> None:
        """Source: the server's address. ``timeout``, ``wait``: see :class:`Endpoint`. ValueError for no address."""
        self.endpoint = Endpoint(self.name, source.strip(), timeout=timeout, wait=wait)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images: (N, H, W, 3) float RGB in [0, 1]; prompts: N texts. Returns (N,) float32. Errors: Endpoint.post."""
        check_pictures(images, prompts)
        scores = [number for batch in _batches(images, prompts) for number in self._ask(batch)]
        return torch.tensor(scores, dtype=torch.float32)

    def _ask(self, batch: list[tuple[str, str]]) -> list[float]:
        prompts, images = zip(*batch, strict=True)
        reply = self.endpoint.post({"prompts": prompts, "images": images})
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list):
            raise self.endpoint.wrong('answered without a list "scores": it must answer {"scores": [...]}')
        if len(scores) != len(batch):
            raise self.endpoint.wrong(
                f"answered with {len(scores)} scores for {len(batch)} pictures: it must give one number per picture"
            )
        for place, number in enumerate(scores):
            if type(number) not in (int, float) or not math.isfinite(number) or abs(number) > 1e30:
                raise self.endpoint.wrong(
                    f"answered with the score {str(number)[:80]!r} for picture {place} of a request "
                    f"({prompts[place]!r}): it must give finite numbers"
                )
        return scores


def _batches(images: Tensor, prompts: list[str]) -> Iterator[list[tuple[str, str]]]:
    """Prompts and pictures of one request after the other."""
    batch: list[tuple[str, str]] = []
    size = 0
    for prompt, picture in zip(prompts, pictures(images), strict=True):
        image = png_base64(picture)
        needs = len(image) + 6 * len(prompt) + 16  # JSON writes a letter as at most \uXXXX (twice beyond 16 bits)
        if batch and (len(batch) == BATCH or size + needs > MAX_REQUEST - 100):
            yield batch
            batch, size = [], 0
        batch.append((prompt, image))
        size += needs
    yield batch
