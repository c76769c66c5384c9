"""Which patches of a model trees can do with: those whose output is a function of latent and noise level alone.

Rollout and update are two samplings that ask for the same predictions in another order and in other batches. A patch
that remembers earlier evaluations, draws random numbers or treats the rows of a batch unlike each other gives the one
something else than the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batches import MicroBatches, is_out_of_memory

Predict = Callable[[Tensor, float], Tensor]
"""Noise (N, P, *latent) and a noise level -> predictions (N * P, *latent) of the model for latents of that noise."""

Predictions = tuple[Tensor, ...]
"""Some predictions, (P, *latent) each."""

PROBE_ROWS = 10
"""Rows per prompt that :func:`require_no_memory` costs, without gradient."""
TOLERANCE = 2e-3
"""How much of their size two predictions of one latent may differ by; rounding stays below."""
BATCH_TOLERANCE = 0.05
"""The same between batches of different sizes, which half precision rounds differently."""


class UnfitError(ValueError):
    """A model's predictions depend on more than latent and noise level; the message goes on after "model: "."""


@dataclass(frozen=True)
class Patch:
    """Something that hangs on a model or its guider and takes part in its evaluations."""

    place: str
    """Where it hangs, such as ``sampler_pre_cfg_function`` or ``wrappers.diffusion_model.easycache``."""
    source: str
    """Its file without the ending: of ComfyUI from its folder on, such as ``comfy_extras/nodes_apg``."""
    name: str
    """The qualified name of the function, or of the class if it is an object."""
    core: bool
    """Whether the file is ComfyUI's, torch's or this pack's."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The variables it closes over, or its attributes."""
    what: Any = field(default=None, compare=False)
    """The function or object itself."""

    @property
    def owner(self) -> str:
        """File and outermost name: the node or class it comes from."""
        return f"{self.source}.{self.name.split('.')[0]}"

    def __str__(self) -> str:
        return f"{self.source}.{self.name} ({self.place})"


@dataclass(frozen=True)
class Refusal:
    """A patch of ComfyUI's own that trees cannot be sampled or trained with."""

    node: str
    """The node that makes it, as users know it."""
    owner: str
    """See :attr:`Patch.owner`."""
    why: str
    setting: str = ""
    """The setting that decides, if one does: a variable of the patch."""
    when: str = ""
    """For which values of it the patch is refused, in words."""
    refused: Callable[[Any], bool] = bool
    """The same as a function."""
    unread: bool = True
    """Whether it is refused if the setting is not found, since a newer ComfyUI may call it otherwise."""

    def __str__(self) -> str:
        return f"{self.node} {self.when}".strip()

    def meets(self, patches: Iterable[Patch]) -> bool:
        """Whether one of these is the patch, with a value that is refused."""
        mine = [patch for patch in patches if patch.owner == self.owner]
        values = [patch.settings[self.setting] for patch in mine if self.setting in patch.settings]
        return any(map(self.refused, values)) if values else bool(mine) and self.unread


_CACHE = "it gives remembered predictions in place of new ones"
_TRAINED = "it gives remembered activations in place of new ones, which no gradient reaches"
_FRAMES = "it takes the rows of a batch for the frames of a film, and here they are pictures of their own"
_ONE = "it takes one latent at a time only"
_WINDOWS = "comfy/context_windows.IndexListContextHandler"

REFUSED = (
    Refusal("EasyCache", "comfy_extras/nodes_easycache.EasyCacheHolder", _CACHE),
    Refusal("LazyCache", "comfy_extras/nodes_easycache.LazyCacheHolder", _CACHE),
    Refusal(
        "Adaptive Projected Guidance (APG)",
        "comfy_extras/nodes_apg.APG",
        "its momentum is a mean over earlier evaluations; set it to 0",
        "momentum",
        "with momentum",
    ),
    Refusal(
        "TomePatchModel",
        "comfy_extras/nodes_tomesd.TomePatchModel",
        "it merges tokens that it draws at random",
        "ratio",
        "with a ratio above 0",
    ),
    Refusal(
        "HyperTile",
        "comfy_extras/nodes_hypertile.HyperTile",
        "it draws the number of tiles at random; set swap_size to 1 or 2",
        "swap_size",
        "with swap_size above 2",
        lambda size: size > 2,
    ),
    Refusal("Flux KV Cache", "comfy_extras/nodes_flux.KV_Attn_Input", _TRAINED),
    Refusal("WanAnimate2Cache", "comfy/ldm/wan/model_animate2.PoseBranchCache", _TRAINED),
    Refusal("VideoLinearCFGGuidance", "comfy_extras/nodes_video_model.VideoLinearCFGGuidance", _FRAMES),
    Refusal("VideoTriangleCFGGuidance", "comfy_extras/nodes_video_model.VideoTriangleCFGGuidance", _FRAMES),
    Refusal("Context Windows", _WINDOWS, _FRAMES, "dim", "over dim 0", lambda dim: dim == 0),
    Refusal(
        "Context Windows",
        _WINDOWS,
        "it rearranges the sampler's noise, and trees draw their own; turn freenoise off",
        "freenoise",
        "with freenoise",
        unread=False,  # ComfyUI 0.3.75 does not have it
    ),
    Refusal(
        "TSR - Temporal Score Rescaling",
        "comfy_extras/nodes_eps.TemporalScoreRescaling",
        _ONE,
    ),
    Refusal(
        "RenormCFG",
        "comfy_extras/nodes_lumina2.RenormCFG",
        f"{_ONE}; set renorm_cfg to 0",
        "renorm_cfg",
        "with renorm_cfg above 0",
    ),
)
"""In the order of the table in docs/architectures.md."""

FINE = {
    "apg", "cfg", "chroma_radiance", "context_windows", "custom_sampler", "differential_diffusion", "eps", "flux",
    "freelunch", "fresca", "hidream_o1", "hypernetwork", "hypertile", "latent", "lt", "lumina2", "mahiro",
    "minimax_h3", "model_advanced", "model_downscale", "model_patch", "nag", "pag", "perpneg", "rope", "sag", "slg",
    "tcfg", "tomesd", "torch_compile", "triposplat", "video_model", "wan",
}  # fmt: skip
"""Files ``comfy_extras/nodes_*.py`` that were read: but for :data:`REFUSED`, what they hang on a model is a function of
its inputs, or remembers only within one evaluation."""


def refusal(patches: Sequence[Patch]) -> Refusal | None:
    """The first entry of the table that one of the patches meets."""
    return next((entry for entry in REFUSED if entry.meets(patches)), None)


def unknown(patches: Iterable[Patch]) -> list[Patch]:
    """Those of which nobody has said what they do: other packs', and files of ComfyUI that came later."""
    return [patch for patch in patches if not _known(patch)]


def _known(patch: Patch) -> bool:
    folder, _, file = patch.source.partition("/nodes_")
    return patch.core and (folder != "comfy_extras" or file in FINE)


def require_no_memory(
    use: Callable[[Callable[[Predict], Predictions]], Predictions], shape: Sequence[int], sigmas: tuple[float, float]
) -> None:
    """UnfitError if predictions of the same latents differ after different others.

    ``use`` opens a sampling and calls its argument in it; ``shape`` is (P, *latent); ``sigmas`` are two noise levels
    in falling order. The first sampling walks by steps so small that a cache takes the next latent for the one before;
    in the second, each latent that is compared comes after a batch of another size, and one of them is also compared
    alone and beside another. Costs :data:`PROBE_ROWS` rows per prompt.
    """
    draw = torch.Generator().manual_seed(0)
    start, aside, *far = torch.randn((5, *shape), generator=draw).unsqueeze(1)
    near = [math.cos(angle) * start + math.sin(angle) * aside for angle in (0, 0.03, 0.06, 0.09)]
    high, low = sigmas

    def in_small_steps(predict: Predict) -> Predictions:
        predict(near[0], high)
        first = predict(near[1], high).clone()
        predict(near[2], low)
        return first, predict(near[3], low).clone()

    def among_others(predict: Predict) -> Predictions:
        _predict_all(predict, torch.cat(far[:2]), high)
        first = predict(near[1], high).clone()
        beside = _predict_all(predict, torch.cat((far[2], near[3])), low)
        return first, predict(near[3], low).clone(), beside[shape[0] :]

    before = use(in_small_steps)
    try:
        *after, beside = use(among_others)
    except (RuntimeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise UnfitError(f"it cannot do batches of one size after another ({error})") from error
    difference = max(map(_difference, before, after))
    if difference > TOLERANCE:
        raise UnfitError(
            "its output depends on earlier evaluations or on random numbers: predictions of one latent differ by "
            f"{difference:.1e} of their size after different others"
        )
    difference = _difference(after[1], beside)
    if difference > BATCH_TOLERANCE:
        raise UnfitError(
            "its output for one latent depends on the others in the batch: predictions of it differ by "
            f"{difference:.1e} of their size"
        )


def _predict_all(predict: Predict, noise: Tensor, sigma: float) -> Tensor:
    """Predict (N, P, *latent) as one batch, or in as many as the device's memory needs."""
    parts: list[Tensor] = []
    prompts = noise.shape[1]

    def work(nodes: slice) -> None:
        parts.append(predict(noise[nodes], sigma).clone())

    MicroBatches(len(noise) * prompts, prompts).run(len(noise), prompts, work)
    return torch.cat(parts)


def _difference(one: Tensor, other: Tensor) -> float:
    """The size of the difference as a share of the first one's; 0 also where both are 0."""
    return 0.0 if torch.equal(one, other) else float((one.float() - other.float()).norm() / one.float().norm())
