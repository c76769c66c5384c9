"""Scoring many pictures a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..batches import MicroBatches


def in_batches(count: int, size: int, work: Callable[[slice], Tensor]) -> Tensor:
    """``work`` of consecutive slices of at most ``size`` of ``count`` pictures, together: (count,) float32, CPU.

    When memory runs out, ``size`` is halved and the slice done again; the failure of a single picture is passed on.
    """
    parts: list[Tensor] = []
    batches = MicroBatches(size, 1, what="pictures", advice="Use a smaller reward, or score on another computer")
    batches.run(count, 1, lambda part: parts.append(work(part).float().cpu()))
    return torch.cat(parts) if parts else torch.zeros(0)
