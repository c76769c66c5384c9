"""Patches as other packs make them: some remember earlier evaluations or draw random numbers, some do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.patcher_extension
import comfy.samplers
import torch
from comfy_api.latest import io

DIFFUSION_MODEL = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL


class SimilarInputs:
    """Gives what it added last to a latent that is hardly another one, as TeaCache does."""

    def __init__(self) -> None:
        self.latent: torch.Tensor | None = None
        self.added = torch.empty(0)

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        same = self.latent is not None and self.latent.shape == x.shape
        if same and (x - self.latent).abs().mean() < 0.1 * x.abs().mean():
            return x + self.added
        predicted: torch.Tensor = executor(x, *args, **kwargs)
        self.latent, self.added = x, predicted - x
        return predicted


class EverySecond:
    """Evaluates every second time only, and does not look at the size of the batch."""

    def __init__(self) -> None:
        self.count = 0
        self.added = torch.empty(0)

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count += 1
        if self.count % 2 == 0:
            return x + self.added
        predicted: torch.Tensor = executor(x, *args, **kwargs)
        self.added = predicted - x
        return predicted


def cached(model: Any) -> None:
    """A cache that lives as long as the model."""
    model.add_wrapper_with_key(DIFFUSION_MODEL, "cache", SimilarInputs())


def cached_per_sampling(model: Any) -> None:
    """A cache that is emptied when a sampling begins."""
    cache = SimilarInputs()

    def sampling(executor: Any, *args: Any, **kwargs: Any) -> Any:
        cache.latent = None
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, "cache", sampling)
    model.add_wrapper_with_key(DIFFUSION_MODEL, "cache", cache)


def every_second(model: Any) -> None:
    model.add_wrapper_with_key(DIFFUSION_MODEL, "skip", EverySecond())


def momentum(model: Any) -> None:
    before: Any = 0

    def smooth(args: dict[str, Any]) -> Any:
        nonlocal before
        fits = torch.is_tensor(before) and before.shape == args["denoised"].shape
        before = 0.5 * before + 0.5 * args["denoised"] if fits else args["denoised"]
        return before

    model.set_model_sampler_post_cfg_function(smooth)


def noise(model: Any) -> None:
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] + 0.02 * torch.randn_like(args["denoised"]))


def noise_at_the_start(model: Any) -> None:
    """Noise where sampling begins, and nowhere else."""

    def noisy(args: dict[str, Any]) -> Any:
        at_start = bool(args["sigma"][0] > 10)
        return args["denoised"] + at_start * torch.randn_like(args["denoised"])

    model.set_model_sampler_post_cfg_function(noisy)


def frames(model: Any) -> None:
    """Rows of a batch are frames of a film, which are guided more and more."""

    def scaled(args: dict[str, Any]) -> Any:
        denoised = args["denoised"]
        return denoised * torch.linspace(0.8, 1, len(denoised)).view(-1, 1, 1, 1)

    model.set_model_sampler_post_cfg_function(scaled)


def replaced_forward(model: Any) -> None:
    """The model's own method is replaced, for all who use it; nothing hangs on the patcher."""
    diffusion_model = model.model.diffusion_model
    forward, cache = diffusion_model.forward, SimilarInputs()
    diffusion_model.forward = lambda *args, **kwargs: cache(forward, *args, **kwargs)


def harmless(model: Any) -> None:
    model.set_model_sampler_post_cfg_function(lambda args: 0.9 * args["denoised"])


def drawing_for_nothing(model: Any) -> None:
    """Draws a number and does not use it."""

    def same(args: dict[str, Any]) -> Any:
        torch.rand(1)
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(same)


PATCHES: dict[str, Callable[[Any], None]] = {
    patch.__name__: patch
    for patch in (
        cached,
        cached_per_sampling,
        every_second,
        momentum,
        noise,
        noise_at_the_start,
        frames,
        replaced_forward,
        harmless,
        drawing_for_nothing,
    )
}


class TestPatch(io.ComfyNode):
    """A model with one of :data:`PATCHES`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Combo.Input("kind", options=list(PATCHES))]
        return io.Schema(node_id="TestPatch", category="test", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, kind: str) -> io.NodeOutput:
        clone = model.clone()
        PATCHES[kind](clone)
        return io.NodeOutput(clone)


class MovingGuider(comfy.samplers.CFGGuider):
    """A guider with a memory."""

    before: Any = None

    def predict_noise(self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        predicted = super().predict_noise(x, timestep, model_options or {}, seed)
        fits = self.before is not None and self.before.shape == predicted.shape
        self.before = (predicted + self.before) / 2 if fits else predicted
        return self.before


class TestMovingGuider(io.ComfyNode):
    """A :class:`MovingGuider`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]
        return io.Schema(node_id="TestMovingGuider", category="test", inputs=inputs, outputs=[io.Guider.Output()])

    @classmethod
    def execute(cls, model: Any, positive: Any, negative: Any) -> io.NodeOutput:
        guider = MovingGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(3.0)
        return io.NodeOutput(guider)
