"""Names of one model family's layers in ComfyUI, diffusers and kohya's files.

A :class:`Rule` says for one layer of ComfyUI's model which layers of diffusers' model it is. All files are read through
:meth:`KeyMap.find`, which knows a layer by any of its names, with dots or with underscores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..architectures import Architecture

BLOCKS = 128
"""More blocks than any model has."""


@dataclass(frozen=True)
class Rule:
    """One layer of ComfyUI's model and the layers of diffusers' model whose rows, stacked, are its rows.

    shares: relative numbers of rows of these layers; empty: all the same. swap: where the layer has two outputs per
    input (shift and scale of a final norm), diffusers has its two halves in the other order. ``{}`` in the names of
    a template stands for the number of a block.
    """

    native: str
    diffusers: tuple[str, ...]
    shares: tuple[int, ...] = ()
    swap: bool = False
    blocks: int = BLOCKS

    def numbered(self, number: int) -> Rule:
        """The rule of one block."""
        names = tuple(name.format(number) for name in self.diffusers)
        return Rule(self.native.format(number), names, self.shares, self.swap, self.blocks)


@dataclass(frozen=True)
class Place:
    """Where a name of a file belongs: a rule, and the number of diffusers' layer in it (None: ComfyUI's own layer)."""

    rule: Rule
    part: int | None


class KeyMap:
    """All rules of a family, by ComfyUI's names and by any name.

    ``also``: rules with further names that ComfyUI's loader takes for the family's layers and that diffusers' model of
    it does not have.
    """

    def __init__(self, rules: Iterable[Rule], also: Iterable[Rule] = ()) -> None:
        numbered = list(_numbered(rules))
        self.by_native = {rule.native: rule for rule in numbered}
        self._by_flat = _by_part(numbered)
        # A name that both models have means ComfyUI's layer; where it has other rows there, the names differ.
        self._by_flat.update({flat(name): Place(rule, None) for name, rule in self.by_native.items()})
        self._also = _by_part(rule for rule in _numbered(also) if rule.native in self.by_native)

    def find(self, name: str, *, also: bool = True) -> Place | None:
        """The place of a layer, by ComfyUI's, diffusers' or (``also``) a further name, with dots or underscores."""
        return self._by_flat.get(flat(name)) or (self._also.get(flat(name)) if also else None)


def _numbered(rules: Iterable[Rule]) -> Iterator[Rule]:
    for template in rules:
        yield from map(template.numbered, range(template.blocks) if "{}" in template.native else range(1))


def _by_part(rules: Iterable[Rule]) -> dict[str, Place]:
    return {flat(name): Place(rule, part) for rule in rules for part, name in enumerate(rule.diffusers)}


def flat(name: str) -> str:
    """A layer's name as kohya's files have it."""
    return name.replace(".", "_")


@lru_cache
def key_map(architecture: Architecture) -> KeyMap:
    """The rules of a family; none for a family that diffusers does not have."""
    from .other_names import OTHER_NAMES
    from .transformer_keys import TRANSFORMERS
    from .unet_keys import unet_rules

    unet = is_unet(architecture)
    rules = unet_rules(architecture.name) if unet else TRANSFORMERS.get(architecture.name, ())
    return KeyMap(rules, OTHER_NAMES.get(architecture.name, ()))


def is_unet(architecture: Architecture) -> bool:
    """Whether diffusers calls the model a UNet."""
    return architecture.name in ("SD1.5", "SD2", "SDXL")


def kohya_name(architecture: Architecture, layer: str) -> str:
    """The layer's name in a kohya file, without its prefix.

    kohya trains Stable Diffusion 1 and 2 as diffusers' models and all others under their authors' names. Raises
    ValueError for a layer of the former that diffusers does not have.
    """
    if architecture.name not in ("SD1.5", "SD2"):
        return flat(layer)
    rule = key_map(architecture).by_native.get(layer)
    if rule is None:
        raise ValueError(f"layer {layer} of {architecture.name} has no name in kohya's files; export as comfyui")
    return flat(rule.diffusers[0])
