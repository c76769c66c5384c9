"""What an update minimises."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, clip: float, clip_high: float | None = None
) -> Tensor:
    """PPO's clipped loss of each edge, ``-min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A)``, to be minimised.

    Log-probabilities are averaged over latent dimensions, so ratios lie within about 1e-3 of 1 and clip is about 1e-4.
    ``clip_high``: another upper limit (DAPO, arXiv 2503.14476); None: the same. All tensors and the result are (E,).
    """
    ratio = torch.exp(log_prob - log_prob_old)
    limited = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return -torch.minimum(ratio * advantage, limited * advantage)


def normalised_log_ratio(log_ratio: Tensor, mean: Tensor, mean_old: Tensor, std: float) -> Tensor:
    """GRPO-Guard's ratio (arXiv 2510.22319, eq. 8): its mean is 1, its spread that of the means alone: (E,).

    A Gaussian's log-ratio lies below 0 on average, by the divergence of the two means, and spreads with 1 / std: the
    one is added again, the other multiplied out, so that the step's noise level plays no part. mean, mean_old:
    (E, *latent); std: of the whole step.
    """
    return (log_ratio + gaussian_kl(mean, mean_old, std)) * std


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """KL divergence of two Gaussians with equal std, averaged over latent dimensions: (N, *latent) -> (N,).

    ``std`` is that of the whole step (it includes sqrt(-dt)), so this is the true divergence of the two transitions.
    """
    return ((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)
