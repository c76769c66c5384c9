"""What an update minimises."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped loss of each edge, ``-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)``, to be minimised: (E,).

    Log-probabilities are averaged over latent dimensions, so ratios lie within about 1e-3 of 1 and clip is about 1e-4.
    """
    ratio = torch.exp(log_prob - log_prob_old)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """KL divergence of two Gaussians with equal std, averaged over latent dimensions: (N, *latent) -> (N,).

    ``std`` is that of the whole step (it includes sqrt(-dt)), so this is the true divergence of the two transitions.
    """
    return ((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)
