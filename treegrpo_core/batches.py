"""How many latents go through the model at once, and what happens when that is too many."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
log = logging.getLogger("treegrpo")


class MicroBatches:
    """Cuts nodes (N, P, ...) into micro-batches of at most ``size`` rows, and halves ``size`` when memory runs out.

    A micro-batch holds whole nodes, node outer and prompt inner, because a host tiles P rows of conditioning along
    the batch.
    """

    def __init__(self, size: int, prompts: int) -> None:
        """ValueError if not even one node of ``prompts`` rows fits."""
        if size < prompts:
            raise ValueError(
                f"max_batch is {size}, but {prompts} prompts are sampled together; "
                f"set max_batch to at least {prompts} or encode fewer prompts per step"
            )
        self.size, self.prompts = size, prompts

    def split(self, nodes: Tensor) -> Sequence[Tensor]:
        """Parts of (N, P, ...) along N."""
        return nodes.split(self.size // nodes.shape[1])  # type: ignore[no-any-return, no-untyped-call]

    def map(self, function: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
        """Apply ``function`` (rows in, rows out) to (N, P, ...)."""

        def work() -> Tensor:
            parts = [function(part.flatten(0, 1)).unflatten(0, part.shape[:2]) for part in self.split(nodes)]
            return torch.cat(parts)

        return self.retry(work)

    def retry(self, work: Callable[[], T]) -> T:
        """``work()``, again with half the size as often as the device runs out of memory.

        The error of a single node that does not fit is passed on, with advice.
        """
        while True:
            try:
                return work()
            except torch.cuda.OutOfMemoryError as error:
                if self.size < 2 * self.prompts:
                    raise torch.cuda.OutOfMemoryError(
                        f"the device's memory does not hold even {self.prompts} latents at a time. Turn on "
                        "gradient_checkpointing in LoRAUpdate, encode fewer prompts per step, or use a smaller latent, "
                        f"a lower rank or an fp8 model ({error})"
                    ) from None
            self.size //= 2  # outside of except: the error's traceback holds what filled the memory
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning("TreeGRPO: out of memory, going on with %d latents at a time", self.size)
