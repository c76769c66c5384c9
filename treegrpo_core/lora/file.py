"""A LoRA file of any program: read into one form, written in each format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from ..architectures import OTHER, Architecture, architecture_from_layers
from . import parts
from .detect import family_of, no_family, places
from .header import alpha_of_diffusers, complete_header, named_architecture
from .keys import is_unet, key_map, kohya_name
from .safe import read_header, read_tensors

Format = Literal["comfyui", "kohya", "diffusers"]
FORMATS: tuple[Format, ...] = get_args(Format)

PREFIXES = {
    "diffusion_model.": "comfyui",
    "model.diffusion_model.": "comfyui",
    "lora_unet_": "kohya",
    "lora_transformer_": "kohya",
    "lycoris_": "kohya",
    "base_model.model.": "diffusers",
    "transformer.": "diffusers",
    "unet.": "diffusers",
}
"""What stands before a layer's name, and whose format that is."""
TEXT_ENCODERS = ("lora_te", "text_encoder", "lora_prior_te")

_SUFFIXES = {
    **{f".lora_{half}{ending}": f"lora_{half}.weight" for half in "AB" for ending in (".weight", ".default.weight")},
    ".lora_down.weight": parts.A,
    ".lora_up.weight": parts.B,
    ".lora_linear_layer.down.weight": parts.A,
    ".lora_linear_layer.up.weight": parts.B,
    ".lora.down.weight": parts.A,
    ".lora.up.weight": parts.B,
    "_lora.down.weight": parts.A,
    "_lora.up.weight": parts.B,
    ".lora_mid.weight": "lora_mid.weight",
    ".alpha": parts.ALPHA,
    ".dora_scale": parts.DORA,
    ".lora_magnitude_vector.weight": parts.DORA,
    ".lora_magnitude_vector": parts.DORA,
    **{f".{name}": name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")},
    **{f".lokr_w{side}{half}": f"lokr_w{side}{half}" for side in "12" for half in ("", "_a", "_b")},
    ".lokr_t2": "lokr_t2",
}
"""How a key ends, and what the tensor is."""


@dataclass(frozen=True)
class LoraFile:
    """Adapters by ComfyUI's layer name, without ``diffusion_model.``; each a dictionary by suffix.

    LoRA: ``lora_A.weight`` (rank, in), ``lora_B.weight`` (out, rank); LoHa: ``hada_*``; LoKr: ``lokr_*``; with each,
    ``alpha`` (a scalar; without it the scale is 1) and for DoRA ``dora_scale`` (out, 1) or (1, in).
    """

    layers: dict[str, dict[str, Tensor]]
    metadata: dict[str, str]
    architecture: Architecture


@dataclass(frozen=True)
class Found:
    """A file and what else was in it."""

    file: LoraFile
    format: Format
    text_encoder: tuple[str, ...]
    """Keys for text encoders; they are not in ``file``."""


def read_lora(path: Path, *, architecture: Architecture | None = None, without_text_encoder: bool = False) -> LoraFile:
    """A LoRA in any of the formats, of the family that it is found to be or that is given.

    Raises ValueError, naming the key, for anything that is not understood as a whole: damaged files and pickles,
    numbers that are none, keys that belong to no layer; and for adapters of text encoders, unless they shall be left
    out.
    """
    found = read_any(path, architecture)
    if found.text_encoder and not without_text_encoder:
        raise ValueError(
            f"{path.name} also has adapters for text encoders ({len(found.text_encoder)} keys, for example "
            f"{found.text_encoder[0]}), which would be lost; use the file as it is, or leave them out on purpose "
            "with `treegrpo export --without-text-encoder`"
        )
    return found.file


def read_any(path: Path, architecture: Architecture | None = None) -> Found:
    """As :func:`read_lora`, keeping apart what belongs to text encoders."""
    tensors, header = read_tensors(path), read_header(path)
    text_encoder = tuple(sorted(key for key in tensors if key.startswith(TEXT_ENCODERS)))
    keys = {key: _take_apart(key) for key in tensors if key not in text_encoder}
    if text_encoder and not keys:
        raise ValueError(f"{path.name} has adapters for text encoders alone (for example {text_encoder[0]})")
    if not any(keys.values()):
        raise ValueError(f"{path.name} holds no LoRA keys (first keys: {sorted(tensors)[:3]})")
    _refuse_unknown(path, [key for key, pieces in keys.items() if pieces is None], len(tensors))
    by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
    formats = set()
    for key, pieces in keys.items():
        if pieces:
            origin, name, suffix = pieces
            if suffix in by_name[name]:
                raise ValueError(f"{path.name}: {key} occurs a second time, under another prefix")
            formats.add(origin)
            by_name[name][suffix] = tensors[key]
    _check_matrices(path, by_name)
    for layer in by_name.values():
        if parts.DORA in layer and layer[parts.DORA].ndim == 1:
            layer[parts.DORA] = layer[parts.DORA][:, None]
    for name, alpha in alpha_of_diffusers(header, by_name).items():
        by_name[name][parts.ALPHA] = alpha
    format_: Format = formats.pop() if len(formats) == 1 else "diffusers"
    try:
        found = family_of(by_name, header, architecture, of_diffusers=format_ == "diffusers")
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if found:
        return Found(LoraFile(_native_layers(path, by_name, found), header, found), format_, text_encoder)
    if format_ != "comfyui" or architecture:
        raise ValueError(f"{path.name}: {no_family(by_name, architecture)}")
    # ComfyUI takes any name of its own models here, also of families and variants that the table does not have.
    inputs = {name: layer[parts.A].shape[1] for name, layer in by_name.items() if parts.A in layer}
    family = named_architecture(header) or architecture_from_layers(inputs)
    return Found(LoraFile(dict(by_name), header, family), format_, text_encoder)


def to_tensors(file: LoraFile, to: Format) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file in a format; ValueError for what that format cannot say."""
    tensors = tensors_only(file, to)
    return tensors, complete_header(file.layers, file.metadata, file.architecture, tensors, to)


def tensors_only(file: LoraFile, to: Format) -> dict[str, Tensor]:
    """The tensors of :func:`to_tensors`; hashing for the header takes time that not everyone needs to spend."""
    if to == "comfyui":
        tensors = {
            f"diffusion_model.{layer}.{suffix}": value
            for layer, content in file.layers.items()
            for suffix, value in content.items()
        }
    elif to == "kohya":
        endings = {parts.A: "lora_down.weight", parts.B: "lora_up.weight"}
        tensors = {
            f"lora_unet_{kohya_name(file.architecture, layer)}.{endings.get(suffix, suffix)}": value
            for layer, content in file.layers.items()
            for suffix, value in content.items()
        }
    elif to == "diffusers":
        tensors = _diffusers_tensors(file)
    else:
        raise ValueError(f"format {to!r} is unknown; known are {', '.join(FORMATS)}")
    return {key: value.detach().cpu().contiguous() for key, value in tensors.items()}


def write(path: Path, file: LoraFile, to: Format) -> None:
    """Write the file in one atomic step; ValueError, and no file, for what the format cannot say."""
    from safetensors.torch import save_file

    from ..files import write_atomically

    named = {"ss_output_name": path.stem, "modelspec.title": path.stem}
    tensors, metadata = to_tensors(LoraFile(file.layers, named | file.metadata, file.architecture), to)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def _diffusers_tensors(file: LoraFile) -> dict[str, Tensor]:
    rules = key_map(file.architecture).by_native
    unknown = sorted(layer for layer in file.layers if layer not in rules)
    if unknown:
        family = "this model family" if file.architecture == OTHER else file.architecture.name
        raise ValueError(
            f"diffusers' format has no name for {len(unknown)} layers of {family} ({', '.join(unknown[:3])}); "
            "export as comfyui"
        )
    prefix = "unet" if is_unet(file.architecture) else "transformer"
    tensors = {}
    for layer, content in file.layers.items():
        for name, part in parts.split(content, rules[layer], layer).items():
            for suffix, value in part.items():
                # peft's name for DoRA's magnitudes, which it keeps as a row of numbers.
                dora = suffix == parts.DORA
                ending, value = ("lora_magnitude_vector", value.flatten()) if dora else (suffix, value)
                tensors[f"{prefix}.{name}.{ending}"] = value
    return tensors


def _take_apart(key: str) -> tuple[Format, str, str] | None:
    """Format, layer's name and suffix of a key; None if it ends like no adapter."""
    suffix = next((ending for ending in _SUFFIXES if key.endswith(ending)), None)
    if suffix is None:
        return None
    name, format_ = key.removesuffix(suffix), "diffusers"
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name, format_ = name.removeprefix(prefix), PREFIXES[prefix]
    # Diffusers before peft: attn1.processor.to_out_lora.down.weight.
    if ".processor." in name:
        name = name.replace(".processor.", ".")
        name = f"{name}.0" if name.endswith(".to_out") else name
    return format_, name, _SUFFIXES[suffix]  # type: ignore[return-value]


def _refuse_unknown(path: Path, keys: list[str], total: int) -> None:
    if keys:
        raise ValueError(
            f"{path.name} has {len(keys)} of {total} keys that belong to no LoRA, for example "
            f"{', '.join(sorted(keys)[:3])}; nothing was read"
        )


def _check_matrices(path: Path, by_name: Mapping[str, Mapping[str, Tensor]]) -> None:
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


_PLAIN = ((parts.A, parts.B),)
_MATRICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "LoRA": _PLAIN,
    "DoRA": _PLAIN,
    "Tucker LoRA": _PLAIN,
    "LoHa": (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),),
    "LoKr": tuple(
        (*first, *second)
        for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
    ),
}
"""The matrices that an adapter of each kind is made of, in one way or another."""


def _native_layers(
    path: Path, by_name: dict[str, dict[str, Tensor]], architecture: Architecture
) -> dict[str, dict[str, Tensor]]:
    """The layers under ComfyUI's names, in the file's order; parts of one layer become one."""
    groups: dict[str, dict[int | None, str]] = defaultdict(dict)
    for name, place in places(key_map(architecture), by_name).items():
        group = groups[place.rule.native]
        if group and (place.part in group or None in (*group, place.part)):
            raise ValueError(f"{path.name}: layer {place.rule.native} occurs twice, once as {name}")
        group[place.part] = name
    layers = {}
    for native, group in groups.items():
        if None in group:
            layers[native] = by_name[group[None]]
        else:
            pieces = {part: by_name[name] for part, name in group.items() if part is not None}
            layers[native] = parts.merge(pieces, key_map(architecture).by_native[native])
    return layers
