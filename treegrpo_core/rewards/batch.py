"""Scoring many pictures a few at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor


def in_batches(count: int, size: int, work: Callable[[slice], Tensor]) -> Tensor:
    """``work`` of consecutive slices of at most ``size`` of ``count`` pictures, together: (count,) float32, CPU.

    When memory runs out, ``size`` is halved and the slice done again; the failure of a single picture is passed on.
    """
    parts: list[Tensor] = []
    first = 0
    while first < count:
        part = slice(first, min(first + size, count))
        try:
            parts.append(work(part).float().cpu())
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise
        else:
            first = part.stop
            continue
        size //= 2  # outside of except: the error's traceback holds what filled the memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return torch.cat(parts) if parts else torch.zeros(0)
