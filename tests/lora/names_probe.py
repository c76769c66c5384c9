"""Run as a program: the names of ComfyUI's own loader, asked of it.

``python names_probe.py COMFYUI FOLDER`` leaves in ``FOLDER/names.json``: ``layers``, for each family the names that the
loader takes for each weight matrix of its model, as [layer of the model, first row or null, rows or null]; ``endings``,
by the name of each kind of adapter, everything that its loader looks for behind a layer's name; ``text_encoders``, the
loader's names for the layers of text encoders; and ``others``, layers of models of other families, with their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from host_probe import FAMILIES, FOLDER, built, comfy


class Asked(dict[str, torch.Tensor]):
    """A LoRA file that has none of the keys but ``present``, and remembers which it was asked for."""

    def __init__(self, present: set[str], ndim: int) -> None:
        super().__init__({key: torch.ones((1,) * ndim) for key in present})
        self.asked: set[str] = set()

    def keys(self) -> Asked:  # type: ignore[override]
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __missing__(self, key: str) -> torch.Tensor:
        self.asked.add(key)
        return torch.ones(1, 1)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def endings_of(load: Any) -> list[str]:
    """What a loader looks for behind "x", also what it only asks for once another key is there."""
    found: set[str] = set()
    waiting: list[frozenset[str]] = [frozenset()]
    while waiting:
        present = waiting.pop()
        for ndim in (2, 3, 4):
            file = Asked(set(present), ndim)
            load(file)
            new = file.asked - found
            found |= new
            waiting += [present | {key} for key in new]
    return sorted(key.removeprefix("x") for key in found)


def names_of(model: Any) -> Iterator[tuple[str, list[Any]]]:
    """Every name for a weight matrix of the model."""
    matrices = {key for key, value in model.state_dict().items() if key.endswith(".weight") and value.ndim > 1}
    for name, target in comfy.lora.model_lora_keys_unet(model, {}).items():
        key, rows = (target, None) if isinstance(target, str) else (target[0], target[1])
        if key in matrices:
            layer = key.removeprefix("diffusion_model.").removesuffix(".weight")
            yield name, [layer, *(rows[1:] if rows else (None, None))]


class TextEncoder:
    """Names of weights as in SD1.5, SDXL, SD3 and Flux."""

    def state_dict(self) -> dict[str, None]:
        clip = "text_model.encoder.layers.0.mlp.fc1.weight"
        t5 = "t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight"
        return dict.fromkeys(
            [f"clip_l.transformer.{clip}", f"clip_g.transformer.{clip}", f"clip_h.transformer.{clip}", t5]
        )


def load_rest(file: Asked) -> None:
    comfy.lora.load_lora(file, {"x": "x.weight"}, log_missing=False)


if __name__ == "__main__":
    loaders = {kind.name: kind for kind in comfy.lora.weight_adapter.adapters}
    report = {
        "layers": {family: dict(names_of(built(*settings))) for family, settings in FAMILIES.items()},
        "endings": {
            **{
                name: endings_of(lambda file, kind=kind: kind.load("x", file, None, None, set()))
                for name, kind in loaders.items()
            },
            "any": endings_of(load_rest),
        },
        "text_encoders": sorted(comfy.lora.model_lora_keys_clip(TextEncoder(), {})),
    }
    (FOLDER / "names.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
