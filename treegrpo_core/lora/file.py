"""A LoRA file of any program, read into one form."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from torch import Tensor

from ..architectures import OTHER, Architecture
from . import parts, peft_settings
from .detect import common_rules, family_of, is_of_published_size, no_family, places
from .endings import EMBEDDINGS, MAGNITUDE, TEXT_ENCODERS, Format, kind_of_other, take_apart
from .header import named_architecture, names_another_family
from .keys import KeyMap, Rule, key_map
from .safe import read_header, read_tensors

FORMATS: tuple[Format, ...] = get_args(Format)
log = logging.getLogger("treegrpo")


@dataclass(frozen=True)
class LoraFile:
    """Adapters by ComfyUI's layer name, without ``diffusion_model.``; each a dictionary by suffix.

    LoRA: ``lora_A.weight`` (rank, in), ``lora_B.weight`` (out, rank); LoHa: ``hada_*``; LoKr: ``lokr_*``; with each,
    ``alpha`` (a scalar; without it the scale is 1) and for DoRA ``dora_scale`` (out, 1) or, per input, (1, in).
    """

    layers: dict[str, dict[str, Tensor]]
    metadata: dict[str, str]
    architecture: Architecture


@dataclass(frozen=True)
class Found:
    """A file and what else is to be said of it."""

    file: LoraFile
    path: Path
    format: Format
    text_encoder: tuple[str, ...]
    """Keys for text encoders; they are not in ``file``."""
    peft_magnitudes: bool = False
    """Whether a DoRA's magnitudes are those of PEFT, by the norms of the changed weights."""
    usual: bool = True
    """Whether all names have the prefix that programs expect in this format."""
    needs: str | None = None
    """The program that alone reads the settings in which the scale of the matrices stands (PEFT or diffusers)."""
    notes: tuple[str, ...] = ()
    """What was left out or taken for granted, a sentence each."""

    def refuse_text_encoder(self) -> None:
        """ValueError if the file has adapters for text encoders, which would be lost."""
        if self.text_encoder:
            raise ValueError(
                f"{self.path.name} also has adapters for text encoders ({len(self.text_encoder)} keys, for example "
                f"{self.text_encoder[0]}), which would be lost; use the file as it is, or leave them out on purpose "
                "with `treegrpo export --without-text-encoder`"
            )

    def refuse_other_magnitudes(self, to: Format) -> None:
        """ValueError if the file is a DoRA that programs which read the format ``to`` compute otherwise."""
        layer = next((name for name, layer in self.file.layers.items() if parts.kind(layer) == "DoRA"), None)
        if layer and self.peft_magnitudes != (to == "diffusers"):
            norms = "changed weights (PEFT)" if self.peft_magnitudes else "base weights (ComfyUI)"
            raise ValueError(
                f"{self.path.name}: layer {layer} is DoRA, its magnitudes are for the norms of the {norms}, and the "
                f"format {to} needs others, which cannot be computed without the base weights; export the DoRA from "
                f"its run, with format {to} in TreeGRPO Export"
            )


def read_lora(
    path: Path,
    *,
    architecture: Architecture | None = None,
    model_layers: Iterable[str] = (),
    without_text_encoder: bool = False,
) -> LoraFile:
    """A LoRA in any of the formats, of the family that it is found to be or that is given (OTHER: of none of them).

    ``path`` may be a folder in which PEFT saved an adapter. ``model_layers``: names of all layers of the model that it
    is for, with which files are read of models that have no entry. Raises ValueError, naming the key, for anything
    that is not understood as a whole: damaged files and pickles, numbers that are none, keys that belong to no layer;
    and for adapters of text encoders, unless they shall be left out. What is left out is logged.
    """
    found = read_any(path, architecture, model_layers)
    if not without_text_encoder:
        found.refuse_text_encoder()
    elif found.text_encoder:
        log.warning(
            "%s: %d keys for text encoders are left out (for example %s)",
            found.path.name,
            len(found.text_encoder),
            found.text_encoder[0],
        )
    for note in found.notes:
        log.warning("%s: %s", found.path.name, note)
    return found.file


def read_any(path: Path, architecture: Architecture | None = None, model_layers: Iterable[str] = ()) -> Found:
    """As :func:`read_lora`, keeping apart what belongs to text encoders."""
    path, config = peft_settings.located(path)
    tensors, header = read_tensors(path, EMBEDDINGS), read_header(path)
    text_encoder = tuple(sorted(key for key in tensors if key.startswith(TEXT_ENCODERS)))
    embeddings = sorted({key.split(".")[1] for key in tensors if key.startswith(EMBEDDINGS)})
    own = {key: value for key, value in tensors.items() if not key.startswith((*TEXT_ENCODERS, EMBEDDINGS))}
    if text_encoder and not own:
        raise ValueError(f"{path.name} has adapters for text encoders alone (for example {text_encoder[0]})")
    by_name, format_, peft_magnitudes = _by_name(path, own)
    _check_matrices(path, by_name)
    notes = [f"embeddings ({', '.join(embeddings)}) are left out; they belong to text encoders"] if embeddings else []
    try:
        settings = _settings(config, header)
        for one in settings:
            one.apply(by_name)
        if not settings and _without_scale(own, by_name):
            notes.append(
                "the names are PEFT's, and no adapter_config.json beside the file says how strong the adapter is; it "
                "is taken with scale 1"
            )
        named = named_architecture(header) or next((one.family for one in settings if one.family), None)
        if architecture is None and names_another_family(header):
            architecture = OTHER
        family, layers = _understood(by_name, format_, architecture, named, model_layers)
        if not (architecture or named or is_of_published_size(family, by_name)):
            notes.append(
                f"no published model of the family {family.name} has all these layers in these sizes; if it is for a "
                "model of another family, say so with --architecture"
            )
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    scaled = settings and any(parts.A in layer and parts.scale(layer) != 1 for layer in layers.values())
    return Found(
        LoraFile(layers, header, family),
        path,
        format_,
        text_encoder,
        peft_magnitudes,
        usual=all(pieces.usual for pieces in map(take_apart, own) if pieces),
        needs="PEFT" if config else "diffusers" if scaled else None,
        notes=tuple(notes),
    )


def _by_name(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], Format, bool]:
    """Tensors by the layer's name in the file and by suffix; the file's format; whether magnitudes are PEFT's."""
    keys = {key: take_apart(key) for key in tensors}
    _refuse_unknown(path, sorted(key for key, pieces in keys.items() if pieces is None), len(tensors))
    by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
    formats: set[Format] = set()
    for key, pieces in keys.items():
        if pieces:
            if pieces.suffix in by_name[pieces.name]:
                raise ValueError(f"{path.name}: {key} occurs a second time, under another prefix")
            formats.add(pieces.format)
            by_name[pieces.name][pieces.suffix] = tensors[key]
    magnitudes = any(MAGNITUDE in layer for layer in by_name.values())
    return dict(by_name), formats.pop() if len(formats) == 1 else "diffusers", magnitudes


def _refuse_unknown(path: Path, unknown: list[str], total: int) -> None:
    """ValueError if there are keys that are no part of an adapter which can be read, saying of what they are."""
    kinds = sorted({kind for key in unknown if (kind := kind_of_other(key))})
    if total == 0 or (len(unknown) == total and not kinds):
        raise ValueError(f"{path.name} holds no LoRA keys (first keys: {unknown[:3]})")
    if unknown:
        said = f" They are {', '.join(kinds)}; ComfyUI's Load LoRA takes most of these." if kinds else ""
        raise ValueError(
            f"{path.name} has {len(unknown)} of {total} keys that belong to no LoRA, DoRA, LoHa or LoKr, for example "
            f"{', '.join(unknown[:3])}; nothing was read.{said}"
        )


def _settings(config: Path | None, header: Mapping[str, str]) -> list[peft_settings.Settings]:
    """PEFT's settings, of the file beside the adapter and of its header; if both are there, they must agree."""
    beside = [peft_settings.from_config(config)] if config else []
    inside = peft_settings.from_header(header)
    # Of a LoKr the first has multiplied its scale into the matrices.
    return [*beside, inside] if inside and not (beside and inside.kind == "LOKR") else beside


def _without_scale(keys: Iterable[str], by_name: Mapping[str, Mapping[str, Tensor]]) -> bool:
    scaled = any(parts.ALPHA in layer for layer in by_name.values())
    return not scaled and any(key.startswith("base_model.model.") for key in keys)


def _understood(
    by_name: dict[str, dict[str, Tensor]],
    format_: Format,
    given: Architecture | None,
    named: Architecture | None,
    model_layers: Iterable[str],
) -> tuple[Architecture, dict[str, dict[str, Tensor]]]:
    """The family, and the layers by ComfyUI's names."""
    if given != OTHER:
        family = family_of(by_name, named, given, format_)
        if family:
            return family, _native_layers(by_name, key_map(family))
        if format_ != "comfyui" or given:
            raise ValueError(no_family(by_name, given))
        # ComfyUI takes any name of its own models here, also of families and variants that the table does not have.
        return named or OTHER, by_name
    own = KeyMap([Rule(name, (name,)) for name in model_layers])
    if len(places(own, by_name)) == len(by_name):
        return OTHER, _native_layers(by_name, own)
    if format_ == "comfyui":
        return OTHER, by_name
    rules = common_rules(by_name)
    if rules is None:
        raise ValueError(
            f"layer {next(iter(by_name))} has a name of another program, which does not say what layer it is in a "
            "model of no known family; use a file with ComfyUI's names (diffusion_model.…), or give the family"
        )
    return OTHER, _native_layers(by_name, rules)


def _check_matrices(path: Path, by_name: Mapping[str, dict[str, Tensor]]) -> None:
    """ValueError for a layer whose matrices are not all there, or are empty, or do not fit each other."""
    for name, layer in by_name.items():
        kind = parts.kind(layer)
        needed = next((set(names) for names in _MATRICES[kind] if set(names) <= layer.keys()), None)
        if needed is None:
            wanted = " or ".join(", ".join(names) for names in _MATRICES[kind])
            raise ValueError(f"{path.name}: layer {name} has {', '.join(sorted(layer))}, but {kind} needs {wanted}")
        shapes = {suffix: tuple(layer[suffix].shape) for suffix in sorted(needed)}
        down, up = shapes.get(parts.A, (1, 1)), shapes.get(parts.B, (1, 1))
        if any(0 in shape or len(shape) < 2 for shape in shapes.values()) or up[1] != down[0]:
            raise ValueError(f"{path.name}: layer {name} has matrices of shapes {shapes}, which are no {kind}")
        _take_magnitudes(path, name, layer)


def _take_magnitudes(path: Path, name: str, layer: dict[str, Tensor]) -> None:
    """A DoRA's magnitudes under one name and in one form."""
    suffix = next((suffix for suffix in (MAGNITUDE, parts.DORA) if suffix in layer), None)
    if suffix is None or parts.A not in layer:
        return
    try:
        values = parts.magnitudes(layer.pop(suffix), layer[parts.A], layer[parts.B], per_row=suffix == MAGNITUDE)
    except ValueError as error:
        raise ValueError(f"{path.name}: layer {name} has {error}") from None
    layer[parts.DORA] = values


_PLAIN = ((parts.A, parts.B),)
_MATRICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "LoRA": _PLAIN,
    "DoRA": _PLAIN,
    parts.PER_COLUMN: _PLAIN,
    "Tucker LoRA": _PLAIN,
    "enlarging LoRA": _PLAIN,
    "LoHa": (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),),
    "LoKr": tuple(
        (*first, *second)
        for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
    ),
}
"""The matrices that an adapter of each kind is made of, in one way or another."""


def _native_layers(by_name: dict[str, dict[str, Tensor]], keys: KeyMap) -> dict[str, dict[str, Tensor]]:
    """The layers under ComfyUI's names, in the file's order; parts of one layer become one."""
    groups: dict[Rule, dict[int | None, str]] = defaultdict(dict)
    for name, place in places(keys, by_name).items():
        group = groups[place.rule]
        if group and (place.part in group or None in (*group, place.part)):
            raise ValueError(f"layer {place.rule.native} occurs twice, once as {name}")
        group[place.part] = name
    layers: dict[str, dict[str, Tensor]] = {}
    for rule, group in groups.items():
        if rule.native in layers:
            raise ValueError(f"layer {rule.native} occurs twice, once as {next(iter(group.values()))}")
        if None in group:
            layers[rule.native] = by_name[group[None]]
        else:
            pieces = {part: by_name[name] for part, name in group.items() if part is not None}
            layers[rule.native] = parts.merge(pieces, rule)
    return layers
