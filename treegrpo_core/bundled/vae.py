"""A small convolutional VAE: 3 x 64 x 64 pictures, 16 latent channels, factor 8, as SD3's latents are shaped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SCALE, SHIFT = 1.5305, 0.0609
"""SD3's latent format: the denoiser sees ``(latent - SHIFT) * SCALE``."""


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


class TinyVAE(nn.Module):
    """Pixels in and out as NCHW float in [-1, 1], the convention of ComfyUI's first-stage models.

    The per-channel mean and standard deviation of the latents are buffers, so that what the denoiser sees has zero
    mean and unit variance after SD3's own scale and shift.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, latent_channels: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, 64, 3, padding=1),
            _Residual(64),
            nn.Conv2d(64, 96, 4, stride=2, padding=1),
            _Residual(96),
            nn.Conv2d(96, 2 * latent_channels, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(latent_channels, 128, 3, padding=1),
            _Residual(128),
            _Residual(128),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 96, 3, padding=1),
            _Residual(96),
            nn.Conv2d(96, 192, 1),
            nn.PixelShuffle(2),
            nn.SiLU(),
            nn.Conv2d(48, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )
        self.register_buffer("latent_mean", torch.zeros(latent_channels, 1, 1))
        self.register_buffer("latent_std", torch.ones(latent_channels, 1, 1))

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of q(latent | pixels), each (N, 16, H/8, W/8), before normalisation."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        return mean, log_variance.clamp(-10, 2)

    def encode(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) in [-1, 1] -> (N, 16, H/8, W/8): the posterior mean, in SD3's latent scale."""
        mean, _ = self.posterior(pixels)
        return (mean - self.latent_mean) / self.latent_std / SCALE + SHIFT

    def decode(self, latent: Tensor) -> Tensor:
        """(N, 16, H, W) -> (N, 3, 8H, 8W), about [-1, 1] (not clamped)."""
        return self.decoder((latent - SHIFT) * SCALE * self.latent_std + self.latent_mean)
