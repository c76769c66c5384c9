"""The model family of a LoRA file, from its header, the names of its layers and their widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..architectures import ARCHITECTURES, Architecture, signature_widths
from . import parts
from .header import named_architecture
from .keys import KeyMap, Place, flat, key_map

Layers = Mapping[str, Mapping[str, Tensor]]


def places(keys: KeyMap, names: Iterable[str]) -> dict[str, Place]:
    """The places of those names that the family has."""
    found = {name: keys.find(name) for name in names}
    return {name: place for name, place in found.items() if place}


def family_of(
    layers: Layers, header: Mapping[str, str], given: Architecture | None, *, of_diffusers: bool
) -> Architecture | None:
    """The family that knows all layers, by the names in the file; None if no family does.

    ``given`` and the header decide among several; after them the form of the names (``of_diffusers``: diffusers' own)
    and the widths. Raises ValueError if it still could be two families that mean different layers by these names.
    """
    fitting = {entry.name: places(key_map(entry), layers) for entry in ARCHITECTURES if given in (None, entry)}
    fitting = {name: found for name, found in fitting.items() if len(found) == len(layers)}
    by_name = {entry.name: entry for entry in ARCHITECTURES}
    named = named_architecture(header)
    if named and named.name in fitting:
        return named
    if not of_diffusers:
        whole = {name: found for name, found in fitting.items() if all(one.part is None for one in found.values())}
        fitting = whole or fitting
    wide = {name: found for name, found in fitting.items() if _width_fits(by_name[name], found, layers)}
    fitting = wide or fitting
    if {"Flux", "Flux 2"} <= fitting.keys():
        del fitting["Flux" if _gated(layers) else "Flux 2"]
    meanings = {tuple((one.rule.native, one.part) for one in found.values()) for found in fitting.values()}
    if len(meanings) > 1:
        raise ValueError(
            f"its layers could be those of {' or '.join(fitting)}, and its header names none; say which with "
            "`treegrpo export --architecture`"
        )
    return by_name[next(iter(fitting))] if fitting else None


def no_family(layers: Layers, given: Architecture | None) -> str:
    """What to say of names that no family knows as a whole: those that the nearest one does not."""
    candidates = [given] if given else ARCHITECTURES
    nearest = max(candidates, key=lambda entry: len(places(key_map(entry), layers)))
    known = places(key_map(nearest), layers)
    unknown = sorted(name for name in layers if name not in known)
    family = f"{nearest.name} has" if known or given else "no known model family has"
    return f"{family} no layers {', '.join(unknown[:3])} ({len(unknown)} of {len(layers)} layers)"


def _width_fits(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    inputs = {
        place.rule.native: layers[name][parts.A].shape[1] for name, place in found.items() if parts.A in layers[name]
    }
    return bool(set(entry.widths) & signature_widths(entry, inputs))


def _gated(layers: Layers) -> bool:
    """Flux and Flux 2 name their layers alike, and some sizes have the same width; but Flux 2 has gated MLPs."""
    rows = {"linear1": 9, "mlp_0": 6}
    return any(
        flat(name).endswith(layer) and content[parts.B].shape[0] == times * content[parts.A].shape[1]
        for name, content in layers.items()
        for layer, times in rows.items()
        if parts.A in content
    )
