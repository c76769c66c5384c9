"""What training costs in memory: known before it starts, and less of it by gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Adapter
from .differentiable import checkpointed, replaced_forward
from .plan import Plan
from .quantized import stored


def blocks(module: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: outermost members of its lists and sequences that have parts of their own."""
    found: list[nn.Module] = []

    def search(parent: nn.Module, inside: bool) -> None:
        for child in parent.children():
            group = isinstance(child, (nn.ModuleList, nn.Sequential))
            if inside and not group and any(True for _ in child.children()):
                found.append(child)
            else:
                search(child, inside or group)

    search(module, False)
    return found


@contextmanager
def gradient_checkpointing(module: nn.Module) -> Iterator[None]:
    """Inside, blocks keep only their inputs for the backward and are computed again there."""
    with replaced_forward({block: checkpointed(block.forward) for block in blocks(module)}):
        yield


@dataclass(frozen=True)
class Activations:
    """Bytes one forward keeps for its backward: as it is, and with gradient checkpointing."""

    plain: int
    checkpointed: int


def measure_activations(module: nn.Module, forward: Callable[[], Any]) -> Activations:
    """Run ``forward`` once with gradient and count what autograd keeps for a backward, but for the model's weights."""
    weights = {
        part.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers()) for part in stored(one)
    }
    seen: set[int] = set()
    kept: dict[nn.Module | None, int] = {None: 0}
    alive: list[Tensor] = []
    inputs, current = 0, None

    def pack(tensor: Tensor) -> None:  # no backward follows; a tensor kept with its own history would stay for ever
        for part in stored(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in weights | seen:
                seen.add(storage.data_ptr())
                alive.append(part.detach())  # or its place could be given to the next and that one not be counted
                kept[current] = kept.get(current, 0) + storage.nbytes()

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal inputs, current
        inputs += sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        current = block

    def leave(_block: nn.Module, _args: Any, _result: Any) -> None:
        nonlocal current
        current = None

    with ExitStack() as stack:
        for block in blocks(module):
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _unwanted))
        stack.enter_context(torch.enable_grad())
        forward()
    inner = [size for block, size in kept.items() if block is not None]
    return Activations(sum(kept.values()), kept[None] + inputs + max(inner, default=0))


def _unwanted(_: None) -> Tensor:
    raise RuntimeError("memory was measured here, and nothing was kept for a backward")


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one update, in bytes by part. ``node``: what one node of all prompts keeps in the backward."""

    weights: int
    adapter: int
    latents: int
    node: Activations

    @classmethod
    def of(cls, module: nn.Module, adapter: Adapter, plan: Plan, prompts: Tensor, node: Activations) -> Estimate:
        """prompts: (P, *latent) as the denoiser sees them. The adapter counts four times: with gradient and moments."""
        own = adapter.parameters()
        adapted = sum(parameter.nbytes for parameter in own)
        weights = sum(part.nbytes for parameter in module.parameters() for part in stored(parameter)) - adapted
        return cls(weights, 4 * adapted, plan.stored * prompts.nbytes, node)

    def fixed(self) -> int:
        return self.weights + self.adapter + self.latents

    def text(self, free: int) -> str:
        """One line for the log; ``free`` is the device's memory in bytes that is free or held by the model."""
        room = max(0, free - self.fixed())
        plain, checkpointed = (room // max(1, size) for size in (self.node.plain, self.node.checkpointed))
        plain_size, checkpointed_size = _size(self.node.plain), _size(self.node.checkpointed)
        return (
            f"memory: model {_size(self.weights)}, adapter {_size(self.adapter)}, stored latents "
            f"{_size(self.latents)}, and per node in the update {plain_size} ({checkpointed_size} with "
            f"gradient_checkpointing); of {_size(free)} that leaves room for {plain} nodes ({checkpointed})"
        )


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1000:.3g} kB"
