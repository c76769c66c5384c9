"""How many latents go through the model at once, and what happens when that is too many."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable

import torch

log = logging.getLogger("treegrpo")


ADVICE = (
    "Turn on gradient_checkpointing in LoRAUpdate, encode fewer prompts per step, or use a smaller latent, a lower "
    "rank or an fp8 model"
)
_FULL = ("out of memory", "not enough memory", "not enough gpu video memory", "can't allocate memory")
"""What torch says of a full memory where it has no class for it: MPS, XPU, DirectML, the CPU, and CUDA in between."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the computer had no memory left."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _FULL)


def empty_caches() -> None:
    """Give back what torch keeps for itself of every device's memory."""
    gc.collect()
    backends = (torch.cuda.is_available, torch.cuda), (torch.backends.mps.is_available, torch.mps)
    for is_available, backend in (*backends, (torch.xpu.is_available, torch.xpu)):
        if is_available():
            backend.empty_cache()


class Limits:
    """Sizes that were found to fit, by purpose, so that a memory overflows once and not at every update."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}

    def within(self, purpose: Hashable, size: int) -> int:
        """``size``, or what is known to fit if that is less."""
        return min(size, self._sizes.get(purpose, size))

    def found(self, purpose: Hashable, size: int) -> None:
        """More than ``size`` does not fit."""
        self._sizes[purpose] = size


class MicroBatches:
    """Cuts nodes into micro-batches of at most ``size`` rows, and halves ``size`` when memory runs out.

    A micro-batch holds whole nodes, node outer and prompt inner, because a host tiles P rows of conditioning along
    the batch.
    """

    def __init__(
        self,
        size: int,
        prompts: int,
        *,
        limits: Limits | None = None,
        purpose: Hashable = None,
        what: str = "latents",
        advice: str = ADVICE,
    ) -> None:
        """ValueError if not even one node of ``prompts`` rows fits. ``what`` and ``advice`` are words for messages.

        ``limits`` remembers for the next time what fits, apart for every ``purpose``.
        """
        if size < prompts:
            raise ValueError(
                f"max_batch is {size}, but {prompts} prompts are sampled together; "
                f"set max_batch to at least {prompts} or encode fewer prompts per step"
            )
        self.limits, self.purpose, self.what, self.advice = limits or Limits(), purpose, what, advice
        self.size = max(prompts, self.limits.within(purpose, size))

    def run(self, count: int, prompts: int, work: Callable[[slice], None]) -> None:
        """Call ``work`` with slices of ``count`` nodes of ``prompts`` rows each.

        ``work`` must leave nothing behind when it fails: its slice is cut in two and done again. The failure of a
        single node is passed on, with advice.
        """
        first = 0
        while first < count:
            nodes = slice(first, min(first + self.size // prompts, count))
            try:
                work(nodes)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.size < 2 * prompts:
                    raise torch.cuda.OutOfMemoryError(
                        f"the device's memory does not hold even {prompts} {self.what} at a time. "
                        f"{self.advice} ({error})"
                    ) from None
            else:
                first = nodes.stop
                continue
            self._halve()  # outside of except: the error's traceback holds what filled the memory

    def _halve(self) -> None:
        self.size //= 2
        self.limits.found(self.purpose, self.size)
        empty_caches()
        log.warning("TreeGRPO: out of memory, going on with %d %s at a time", self.size, self.what)
