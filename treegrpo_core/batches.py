"""How many latents go through the model at once, and what happens when that is too many."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

log = logging.getLogger("treegrpo")


ADVICE = (
    "Turn on gradient_checkpointing in LoRAUpdate, encode fewer prompts per step, or use a smaller latent, a lower "
    "rank or an fp8 model"
)


class MicroBatches:
    """Cuts nodes into micro-batches of at most ``size`` rows, and halves ``size`` when memory runs out.

    A micro-batch holds whole nodes, node outer and prompt inner, because a host tiles P rows of conditioning along
    the batch.
    """

    def __init__(self, size: int, prompts: int, *, what: str = "latents", advice: str = ADVICE) -> None:
        """ValueError if not even one node of ``prompts`` rows fits. ``what`` and ``advice`` are words for messages."""
        if size < prompts:
            raise ValueError(
                f"max_batch is {size}, but {prompts} prompts are sampled together; "
                f"set max_batch to at least {prompts} or encode fewer prompts per step"
            )
        self.size, self.what, self.advice = size, what, advice

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
            except torch.cuda.OutOfMemoryError as error:
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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("TreeGRPO: out of memory, going on with %d %s at a time", self.size, self.what)
