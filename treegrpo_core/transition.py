"""Denoising steps as Gaussians: one function draws a child in the rollout and scores it in the update.

Notation of k-diffusion: ``x`` is the noisy latent at noise level ``sigma``, ``denoised`` the model's prediction of the
clean latent, ``d = (x - denoised) / sigma`` the direction of the probability-flow ODE. In a rectified flow d is the
velocity, in an eps- or v-prediction model the noise, so one formula serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Prediction = Literal["flow", "eps"]


@dataclass(frozen=True)
class Transition:
    """N edges.

    child: (N, *latent) in the dtype of x; mean: (N, *latent) float32; std: in the same units, one number for all;
    log_prob: (N,) float32, averaged over latent dimensions.
    """

    child: Tensor
    mean: Tensor
    std: float
    log_prob: Tensor


def ode_step(x: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Deterministic Euler step, computed in float32, returned in the dtype of x. Shapes (N, *latent)."""
    wide = x.float()
    return (wide + (wide - denoised.float()) / sigma * (sigma_next - sigma)).to(x.dtype)


def extrapolated(
    denoised: Tensor, before: Tensor, sigma_before: float, sigma: float, sigma_next: float, prediction: Prediction
) -> Tensor:
    """The clean prediction that makes :func:`ode_step` one of second order: DPM-Solver++ 2M (arXiv 2211.01095).

    ``before`` is the prediction one step earlier, at ``sigma_before``. The last step, to sigma 0, stays of first order.
    """
    if sigma_next == 0:
        return denoised

    def log_snr(level: float) -> float:  # half of it
        signal = 1 - level if prediction == "flow" else 1.0
        return math.log(signal / level) if signal > 0 else -math.inf

    last, step_size = log_snr(sigma) - log_snr(sigma_before), log_snr(sigma_next) - log_snr(sigma)
    return denoised.float() + (denoised.float() - before.float()) * (step_size / last / 2)


def _flow_sde(x: Tensor, denoised: Tensor, sigma: float, sigma_next: float, eta: float) -> tuple[Tensor, float]:
    """Flow-GRPO's reverse SDE (arXiv 2505.05470, eq. 9), diffusion g = eta sqrt(s / (1 - s))."""
    dt = sigma_next - sigma
    # At s = 1 (or a rounding below it) the root diverges; there the next sigma stands inside, as in the public systems.
    g = eta * math.sqrt(sigma / (1 - (sigma_next if sigma > 1 - 1e-3 else sigma)))
    d = (x - denoised) / sigma
    mean = x * (1 + g * g * dt / (2 * sigma)) + d * (1 + g * g * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * math.sqrt(-dt)


def _dance_sde(x: Tensor, denoised: Tensor, sigma: float, sigma_next: float, eta: float) -> tuple[Tensor, float]:
    """DanceGRPO's reverse SDE (arXiv 2505.07818): constant diffusion eta."""
    dt = sigma_next - sigma
    score = -(x - (1 - sigma) * denoised) / sigma**2
    mean = x + (x - denoised) / sigma * dt - eta * eta / 2 * score * dt
    return mean, eta * math.sqrt(-dt)


def _cps(x: Tensor, denoised: Tensor, sigma: float, sigma_next: float, eta: float) -> tuple[Tensor, float]:
    """Coefficient-preserving sampling: the noise level after the step is exactly sigma_next, whatever eta in [0, 1]."""
    std = sigma_next * math.sin(eta * math.pi / 2)
    noise = x + (1 - sigma) * (x - denoised) / sigma
    mean = (1 - sigma_next) * denoised + math.sqrt(sigma_next**2 - std**2) * noise
    return mean, std


def _ancestral(x: Tensor, denoised: Tensor, sigma: float, sigma_next: float, eta: float) -> tuple[Tensor, float]:
    """DDIM with eta (DDPO, arXiv 2305.13301) in k-diffusion's parametrisation; at most all of the noise is new."""
    up = min(sigma_next, eta * math.sqrt(sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2))
    down = math.sqrt(sigma_next**2 - up**2)
    return x + (x - denoised) / sigma * (down - sigma), up


@dataclass(frozen=True)
class Kernel:
    """``moments(x, denoised, sigma, sigma_next, eta) -> (mean, std)``, the models it is valid for, its usual eta.

    ``max_eta``: above it the noise would become less again.
    """

    moments: Callable[[Tensor, Tensor, float, float, float], tuple[Tensor, float]]
    prediction: Prediction
    default_eta: float
    max_eta: float = math.inf


KERNELS: dict[str, Kernel] = {
    "flow_sde": Kernel(_flow_sde, "flow", 0.7),
    "dance_sde": Kernel(_dance_sde, "flow", 0.3),
    "cps": Kernel(_cps, "flow", 0.7, max_eta=1.0),
    "ancestral": Kernel(_ancestral, "eps", 1.0),
}

DEFAULT_KERNEL: dict[Prediction, str] = {"flow": "flow_sde", "eps": "ancestral"}


def choose_kernel(name: str, prediction: Prediction, default: str = "") -> str:
    """``name``; for "auto" the model family's ``default``, if it fits the prediction type, else that type's own.

    ValueError if the kernel does not fit the model's prediction type.
    """
    if name == "auto":
        fits = default in KERNELS and KERNELS[default].prediction == prediction
        return default if fits else DEFAULT_KERNEL[prediction]
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; use auto, {', '.join(KERNELS)}")
    if KERNELS[name].prediction != prediction:
        fitting = ", ".join(kernel for kernel, entry in KERNELS.items() if entry.prediction == prediction)
        kind = "a rectified flow" if prediction == "flow" else "an eps- or v-prediction model"
        raise ValueError(f"kernel {name!r} does not fit this model, which is {kind}; use auto or one of: {fitting}")
    return name


def check_eta(kernel: str, eta: float) -> None:
    """ValueError unless eta is a number above 0 and not above what the kernel is defined for."""
    highest = KERNELS[kernel].max_eta
    if not (math.isfinite(eta) and 0 < eta <= highest):
        upper = f" and at most {highest:g}" if math.isfinite(highest) else ""
        raise ValueError(f"eta: it is {eta:g}; with kernel {kernel!r} it must be a number above 0{upper}")


def moments(
    kernel: str, x: Tensor, denoised: Tensor, sigma: float, sigma_next: float, *, eta: float
) -> tuple[Tensor, float]:
    """Mean (N, *latent) float32 and standard deviation of the children of N nodes under a kernel."""
    if not sigma > sigma_next > 0:
        raise ValueError(f"a stochastic step needs sigma > sigma_next > 0, got {sigma} -> {sigma_next}")
    check_eta(kernel, eta)
    mean, std = KERNELS[kernel].moments(x.float(), denoised.float(), sigma, sigma_next, eta)
    if not std**2 > 0:
        raise ValueError(
            f"eta: with {eta:g}, kernel {kernel!r} has no noise from sigma {sigma} to {sigma_next}; raise it"
        )
    return mean, std


def step(
    kernel: str,
    x: Tensor,
    denoised: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    eta: float,
    noise: Tensor | None = None,
    child: Tensor | None = None,
) -> Transition:
    """One stochastic step of N nodes: draw children from ``noise``, or score the given ``child``.

    x, denoised, noise, child: (N, *latent). All arithmetic is float32. A drawn child is rounded to the dtype of x
    *before* it is scored, so that scoring the stored child again gives the very same log-probability. Exactly one of
    noise and child.
    """
    if (noise is None) == (child is None):
        raise ValueError("give exactly one of noise (draw a child) and child (score one)")
    mean, std = moments(kernel, x, denoised, sigma, sigma_next, eta=eta)
    if noise is not None:
        child = (mean + std * noise.float()).to(x.dtype)
    assert child is not None
    return Transition(child, mean, std, log_probability(child, mean, std))


def log_probability(child: Tensor, mean: Tensor, std: float) -> Tensor:
    """Gaussian log-density of N children, averaged over latent dimensions (as every public system does): (N,)."""
    density = -((child.float() - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)
