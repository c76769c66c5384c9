"""What is trained: a denoiser with an adapter (:mod:`.adapter`).

A denoiser is a callable ``(x, sigma) -> denoised`` with conditioning and guidance bound in, as in k-diffusion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from .transition import Prediction

T = TypeVar("T")


class Denoiser(Protocol):
    """(B, *latent) at noise level ``sigma`` -> the model's clean prediction, (B, *latent).

    B is a multiple of the prompts.
    """

    def __call__(self, x: Tensor, sigma: float) -> Tensor: ...


class Policy(Protocol):
    """A denoiser bound to prompts and guidance, ready to be used again with the very same conditioning."""

    @property
    def prediction(self) -> Prediction: ...

    def use(self, work: Callable[[Denoiser], T], *, train: bool, checkpointing: bool = False) -> T:
        """Load the model with its adapter, call ``work`` with the denoiser and return its result.

        ``checkpointing``: with ``train``, keep only the inputs of the model's blocks for the backward.
        """
        ...
