"""What a LoRA file is, in words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from ..architectures import Architecture
from . import parts
from .file import FORMATS, Found, read_any
from .programs import loaded_by

KOHYA_HISTORY = ("ss_sd_model_name", "ss_steps", "ss_num_epochs", "ss_learning_rate", "ss_num_train_images")
"""What is shown of a file that kohya's trainer made; this pack's own history is shown whole."""


def describe(path: Path, architecture: Architecture | None = None) -> str:
    """Lines of text: family, format, kind, rank, layers, history and the programs that load the file.

    Raises ValueError, as reading does, for a file that is not understood.
    """
    found = read_any(path, architecture)
    file = found.file
    kinds = {parts.kind(layer) for layer in file.layers.values()}
    lines = {
        "file": f"{found.path.name}, {found.path.stat().st_size / 2**20:.1f} MiB, {_types(file.layers.values())}",
        "architecture": file.architecture.name,
        "format": found.format,
        "kind": ", ".join(sorted(kinds)),
        "rank": _counted(str(parts.rank(layer) or "whole matrix") for layer in file.layers.values()),
        "alpha / rank": _counted(f"{parts.scale(layer):g}" for layer in file.layers.values() if parts.A in layer),
        "targets": _targets(file.layers, file.architecture),
        **_history(file.metadata),
        "loads in": ", ".join(_loaders(found, kinds))
        or ("no program known" if found.usual else "not known; its names are another trainer's"),
    }
    if found.text_encoder:
        lines["text encoders"] = f"{len(found.text_encoder)} keys, which export leaves out only on purpose"
    for to in FORMATS:
        more = [program for program in loaded_by(file.architecture, to, kinds) if program not in _loaders(found, kinds)]
        # The command has no base weights, without which a DoRA cannot go to diffusers or come from it.
        changed = to != found.format or found.needs or not found.usual
        if changed and more and not ("DoRA" in kinds and found.peft_magnitudes != (to == "diffusers")):
            lines[f"as {to} also in"] = ", ".join(more)
    notes = list(found.notes)
    if any(_sort(name, file.architecture) == "other" for name in file.layers):
        notes.append("the programs are known for attention and MLP layers; the others of this file may be refused")
    lines["note"] = "; ".join(notes)
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {_one_line(text)}" for name, text in lines.items() if text)


def _one_line(text: str) -> str:
    """Without the control characters with which a header could forge lines or steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _loaders(found: Found, kinds: set[str]) -> list[str]:
    programs = loaded_by(found.file.architecture, found.format, kinds)
    if found.needs == "PEFT":
        return ["PEFT"]
    return [program for program in programs if found.usual and found.needs in (None, program)]


def _counted(values: Iterable[str]) -> str:
    """The one value, or each with the number of layers that have it."""
    counts = Counter(values)
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{value} ({count} layers)" for value, count in counts.most_common())


def _types(layers: Iterable[Mapping[str, Tensor]]) -> str:
    types = {
        str(value.dtype).removeprefix("torch.")
        for layer in layers
        for key, value in layer.items()
        if key != parts.ALPHA
    }
    return ", ".join(sorted(types))


def _targets(layers: Mapping[str, object], architecture: Architecture) -> str:
    """How many layers of each sort."""
    sorts = Counter(_sort(name, architecture) for name in layers)
    return ", ".join(f"{count} {sort}" for sort, count in sorts.items()) + f" of {len(layers)} layers"


def _sort(layer: str, architecture: Architecture) -> str:
    if re.fullmatch(architecture.attention, layer):
        return "attention"
    return "MLP" if re.fullmatch(architecture.mlp, layer) else "other"


def _history(header: Mapping[str, str]) -> dict[str, str]:
    title = {
        "title": header.get("modelspec.title", header.get("ss_output_name", "")),
        "date": header.get("modelspec.date", ""),
    }
    own = {
        key.removeprefix("treegrpo.").replace("_", " "): _short(value)
        for key, value in header.items()
        if key.startswith("treegrpo.") and key != "treegrpo.architecture"
    }
    kohya = {key.removeprefix("ss_").replace("_", " "): header[key] for key in KOHYA_HISTORY if key in header}
    return title | own | kohya


def _short(value: str) -> str:
    """JSON objects as ``name value`` pairs, in one line."""
    try:
        content = json.loads(value)
    except json.JSONDecodeError:
        return value
    entries = content if isinstance(content, list) else [content]
    if not all(isinstance(entry, dict) for entry in entries):
        return value
    return "; ".join(", ".join(f"{key} {item}" for key, item in entry.items() if item != "") for entry in entries)
