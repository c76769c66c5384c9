"""The model family of a LoRA file, from its header, the names of its layers and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from ..architectures import ARCHITECTURES, Architecture, signature_widths
from . import parts, shapes
from .endings import Format
from .keys import KeyMap, Place, is_unet, key_map

Layers = Mapping[str, Mapping[str, Tensor]]


def places(keys: KeyMap, names: Iterable[str], *, also: bool = True) -> dict[str, Place]:
    """The places of those names that the family has."""
    found = {name: keys.find(name, also=also) for name in names}
    return {name: place for name, place in found.items() if place}


def family_of(
    layers: Layers, named: Architecture | None, given: Architecture | None, format_: Format
) -> Architecture | None:
    """The family that knows all layers, by the names in the file; None if no family does.

    ``given`` and then ``named`` (what the file says of itself) decide among several; after them the form of the names
    and the shapes. Raises ValueError if it still could be two families.
    """
    by_any_name = _fitting(layers, also=True)
    told = given or named
    if told and told.name in by_any_name:
        return told
    if given:
        return None
    fitting = _fitting(layers, also=False) or by_any_name
    if format_ != "diffusers":
        fitting = _narrowed(fitting, _whole_layers, layers)
    for evidence in (shapes.consistent, _width_fits, shapes.published, shapes.same_form):
        fitting = _narrowed(fitting, evidence, layers)
    if format_ == "kohya":
        fitting = _narrowed(fitting, _as_kohya_names, layers)
    by_name = {entry.name: entry for entry in ARCHITECTURES}
    if len(fitting) > 1:
        # Those of few sizes first: that it is one of them would be the smaller coincidence.
        names = sorted(fitting, key=lambda name: len(by_name[name].widths))
        raise ValueError(
            f"its layers could be those of {' or '.join(names)}, and nothing in it says which; say it with "
            "`--architecture` of `treegrpo export` and `treegrpo inspect`"
        )
    return by_name[next(iter(fitting))] if fitting else None


def is_of_published_size(family: Architecture, layers: Layers) -> bool:
    """False if no published model of the family has these layers in these sizes; True where that is not known."""
    return family.name not in shapes.SIZES or shapes.published(family, places(key_map(family), layers), layers)


def common_rules(layers: Layers) -> KeyMap | None:
    """The rules of the families that know all layers, if the names mean the same layers in all of them."""
    fitting = _fitting(layers, also=False) or _fitting(layers, also=True)
    meanings = {tuple((place.rule.native, place.part) for place in found.values()) for found in fitting.values()}
    name = next(iter(fitting), None)
    entry = next((entry for entry in ARCHITECTURES if entry.name == name), None)
    return key_map(entry) if entry and len(meanings) == 1 else None


def no_family(layers: Layers, given: Architecture | None) -> str:
    """What to say of names that no family knows as a whole: those that the nearest one does not."""
    candidates = [given] if given else ARCHITECTURES
    nearest = max(candidates, key=lambda entry: len(places(key_map(entry), layers)))
    known = places(key_map(nearest), layers)
    unknown = sorted(name for name in layers if name not in known)
    family = f"{nearest.name} has" if known or given else "no known model family has"
    return f"{family} no layers {', '.join(unknown[:3])} ({len(unknown)} of {len(layers)} layers)"


Fitting = dict[str, dict[str, Place]]


def _fitting(layers: Layers, *, also: bool) -> Fitting:
    """The places of all layers in each family that knows them all."""
    found = {entry.name: places(key_map(entry), layers, also=also) for entry in ARCHITECTURES}
    return {name: own for name, own in found.items() if len(own) == len(layers)}


def _narrowed(fitting: Fitting, evidence: Callable[..., bool], layers: Layers) -> Fitting:
    """Those that the evidence speaks for; all of them where it speaks for none."""
    by_name = {entry.name: entry for entry in ARCHITECTURES}
    return {name: found for name, found in fitting.items() if evidence(by_name[name], found, layers)} or fitting


def _whole_layers(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    """Whether all names are ComfyUI's own."""
    return all(place.part is None for place in found.values())


def _as_kohya_names(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    """Whether kohya's trainers would call the layers so; of UNets, only SDXL has its authors' names."""
    return not is_unet(entry) or entry.name == "SDXL" or any(place.part is not None for place in found.values())


def _width_fits(entry: Architecture, found: Mapping[str, Place], layers: Layers) -> bool:
    inputs = {
        place.rule.native: layers[name][parts.A].shape[1] for name, place in found.items() if parts.A in layers[name]
    }
    return bool(set(entry.widths) & signature_widths(entry, inputs))
