"""What hangs on the model that a guider samples with; treegrpo_core/patches.py says whether trees can do with it."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import comfy.model_patcher
import torch
from torch import Tensor, nn

from ..treegrpo_core.patches import Patch, Predict, Predictions, UnfitError, refusal, require_no_memory, unknown
from ..treegrpo_core.policy import Denoiser
from . import latents
from .guided import GuidedPolicy

log = logging.getLogger("treegrpo")

_CORE = Path(comfy.model_patcher.__file__).resolve().parents[1]
_ROOTS = {
    **{_CORE / part: part for part in ("comfy", "comfy_api", "comfy_execution", "comfy_extras")},
    Path(torch.__file__).resolve().parent: "torch",
    Path(__file__).resolve().parents[1]: "treegrpo",
}
"""Folders whose code is known, and what they are called in :attr:`Patch.source`."""
_NO_PATCH = (str, bytes, int, float, complex, type(None), BuiltinFunctionType, torch.dtype, torch.device)

_PROBED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Patches found to remember nothing, by their id."""


def check_patches(policy: GuidedPolicy) -> None:
    """ValueError if predictions under this guider depend on more than latent and noise level.

    Patches of ComfyUI's own are known by name and cost nothing. Others are tried, once each, by
    :func:`.require_no_memory`.
    """
    patches = patches_of(policy.guider)
    known = refusal(patches)
    if known:
        raise ValueError(
            f"model: {known} is among its patches, and trees cannot do with it: {known.why}. Take it off the model "
            "that goes to the guider"
        )
    new = [patch for patch in unknown(patches) if _PROBED.get(id(_carrier(patch))) is not _carrier(patch)]
    if not new or len(policy.sigmas) < 2:  # of a schedule without steps others complain
        return
    log.info("TreeGRPO: trying whether these patches remember or draw anything: %s", _listed(new))
    try:
        _probe(policy)
    except UnfitError as error:
        raise ValueError(
            f"model: {error}. Among its patches are: {_listed(new)}. Take them off the model that goes to the guider"
        ) from error
    for patch in new:
        _remember(patch)


def suspects(guider: Any) -> str:
    """A sentence that names the patches nobody has said anything of; empty if there are none."""
    patches = unknown(patches_of(guider))
    return f" Among its patches are: {_listed(patches)}." if patches else ""


def patches_of(guider: Any) -> list[Patch]:
    """Everything on a guider, its models and its conditioning that takes part in an evaluation."""
    found = list(_leaves("guider", type(guider)))
    models = [value for value in vars(guider).values() if isinstance(value, comfy.model_patcher.ModelPatcher)]
    for model in models:
        found += _leaves("", model.model_options)
        found += _leaves("wrappers", model.wrappers)
        found += _leaves("callbacks", model.callbacks)
        found += _leaves("object_patches", model.object_patches)
        for name, injections in model.injections.items():
            found += _leaves(f"injections.{name}", [injection.inject for injection in injections])
        found += _overridden(model.model.diffusion_model)
    found += _leaves("", guider.model_options)
    for entries in guider.original_conds.values():
        for entry in entries:
            hooks = getattr(entry.get("hooks"), "hooks", ())
            found += _leaves("conditioning", [entry.get("control"), *map(vars, hooks)])
    return list({(id(patch.what), patch.owner): patch for patch in found}.values())


def _leaves(place: str, value: Any) -> Iterator[Patch]:
    """The functions and objects in nested dictionaries and lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}.{key}" if place else str(key), item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(place, item)
    elif not isinstance(value, _NO_PATCH) and not hasattr(value, "__array__"):
        yield _patch(place, value)


def _overridden(module: nn.Module) -> Iterator[Patch]:
    """Methods that were replaced on parts of a module, for all who use it, and its hooks."""
    for name, part in module.named_modules():
        place = ".".join(filter(None, ("diffusion_model", name)))
        for attribute, value in vars(part).items():
            replaced = isinstance(value, (FunctionType, MethodType, partial))
            if replaced and callable(getattr(type(part), attribute, None)):
                yield _patch(f"{place}.{attribute}", value)
        yield from _leaves(f"{place} hook", [*part._forward_hooks.values(), *part._forward_pre_hooks.values()])


def _patch(place: str, what: Any) -> Patch:
    code = _code(what)
    kind = code if inspect.isclass(code) else type(code)
    if isinstance(code, FunctionType):
        source, core = _source(code.__code__.co_filename)
        return Patch(place, source, code.__qualname__, core, _closure(code), what)
    source, core = _source(getattr(sys.modules.get(kind.__module__), "__file__", None))
    settings = {} if inspect.isclass(code) else dict(getattr(code, "__dict__", {}))
    return Patch(place, source, kind.__qualname__, core, settings, what)


def _code(what: Any) -> Any:
    """The function behind a method or a partial one; objects are themselves."""
    while isinstance(what, (partial, MethodType)):
        what = what.func if isinstance(what, partial) else what.__func__
    return what


def _carrier(patch: Patch) -> Any:
    """What stays the same from one look to the next: a method is made anew each time, its object is not."""
    return patch.what.__self__ if isinstance(patch.what, MethodType) else patch.what


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # declared, but nothing is in it yet
            continue
    return found


def _source(file: str | None) -> tuple[str, bool]:
    """See :attr:`Patch.source` and :attr:`Patch.core`; what has no file is built in."""
    if file is None:
        return "builtins", True
    path = Path(file).resolve()
    for root, name in _ROOTS.items():
        if path.is_relative_to(root):
            return "/".join((name, *path.relative_to(root).with_suffix("").parts)), True
    return "/".join(path.with_suffix("").parts[-2:]), False


def _listed(patches: list[Patch]) -> str:
    return ", ".join(sorted(set(map(str, patches))))


def _remember(patch: Patch) -> None:
    carrier = _carrier(patch)
    if getattr(type(carrier), "__weakrefoffset__", 0):  # what cannot be watched is tried again
        _PROBED[id(carrier)] = carrier


def _probe(policy: GuidedPolicy) -> None:
    """UnfitError if predictions depend on more than latent and noise level; torch's random numbers stay as they were.

    At two noise levels amid the schedule, since most patches leave out its ends.
    """

    def use(evaluate: Callable[[Predict], Predictions]) -> Predictions:
        def work(denoise: Denoiser, sampling: Any, latent: Tensor) -> Predictions:
            def predict(noise: Tensor, sigma: float) -> Tensor:
                return denoise(latents.initial_states(sampling, sigma, noise, latent).flatten(0, 1), sigma)

            return evaluate(predict)

        return policy.open(work, train=False)

    steps = len(policy.sigmas) - 1
    middle = max(steps // 2 - 1, 0)
    sigmas = float(policy.sigmas[middle]), float(policy.sigmas[min(middle + 1, steps - 1)])
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        require_no_memory(use, policy.latent.shape, sigmas)
