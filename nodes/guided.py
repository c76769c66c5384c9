"""How we enter ComfyUI: rollout and update are samplings under the user's own guider."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import comfy.model_management
import comfy.model_patcher
import comfy.sampler_helpers
import comfy.samplers
import torch
from torch import Tensor, nn

from ..treegrpo_core.differentiable import Differentiable, make_ordinary, ordinary
from ..treegrpo_core.frozen import frozen
from ..treegrpo_core.memory import gradient_checkpointing
from ..treegrpo_core.policy import Denoiser
from ..treegrpo_core.run import Run
from ..treegrpo_core.transition import Prediction
from . import host

T = TypeVar("T")
log = logging.getLogger("treegrpo")

_COPYING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose code changes tensors in place that a gradient needs."""
_IN_PLACE = ("inplace", "in-place", "inference tensor")
"""What torch says then, one of these."""
_SWITCHES = {"in_training": True, "training_fp8_bwd": False}
"""Core's own, where it has them: model code that can be differentiated, and no backward in fp8, which core's trainer
leaves on."""


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Prompts run under inference mode, where no gradient can be taken; newer cores also want to know of training."""
    management = comfy.model_management
    before = {name: getattr(management, name) for name in _SWITCHES if hasattr(management, name)}
    try:
        for name in before:
            setattr(management, name, _SWITCHES[name])
        with torch.inference_mode(False):
            yield
    finally:
        for name, value in before.items():
            setattr(management, name, value)


def detached(value: Any) -> Any:
    """Conditioning with every tensor an ordinary one, fit to appear in a gradient's graph."""
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, list):
        return [detached(item) for item in value]
    if isinstance(getattr(value, "cond", None), torch.Tensor):
        value = copy.copy(value)
        value.cond = ordinary(value.cond)
    return ordinary(value)


class _Session(comfy.samplers.Sampler):
    """Our way in: ComfyUI loads the model, prepares conditioning and calls :meth:`sample` with the guided denoiser."""

    def __init__(
        self,
        work: Callable[[Denoiser, Any, Tensor], Any],
        *,
        trained: list[nn.Parameter] | None,
        checkpointing: bool,
        copying: bool,
    ) -> None:
        """``trained``: the weights that gradients are taken to; None: there are none."""
        self.work, self.trained, self.checkpointing, self.copying = work, trained, checkpointing, copying
        self.result: Any = None

    def sample(  # type: ignore[no-untyped-def]
        self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False
    ):
        def denoise(x: Tensor, sigma: float) -> Tensor:
            comfy.model_management.throw_exception_if_processing_interrupted()
            return model_wrap(x, torch.full((len(x),), sigma, device=x.device), **extra_args)

        with contextlib.ExitStack() as stack:
            module = model_wrap.inner_model.diffusion_model
            stack.enter_context(outside_inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.trained is not None))
            if self.trained is not None:
                make_ordinary(module)
                model_wrap.conds = detached(model_wrap.conds)
                stack.enter_context(frozen(module, self.trained, host.weights_pass_through, host.precise_forward))
            if self.checkpointing:
                stack.enter_context(gradient_checkpointing(module))
            if self.copying:
                stack.enter_context(Differentiable())
            latent = torch.zeros_like(noise) if latent_image is None else latent_image.clone()
            self.result = self.work(denoise, model_wrap.inner_model.model_sampling, latent)
        return torch.zeros_like(noise)


@dataclass(frozen=True)
class GuidedPolicy:
    """A run's policy under one guider: core's guider does conditioning and guidance for rollout and update alike.

    ``run`` is None where a model is only searched: any model, with or without LoRA.
    """

    run: Run | None
    guider: Any
    latent: Tensor
    """(P, *latent) as it comes from the LATENT input."""
    sigmas: Tensor
    prediction: Prediction
    seed: int = field(default=0)

    def use(self, work: Callable[[Denoiser], T], *, train: bool, checkpointing: bool = False) -> T:
        return self.open(lambda denoise, _sampling, _latent: work(denoise), train=train, checkpointing=checkpointing)

    def open(self, work: Callable[[Denoiser, Any, Tensor], T], *, train: bool, checkpointing: bool = False) -> T:
        """Like :meth:`use`, with the model's sampling object and the latent image as the denoiser sees it.

        A model that turns out to change tensors in place, which a backward cannot take, is run again with copies. That
        can show at any backward, so ``work`` must leave nothing behind when it fails. Raises ValueError, before
        anything is loaded, for a model spread over several devices.
        """
        host.refuse_multigpu(self.guider.model_patcher)

        def session_work(denoise: Denoiser, sampling: Any, latent: Tensor) -> T:
            if train:
                _unload_others(self.guider)
            return work(denoise, sampling, latent)

        model = self.guider.model_patcher.model
        trained = self.run.adapter.parameters() if train and self.run else None
        session = _Session(
            session_work, trained=trained, checkpointing=checkpointing, copying=train and model in _COPYING
        )
        try:
            return self._run(session)
        except RuntimeError as error:
            if not train or session.copying or not any(words in str(error).lower() for words in _IN_PLACE):
                raise
        log.info("TreeGRPO: %s changes tensors in place; updates copy them first", type(model).__name__)
        _COPYING.add(model)
        session.copying = True
        return self._run(session)

    def aside(self, work: Callable[[], T]) -> T:
        """Call ``work`` amid a sampling of this policy, as nodes run: it may load other models in place of ours."""
        with torch.inference_mode():
            result = work()
        guider = self.guider
        others = [patcher for patcher in _models_of(guider) if patcher is not guider.model_patcher]
        comfy.model_management.load_models_gpu(others)
        comfy.sampler_helpers.prepare_sampling(
            guider.model_patcher, self.latent.shape, guider.conds, guider.model_options
        )
        return result

    def _run(self, session: _Session) -> Any:
        noise = torch.zeros_like(self.latent)
        try:
            self.guider.sample(noise, self.latent, session, self.sigmas, disable_pbar=True, seed=self.seed)
        finally:
            # Core cleans up after a sampling, but not if loading models for it fails, and not these after an interrupt.
            self.guider.model_patcher.eject_model()
            for name in ("conds", "inner_model", "loaded_models"):
                self.guider.__dict__.pop(name, None)
        return session.result


def _models_of(guider: Any) -> list[comfy.model_patcher.ModelPatcher]:
    """Every model a guider holds or has loaded: some have a second one, as for the negative prompt."""
    held = [one for value in vars(guider).values() for one in (value if isinstance(value, list) else [value])]
    return [one for one in held if isinstance(one, comfy.model_patcher.ModelPatcher)]


def _unload_others(guider: Any) -> None:
    """Take VAE, text encoder and whatever else the sampling does not use off the device before a backward fills it."""
    ours = [patcher.model for patcher in _models_of(guider)]
    loaded = comfy.model_management.current_loaded_models
    keep = [entry for entry in loaded if entry.model is not None and any(entry.model.model is one for one in ours)]
    comfy.model_management.free_memory(1e30, guider.model_patcher.load_device, keep_loaded=keep)
