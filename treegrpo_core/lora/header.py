"""The header of a LoRA file: what other programs read to show, sort and scale it. All values are strings."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from ..architectures import ARCHITECTURES, OTHER, Architecture, architecture_named
from . import parts

COMFYUI = "https://github.com/comfyanonymous/ComfyUI"
"""ModelSpec's name for a model whose layers are called as in ComfyUI."""


def named_architecture(header: Mapping[str, str]) -> Architecture | None:
    """The family that a header names, as this pack, ModelSpec or kohya does."""
    for entry in ARCHITECTURES:
        if header.get("treegrpo.architecture") == entry.name:
            return entry
    for key in ("modelspec.architecture", "ss_base_model_version"):
        said = header.get(key, "").lower()
        for entry in ARCHITECTURES:
            if re.match(_NAMES[entry.name], said):
                return entry
    return architecture_named("SD2") if header.get("ss_v2") == "True" else None


_NAMES = {
    "SD1.5": "stable-diffusion-v1|sd_v1",
    "SD2": "stable-diffusion-v2|sd_v2",
    "SDXL": "stable-diffusion-xl|sdxl",
    "SD3": "stable-diffusion-v?3|sd3",
    "Flux": r"flux[-_.]?1(?!\d)",
    "Flux 2": r"flux[-_.]?2(?!\d)",
    "Qwen-Image": "qwen[-_]?image",
    "Z-Image": "z[-_]?image",
    "Lumina 2": "lumina[-_]?(image-)?2",
    "Wan": "wan",
}
"""How trainers begin the names of a family's models, which go on with the version."""


def names_another_family(header: Mapping[str, str]) -> bool:
    """Whether the header names a family without an entry whose layers are called as those of one that has an entry."""
    said = (header.get(key, "").lower() for key in ("modelspec.architecture", "ss_base_model_version"))
    return any(word in text for text in said for word in _LOOKALIKES)


_LOOKALIKES = ("chroma", "hunyuan", "longcat", "omnigen", "newbie", "auraflow", "framepack")


def complete_header(
    layers: Mapping[str, Mapping[str, Tensor]],
    old: Mapping[str, str],
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    to: str,
) -> dict[str, str]:
    """``old`` (its history and title are kept) with all that depends on the weights and the format written anew."""
    header = {"ss_network_args": "{}", "modelspec.date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    header |= {key: str(value) for key, value in old.items() if key not in _FROM_CONTENT}
    header |= {"format": "pt", **_network(layers), "modelspec.sai_model_spec": "1.0.1"}
    names_of_diffusers = to == "diffusers" or (to == "kohya" and architecture.name in ("SD1.5", "SD2"))
    header["modelspec.implementation"] = "diffusers" if names_of_diffusers else COMFYUI
    if architecture != OTHER:
        header |= {
            "treegrpo.architecture": architecture.name,
            "ss_v2": str(architecture.name == "SD2"),
            "ss_base_model_version": architecture.base_version,
            "modelspec.architecture": architecture.modelspec,
            "modelspec.resolution": architecture.resolution,
        }
    if to == "diffusers":
        header["lora_adapter_metadata"] = json.dumps(_peft_settings(tensors), sort_keys=True)
    return header | _hashes(tensors, header)


_FROM_CONTENT = {
    "format",
    "lora_adapter_metadata",
    "modelspec.hash_sha256",
    "sshs_model_hash",
    "sshs_legacy_hash",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_module",
}


def _network(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Kohya's description of the network; a value that is not the same for all layers is ``Dynamic``, as in kohya's."""
    kinds = {parts.kind(layer) for layer in layers.values()}
    ranks = {parts.rank(layer) for layer in layers.values()} - {None}
    alphas = {float(layer["alpha"]) if "alpha" in layer else float(parts.rank(layer) or 1) for layer in layers.values()}
    return {
        "ss_network_module": "networks.lora" if kinds == {"LoRA"} else "lycoris.kohya",
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": str(alphas.pop()) if len(alphas) == 1 else "Dynamic",
    }


def _hashes(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """Kohya's two hashes, of the file as it would be with the ``ss_`` part of the header alone.

    ``sshs_model_hash`` is of the data behind the header, so it can be found again whatever the header says.
    """
    from safetensors.torch import save

    whole = save(dict(tensors), {key: value for key, value in header.items() if key.startswith("ss_")})
    start = 8 + int.from_bytes(whole[:8], "little")
    legacy = hashlib.sha256(whole[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return {"sshs_model_hash": hashlib.sha256(whole[start:]).hexdigest(), "sshs_legacy_hash": legacy}


def _peft_settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Peft's settings as diffusers keeps them in a file: each layer at scale 1, so alpha is the rank."""
    ranks = {key.removesuffix(f".{parts.A}"): value.shape[0] for key, value in tensors.items() if key.endswith(parts.A)}
    component = next(iter(ranks)).split(".")[0]
    usual = Counter(ranks.values()).most_common(1)[0][0]
    names = {key.removeprefix(f"{component}."): rank for key, rank in ranks.items()}
    # peft reads these keys as patterns of the end of a name; "^" makes them whole names.
    others = {f"^{re.escape(name)}": rank for name, rank in names.items() if rank != usual}
    settings = {
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(names),
        "use_dora": any("lora_magnitude_vector" in key for key in tensors),
        "lora_bias": False,
    }
    return {f"{component}.{key}": value for key, value in settings.items()}
