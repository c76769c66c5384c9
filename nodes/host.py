"""Every touch of a ComfyUI internal that may move between core versions, in one file."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.ops
import comfy.patcher_extension
import comfy.samplers
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import folder_paths
import torch
from torch import Tensor, nn

from ..treegrpo_core import frozen
from ..treegrpo_core.adapter import Adapter
from ..treegrpo_core.architectures import Architecture, architecture_of
from ..treegrpo_core.quantized import is_linear
from ..treegrpo_core.sampler import ROUNDING
from ..treegrpo_core.transition import Prediction

T = TypeVar("T")
log = logging.getLogger("treegrpo")
INJECTION = "treegrpo"
_TOLD_TO_CAST = ("comfy_cast_weights", "comfy_force_cast_weights")
"""What tells a quantized layer to compute with its weights cast to its input's type: in 0.3.75, and in newer cores."""
_CARRIED = {
    "clip_merges.txt": "sd1_tokenizer/merges.txt",
    "qwen2_merges.txt": "text_encoders/qwen25_tokenizer/merges.txt",
    "qwen2_vocab.json": "text_encoders/qwen25_tokenizer/vocab.json",
}
"""Vocabularies under the names that rewards know them by, and where they lie in core's folder ``comfy``."""
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
"""Values that say what they are; any other object may change or act without it showing."""


def runs_folder() -> Path:
    """Where runs live: ``treegrpo`` under ComfyUI's output directory."""
    return Path(folder_paths.get_output_directory()) / "treegrpo"


def loras_folder() -> Path:
    """Where LoraLoader looks first."""
    return Path(folder_paths.get_folder_paths("loras")[0])


folder_paths.add_model_folder_path("reward_models", str(Path(folder_paths.models_dir) / "reward_models"))


def reward_folders() -> list[Path]:
    """Where weights of rewards are looked for; downloads go into the first."""
    return [Path(folder) for folder in folder_paths.get_folder_paths("reward_models")]


def clip_folders() -> list[Path]:
    """Where ComfyUI keeps the towers of CLIPs."""
    known = [name for name in ("clip_vision", "text_encoders") if name in folder_paths.folder_names_and_paths]
    return [Path(folder) for name in known for folder in folder_paths.get_folder_paths(name)]


def carried_file(name: str) -> Path | None:
    """A file of that name that ComfyUI itself brings, if it does: vocabularies of CLIP and Qwen."""
    place = _CARRIED.get(name)
    path = Path(comfy.sd1_clip.__file__).parent / place if place else None
    return path if path and path.is_file() else None


def load_weights(module: nn.Module) -> None:
    """Put a reward's weights on the device.

    Core's memory management does it: it makes room first, and takes them off when another model needs the room.
    """
    patcher = vars(module).get(INJECTION)
    if patcher is None:
        patcher = comfy.model_patcher.ModelPatcher(
            module, comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
        )
        vars(module)[INJECTION] = patcher  # core holds patchers weakly; this one lives as long as the weights
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)


def stop_if_interrupted() -> None:
    """Raise core's own exception if the user has pressed cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def interruptible(work: Callable[[], T]) -> T:
    """``work()``, which waits for another computer; a cancel ends the waiting here, and what still comes is dropped."""
    outcome: list[Callable[[], T]] = []

    def run() -> None:
        try:
            value = work()
            outcome.append(lambda: value)
        except BaseException as error:
            outcome.append(partial(_raise, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.3)
        stop_if_interrupted()
    return outcome[0]()


def _raise(error: BaseException) -> Any:
    raise error


def prediction_of(patcher: Any) -> Prediction:
    """The family of kernels that fits a model's sampling object; ValueError if none does."""
    model_sampling = patcher.get_model_object("model_sampling")
    if isinstance(model_sampling, comfy.model_sampling.CONST):
        return "flow"
    if isinstance(model_sampling, comfy.model_sampling.EPS):
        return "eps"
    raise ValueError(
        f"model: its sampling type {type(model_sampling).__name__} is neither a rectified flow nor an eps- or "
        "v-prediction; "
        "TreeGRPO has no stochastic kernel for it"
    )


def architecture(patcher: Any) -> Architecture:
    """The model's family."""
    return architecture_of(parent.__name__ for parent in type(patcher.model.model_config).__mro__)


def schedule(patcher: Any, scheduler: str, steps: int) -> Tensor:
    """Sigmas (steps + 1,) of one of ComfyUI's schedulers under the model's own sampling object, ending at 0."""
    sampling = patcher.get_model_object("model_sampling")
    return comfy.samplers.calculate_sigmas(sampling, scheduler, steps).cpu()


def has_weight_patches(patcher: Any) -> bool:
    """Whether a LoRA or a merge lies on the diffusion model's weights."""
    return any(name.startswith("diffusion_model.") for name in patcher.patches)


def with_adapter(patcher: Any, adapter: Adapter) -> Any:
    """A clone of ``patcher`` in whose samplings, and nowhere else, the adapter is in the model's layers.

    The diffusion module is shared by all clones, so the adapter goes in when this clone is loaded for sampling and
    out as soon as that sampling ends, however it ends.
    """
    if patcher.get_injections(INJECTION):
        raise ValueError(
            "model: it already carries the adapter of another TreeGRPOPolicy; connect the base model, and to "
            "continue from "
            "another run export its LoRA and choose it in start_from"
        )
    clone = _resident(patcher)

    def put_in(owner: Any) -> None:
        refuse_multigpu(owner)
        with torch.inference_mode(False):
            adapter.to(owner.load_device)
            try:
                adapter.put_in(owner.model.diffusion_model)
            except BaseException:
                adapter.take_out(owner.model.diffusion_model)
                raise

    def take_out(owner: Any) -> None:
        adapter.take_out(owner.model.diffusion_model)
        adapter.leave(owner.offload_device)

    injection = comfy.patcher_extension.PatcherInjection(inject=put_in, eject=take_out)
    clone.set_injections(INJECTION, [injection])
    clone.add_callback(comfy.patcher_extension.CallbacksMP.ON_CLEANUP, lambda owner: owner.eject_model())
    clone.attachments[INJECTION] = adapter
    return clone


def _resident(patcher: Any) -> Any:
    """A clone whose weights stay on the device, also where newer cores stream those of every model.

    Streamed weights are fetched once more for the backward. They are streamed all the same if the device does not hold
    the model and half as much again for latents and the backward, if no file of core's loaders stands behind it, and if
    the file's weights are of another type than core computes with, to which it casts only streamed ones.
    """
    if not (hasattr(patcher, "is_dynamic") and patcher.is_dynamic()) or patcher.cached_patcher_init is None:
        return patcher.clone()
    fits = 1.5 * patcher.model_size() <= comfy.model_management.get_total_memory(patcher.load_device)
    cast = any(
        getattr(part, f"{name}_comfy_model_dtype", None) not in (None, weight.dtype)
        for part in patcher.model.modules()
        for name, weight in part.named_parameters(recurse=False)
    )
    return patcher.clone() if cast or not fits else patcher.get_non_dynamic_delegate()


def refuse_multigpu(patcher: Any) -> None:
    """ValueError for a model that newer cores' MultiGPU CFG Split has copied to further devices, and for such a copy.

    Core runs the copies in threads of its own, without gradient, and an adapter is on one device only.
    """
    if patcher.get_additional_models_with_key("multigpu") or getattr(patcher, "is_multigpu_base_clone", False):
        raise ValueError(
            "model: MultiGPU CFG Split has spread it over several devices, but TreeGRPO samples and trains on one; "
            "take that node out of the way from the model to the guider"
        )


def adapter_of(patcher: Any) -> Adapter | None:
    """The adapter that :func:`with_adapter` gave to this patcher or the one it was cloned from."""
    return patcher.attachments.get(INJECTION)


def weights_pass_through(layer: torch.nn.Module, x: Tensor) -> bool:
    """Whether core fetches the layer's weights anew for each call: streamed, cast, patched on the way or unpacked."""
    functions = getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None)
    # _v: its place in DynamicVRAM, whose memory another layer may be given at any time
    return bool(functions) or hasattr(layer, "_v") or frozen.weights_pass_through(layer, x)


def precise_forward(layer: torch.nn.Module) -> Callable[..., Any]:
    """The layer's forward without rounding its input to fp8 or fp4, which core does by code without a derivative.

    Quantized layers round where the hardware can multiply such numbers, unless they are told to cast their weights;
    the older ones are not asked, but round only inputs of two or three dimensions.
    """
    forward = layer.forward
    older, newer = hasattr(layer, "scale_weight"), isinstance(layer, comfy.ops.CastWeightBiasOp)
    if not is_linear(layer) or not (older or newer):
        return forward

    def call(x: Tensor) -> Tensor:
        told = {name: vars(layer)[name] for name in _TOLD_TO_CAST if name in vars(layer)}
        try:
            vars(layer).update(dict.fromkeys(_TOLD_TO_CAST, True))
            return forward(x[(None,) * (4 - x.ndim)]).view(*x.shape[:-1], -1) if older else forward(x)
        finally:
            for name in _TOLD_TO_CAST:
                del vars(layer)[name]
            vars(layer).update(told)

    return call


def free_memory(patcher: Any) -> int:
    """Bytes free on the device the model computes on."""
    return int(comfy.model_management.get_free_memory(patcher.load_device))


def warn_of_double_guidance(guider: Any) -> None:
    """CFG on top of a guidance that was distilled into the model burns pictures; it is allowed, but seldom meant."""
    config = guider.model_patcher.model.model_config.unet_config
    scales = [getattr(guider, name) for name in ("cfg", "cfg1", "cfg2") if hasattr(guider, name)]
    if config.get("guidance_embed") and any(scale != 1.0 for scale in scales):
        log.warning(
            "TreeGRPO: the guider's cfg is %s, but guidance is distilled into this model; use BasicGuider with "
            "FluxGuidance, or cfg 1",
            ", ".join(map(str, scales)),
        )


def warn_of_high_sigmas(patcher: Any, sigma: float) -> None:
    """Steps above a model's highest noise level are wasted, but allowed where the model has an answer to them."""
    highest = float(patcher.get_model_object("model_sampling").sigma_max)
    if sigma > highest * (1 + ROUNDING):
        log.warning(
            "TreeGRPO: the sigmas begin at %.4g, but this model was made for levels up to %.4g and answers as at that; "
            "use a scheduler that takes the model",
            sigma,
            highest,
        )


def plain_prompt(text: str) -> str:
    """A prompt as a reward should read it: without ComfyUI's weights, ``(fox:1.3) on blue`` -> ``fox on blue``."""
    parts = comfy.sd1_clip.token_weights(comfy.sd1_clip.escape_important(text), 1.0)
    return " ".join(comfy.sd1_clip.unescape_important("".join(part for part, _weight in parts)).split())


def encoder_settings(clip: Any) -> Hashable:
    """What an encoding depends on beside its text and the encoder; None where that cannot be told.

    That is so with hooks, with patched objects, and with another package's text encoder. Newer cores patch a plain
    value into every encoder, the data type it computes in; such values are part of what is told.
    """
    if type(clip) is not comfy.sd.CLIP or {"tokenize", "encode_from_tokens_scheduled"} & vars(clip).keys():
        return None
    patcher = clip.patcher
    if patcher.forced_hooks is not None or clip.apply_hooks_to_conds is not None:
        return None
    if not all(isinstance(value, _PLAIN) for value in patcher.object_patches.values()):
        return None
    values = repr([sorted(clip.tokenizer_options.items()), sorted(patcher.object_patches.items())])
    return patcher.patches_uuid, clip.layer_idx, clip.tokenizer, values


def prompt_rows(guider: Any) -> int:
    """Rows of conditioning a guider serves at once: one per prompt."""
    rows = {
        entry["cross_attn"].shape[0]
        for entries in guider.original_conds.values()
        for entry in entries
        if isinstance(entry.get("cross_attn"), torch.Tensor)
    }
    return max(rows, default=1)


def output_is_used(dynprompt: Any, node_id: str, slot: int) -> bool:
    """Whether output ``slot`` of ``node_id`` must be kept: in a loop, only if a node of the running graph reads it.

    Without a loop, always: the output may be cached, and another Queue may read it.
    """
    classes = {dynprompt.get_node(node)["class_type"] for node in dynprompt.all_node_ids()}
    if "TreeGRPOLoopStart" not in classes:
        return True
    return any(
        value == [node_id, slot]
        for other in dynprompt.all_node_ids()
        for value in dynprompt.get_node(other)["inputs"].values()
    )


def intermediate_device() -> torch.device:
    """Where the host keeps latents between nodes."""
    return comfy.model_management.intermediate_device()


def release_memory() -> None:
    """Give cached device memory back after a heavy stage."""
    comfy.model_management.soft_empty_cache()


def progress(total: int, node_id: str | None = None) -> Any:
    """ComfyUI's progress bar on the node that runs."""
    return comfy.utils.ProgressBar(total, node_id=node_id)


def running_prompt() -> str:
    """Id of the queued graph that runs; empty where the host does not say."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return context.prompt_id if context else ""


def server() -> Any:
    """ComfyUI's web server, or None where the nodes are used without one."""
    # Looked up, not imported: without a server running, the module does not even import.
    module = sys.modules.get("server")
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def tell_pages(event: str, data: dict[str, Any]) -> None:
    """Send a message to every open page."""
    server().send_sync(event, data)
