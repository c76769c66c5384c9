"""Kernels: the right marginals, one function for drawing and scoring, clear errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from treegrpo_core.transition import KERNELS, choose_kernel, ode_step, step

DATA_STD = 0.6


def gaussian_denoiser(kernel: str, x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Exact E[x0 | x] when x0 ~ N(0, DATA_STD^2): x = (1 - s) x0 + s n for flows, x = x0 + s n for the others."""
    signal = 1 - sigma if KERNELS[kernel].prediction == "flow" else 1.0
    return x * signal * DATA_STD**2 / ((signal * DATA_STD) ** 2 + sigma**2)


def marginal_std(kernel: str, sigma: float) -> float:
    signal = 1 - sigma if KERNELS[kernel].prediction == "flow" else 1.0
    return math.hypot(signal * DATA_STD, sigma)


def schedule(kernel: str, steps: int) -> list[float]:
    top, bottom = (1.0, 0.1) if KERNELS[kernel].prediction == "flow" else (8.0, 0.3)
    if KERNELS[kernel].prediction == "flow":
        return torch.linspace(top, bottom, steps + 1).tolist()
    return torch.logspace(math.log10(top), math.log10(bottom), steps + 1).tolist()


def final_error(kernel: str, steps: int) -> float:
    """Relative error of the standard deviation of 100k samples after ``steps`` stochastic steps."""
    generator = torch.Generator().manual_seed(0)
    sigmas = schedule(kernel, steps)
    x = torch.randn(100_000, 1, generator=generator) * marginal_std(kernel, sigmas[0])
    for sigma, sigma_next in itertools.pairwise(sigmas):
        noise = torch.randn(x.shape, generator=generator)
        denoised = gaussian_denoiser(kernel, x, sigma)
        x = step(kernel, x, denoised, sigma, sigma_next, eta=KERNELS[kernel].default_eta, noise=noise).child
    return abs(float(x.std()) / marginal_std(kernel, sigmas[-1]) - 1)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "ancestral"])
def test_marginal_variance_of_a_gaussian_is_kept_as_steps_shrink(kernel):
    errors = [final_error(kernel, steps) for steps in (10, 40, 400)]
    assert errors[2] < 0.01
    assert errors[2] < errors[0]


def test_cps_reaches_exactly_the_next_noise_level():
    """With the clean latent known, the noise in the child has standard deviation sigma_next, whatever eta."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.full((200_000, 1), 0.5)
    x = 0.3 * clean + 0.7 * torch.randn(clean.shape, generator=generator)
    for eta in (0.2, 0.7, 1.0):
        noise = torch.randn(clean.shape, generator=generator)
        child = step("cps", x, clean, 0.7, 0.5, eta=eta, noise=noise).child
        assert float((child - 0.5 * clean).std()) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_vanishing_eta_is_the_ode_step(kernel):
    x, denoised = torch.randn(5, 4, 2, 2), torch.randn(5, 4, 2, 2)
    drawn = step(kernel, x, denoised, 0.8, 0.6, eta=1e-4, noise=torch.zeros_like(x))
    assert torch.allclose(drawn.child, ode_step(x, denoised, 0.8, 0.6), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("sigmas", [(1.0, 0.9), (0.6, 0.5)])
def test_scoring_the_stored_child_repeats_the_log_probability_bit_for_bit(kernel, dtype, sigmas):
    generator = torch.Generator().manual_seed(1)
    x, denoised, noise = (torch.randn(6, 4, 8, 8, generator=generator).to(dtype) for _ in range(3))
    drawn = step(kernel, x, denoised, *sigmas, eta=0.7, noise=noise)
    again = step(kernel, x, denoised, *sigmas, eta=0.7, child=drawn.child)
    assert drawn.child.dtype == dtype
    assert drawn.mean.dtype == torch.float32
    assert torch.equal(drawn.log_prob, again.log_prob)
    assert drawn.log_prob.shape == (6,)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_log_probability_is_the_mean_gaussian_density(kernel):
    x, denoised, child = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    scored = step(kernel, x, denoised, 0.7, 0.6, eta=0.7, child=child)
    density = torch.distributions.Normal(scored.mean, scored.std).log_prob(child)
    assert torch.allclose(scored.log_prob, density.flatten(1).mean(1), atol=1e-5)


def test_the_first_step_of_a_flow_is_the_same_just_below_one():
    """A scheduler's rounding must not multiply the noise."""
    x = torch.randn(2, 4, 2, 2)
    exact, rounded = (step("flow_sde", x, x, sigma, 0.95, eta=0.7, child=x).std for sigma in (1.0, 0.9999999))
    assert rounded == pytest.approx(exact, rel=1e-3)


def test_exactly_one_of_noise_and_child():
    x = torch.zeros(1, 4)
    for both in ({}, {"noise": x, "child": x}):
        with pytest.raises(ValueError, match="exactly one"):
            step("flow_sde", x, x, 0.5, 0.4, eta=0.7, **both)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((0.5, 0.0, 0.7), "sigma_next > 0"),
        ((0.4, 0.5, 0.7), "0.4 -> 0.5"),
        ((0.5, 0.4, 1e-200), "has no noise from sigma 0.5 to 0.4; raise it"),
    ],
)
def test_a_step_without_noise_is_an_error(arguments, names):
    x = torch.zeros(1, 4)
    sigma, sigma_next, eta = arguments
    with pytest.raises(ValueError, match=names):
        step("flow_sde", x, x, sigma, sigma_next, eta=eta, noise=x)


@pytest.mark.parametrize("eta", [0.0, -0.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_eta_is_a_number_above_0(kernel, eta):
    x = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=f"eta: it is {eta:g}; with kernel '{kernel}' it must be a number above 0"):
        step(kernel, x, x, 0.5, 0.4, eta=eta, noise=x)


def test_cps_takes_no_eta_at_which_its_noise_would_become_less_again():
    x = torch.zeros(1, 4)
    stds = [step("cps", x, x, 0.5, 0.4, eta=eta, noise=x).std for eta in (0.5, 0.9, 0.999, 1.0)]
    assert stds == sorted(set(stds))
    assert stds[-1] == 0.4, "all noise of the child is new"
    for eta in (1.001, 1.5, 2.0, 3.0):
        with pytest.raises(ValueError, match=f"eta: it is {eta:g}; with kernel 'cps' it must .* above 0 and at most 1"):
            step("cps", x, x, 0.5, 0.4, eta=eta, noise=x)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "ancestral"])
def test_more_eta_is_never_less_noise(kernel):
    x = torch.zeros(1, 4)
    stds = [step(kernel, x, x, 0.5, 0.4, eta=eta, noise=x).std for eta in (0.3, 1.0, 1.5, 3.0, 10.0)]
    assert stds == sorted(stds)
    assert kernel != "ancestral" or stds[1] < stds[-1] == 0.4, "no more than the child's level"


def test_kernel_must_fit_the_model():
    assert choose_kernel("auto", "flow") == "flow_sde"
    assert choose_kernel("auto", "eps") == "ancestral"
    with pytest.raises(ValueError, match="'ancestral' does not fit this model, which is a rectified flow"):
        choose_kernel("ancestral", "flow")
    with pytest.raises(ValueError, match="'cps' does not fit this model, which is an eps"):
        choose_kernel("cps", "eps")
    with pytest.raises(ValueError, match="'euler' is unknown"):
        choose_kernel("euler", "flow")
