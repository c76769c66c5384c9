"""A node pack for benchmarks/gpu.py: how much of a model the device holds, and what an update takes there."""

from __future__ import annotations

import gc
from functools import cached_property
from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import ComfyExtension, io
from torch import nn

ROWS_ON_CPU = 1
"""Where no device's memory can be limited, this many latents with gradient "fit" into a limited update."""


def resident(patcher: Any, share: float) -> Any:
    """A clone of ``patcher`` that core loads up to ``share`` of its weights, as on a smaller device.

    Core's own loading does it, which is only told of less room: the rest of the layers wait in main memory and are
    fetched when they compute; or, where core streams weights, the pages beyond the share never stay on the device.
    """
    kind = type(patcher)

    class Partly(kind):  # type: ignore[valid-type, misc]
        def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
            room = share * self.model_size() - self.model.model_loaded_weight_memory
            return super().partially_load(device_to, min(extra_memory, max(room, 0.1)), force_patch_weights)

        def _vbar_get(self, create: bool = False) -> Any:
            pages = super()._vbar_get(create)
            if pages is not None and "fault" not in vars(pages):
                pages.fault = Faults(pages, share * self.model_size())
            return pages

    clone = patcher.clone()
    clone.__class__ = Partly
    return clone


class Faults:
    """Core's request for a place of a streamed weight on the device, refused beyond ``limit`` bytes."""

    def __init__(self, pages: Any, limit: float) -> None:
        self.whole, self.end = pages.fault, pages.base_addr + limit

    def __call__(self, address: int, size: int) -> Any:
        return None if address + size > self.end else self.whole(address, size)


class MeasureResidency(io.ComfyNode):
    """The model, on the device whole (share 1) or in part, after every model has left it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Float.Input("share")]
        return io.Schema(cls.__name__, category="measure", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, share: float) -> io.NodeOutput:
        comfy.model_management.unload_all_models()
        return io.NodeOutput(model if share >= 1 else resident(model, share))


class Device:
    """The accelerator's memory, as far as torch counts it."""

    @cached_property
    def index(self) -> int | None:
        device = comfy.model_management.get_torch_device()
        return torch.cuda.current_device() if device.type == "cuda" else None

    def start(self, allowance: float) -> int | None:
        """Count anew; with an allowance, let only so many bytes more be taken. Returns the bytes in use."""
        gc.collect()
        if self.index is None:
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)
        used = torch.cuda.memory_allocated(self.index)
        if allowance:
            total = torch.cuda.mem_get_info(self.index)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, (used + allowance) / total), self.index)
        return used

    def peak(self) -> int | None:
        """The most bytes in use since :meth:`start`, whose limit ends."""
        if self.index is None:
            return None
        torch.cuda.set_per_process_memory_fraction(1.0, self.index)
        return torch.cuda.max_memory_allocated(self.index)


DEVICE = Device()
LIMITS: list[Any] = []
"""Hooks that stand in for a limit of memory on the CPU."""


def _refuse_rows(module: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled() and len(inputs[0]) > ROWS_ON_CPU:
        raise torch.cuda.OutOfMemoryError(f"{len(inputs[0])} latents; on the CPU the limit is {ROWS_ON_CPU}")


class MeasureStart(io.ComfyNode):
    """Between rewards and update: memory is counted from here on, and limited if there is an allowance of bytes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Custom("TREE").Input("tree"), io.Model.Input("model"), io.Float.Input("allowance")]
        return io.Schema(
            cls.__name__, category="measure", inputs=inputs, outputs=[io.Custom("TREE").Output(), io.AnyType.Output()]
        )

    @classmethod
    def execute(cls, tree: Any, model: Any, allowance: float) -> io.NodeOutput:
        used = DEVICE.start(allowance)
        if used is None and allowance:
            LIMITS.append(model.model.diffusion_model.register_forward_pre_hook(_refuse_rows))
        return io.NodeOutput(tree, used)


class MeasureEnd(io.ComfyNode):
    """After the update: its peak and, in bytes, how much of the model the device holds, and of how much."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input("before"), io.Model.Input("model"), io.AnyType.Input("after")]
        return io.Schema(cls.__name__, category="measure", inputs=inputs, outputs=[], is_output_node=True)

    @classmethod
    def execute(cls, before: int | None, model: Any, after: Any) -> io.NodeOutput:
        peak = DEVICE.peak()
        while LIMITS:
            LIMITS.pop().remove()
        held, whole = model.loaded_size(), model.model_size()
        if peak is not None and getattr(model, "is_dynamic", bool)():
            peak += held - model.model.model_loaded_weight_memory  # streamed weights are not in torch's count
        return io.NodeOutput(ui={"figures": [{"before": before, "peak": peak, "held": held, "weights": whole}]})


class Extension(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [MeasureResidency, MeasureStart, MeasureEnd]


async def comfy_entrypoint() -> Extension:
    """ComfyUI's door into the pack."""
    return Extension()
