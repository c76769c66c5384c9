"""Scoring many pictures a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..batches import Limits, MicroBatches

_LIMITS: WeakKeyDictionary[nn.Module, Limits] = WeakKeyDictionary()
"""How many pictures fit, for as long as a reward's weights live."""


def in_batches(module: nn.Module, count: int, size: int, work: Callable[[slice], Tensor]) -> Tensor:
    """``work`` of consecutive slices of at most ``size`` of ``count`` pictures, together: (count,) float32, CPU.

    When memory runs out, ``size`` is halved and the slice done again, and ``module``, which does the work, gets no more
    at once from then on; the failure of a single picture is passed on.
    """
    parts: list[Tensor] = []
    advice, limits = "Use a smaller reward, or score on another computer", _LIMITS.setdefault(module, Limits())
    batches = MicroBatches(size, 1, limits=limits, what="pictures", advice=advice)
    batches.run(count, 1, lambda part: parts.append(work(part).float().cpu()))
    return torch.cat(parts) if parts else torch.zeros(0)
