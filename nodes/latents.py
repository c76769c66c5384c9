"""A LATENT as this model takes it, and the noise it begins from."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import comfy.sample
import torch
from torch import Tensor

from ..treegrpo_core.plan import derive_seed


def root_noise(noise: Any, latent: Tensor, roots: int, seed: int, prompts: Sequence[int]) -> Tensor:
    """(R, P, *latent) from the NOISE input's own generator, one seed per (prompt key, root)."""
    rows = []
    for root in range(roots):
        row = []
        for prompt, key in enumerate(prompts):
            source = copy.copy(noise)
            source.seed = derive_seed(seed, key, root)
            row.append(source.generate_noise({"samples": latent[prompt : prompt + 1]})[0])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def initial_states(sampling: Any, sigma: float, noise: Tensor, latent: Tensor) -> Tensor:
    """Noise and latent image mixed as the model's sampling object does at ``sigma``: (R, P, *latent)."""
    at_start = sigma >= float(sampling.sigma_max) * (1 - 1e-5)
    level = torch.tensor(sigma, device=latent.device)
    return torch.stack([sampling.noise_scaling(level, part.to(latent), latent, at_start) for part in noise])


def fix_latent(model: Any, latent: dict[str, Any], prompts: int) -> Tensor:
    """The LATENT's samples as (P, *latent) for this model; ValueError names the size that does not fit."""
    if latent.get("noise_mask") is not None:
        raise ValueError("latent: it carries an inpainting mask, which trees do not support; remove the mask")
    samples = latent["samples"]
    if not samples.is_nested and 0 in samples.shape[2:]:
        raise ValueError(f"latent: its size is {_size(samples)}; use an empty latent node, with a size above 0")
    samples = _fitted(model, latent)
    if samples.is_nested:
        raise ValueError("latent: it is several latents in one (film and sound), which trees do not support")
    latent_format = model.get_model_object("latent_format")
    channels, dimensions = latent_format.latent_channels, latent_format.latent_dimensions
    if samples.ndim != dimensions + 2:
        kinds = {2: "pictures", 3: "films"}
        raise ValueError(
            f"latent: it has {samples.ndim - 2} dimensions (height, width, and for films frames), but this model makes "
            f"{kinds.get(dimensions, 'latents')} of {dimensions}; use the empty latent node of its family"
        )
    if samples.shape[1] != channels:
        raise ValueError(
            f"latent: it has {samples.shape[1]} channels, this model works with {channels}; "
            "use an empty latent node or a VAE of the same model family"
        )
    if samples.shape[0] not in (1, prompts):
        raise ValueError(
            f"latent: its batch size is {samples.shape[0]}, but there are {prompts} prompts; use batch size 1 "
            "(it is repeated) or one latent per prompt"
        )
    longest = _longest_side(model)
    if max(samples.shape[-2:]) > longest:
        raise ValueError(
            f"latent: its size is {_size(samples)}, but this model goes up to {longest} x {longest}: pictures of "
            f"{8 * longest} x {8 * longest} pixels with a VAE of factor 8; use a smaller one"
        )
    if not samples.isfinite().all():
        raise ValueError("latent: it contains NaN or infinite values; look at where it comes from, or use an empty one")
    return samples.expand(prompts, *samples.shape[1:]).clone()


def _fitted(model: Any, latent: dict[str, Any]) -> Tensor:
    """The samples as core's own sampling nodes take them: an empty latent of another family becomes one of this.

    Newer cores want to know for which factors of a VAE it was made, if its node has said so.
    """
    fit = comfy.sample.fix_empty_latent_channels
    said = inspect.signature(fit).parameters.keys() & latent.keys()
    return fit(model, latent["samples"], **{name: latent[name] for name in said})


def _longest_side(model: Any) -> float:
    """Of a latent, where the model has learned a table of places, as SD3 has; infinite where it works them out."""
    network = model.get_model_object("diffusion_model")
    places = getattr(network, "pos_embed_max_size", None) if getattr(network, "pos_embed", None) is not None else None
    return places * network.patch_size if places else math.inf


def _size(samples: Tensor) -> str:
    """Width x height, and frames if it has them, in the latent's own pixels."""
    return " x ".join(str(length) for length in reversed(samples.shape[2:]))
