"""Run by test_fingerprint.py in a process of its own: prints fingerprints of models with fixed weights as JSON."""

from __future__ import annotations

import importlib
import json
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from benchmarks.session import PACK, load_pack  # noqa: E402

load_pack()
import comfy.lora  # noqa: E402
import comfy.quant_ops  # noqa: E402
import comfy.sd  # noqa: E402
from random_models.models import MODELS, build  # noqa: E402

ours = importlib.import_module(f"{PACK}.nodes.fingerprint")


def published(name: str) -> str:
    """The name in checkpoints, which newer cores change when they load one of Flux's family."""
    return re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", name)


def fixed(name: str, shape: torch.Size) -> torch.Tensor:
    """Values that every data type and processor has exactly, from the name in checkpoints alone."""
    if name == "norm_final.weight":
        return torch.ones(shape)
    source = torch.Generator().manual_seed(zlib.crc32(published(name).encode()))
    return torch.randint(-15, 16, shape, generator=source) / 16


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The family's reduced model with these values."""
    patcher = build(family, 0, dtype, full_size=False)
    for name, tensor in patcher.model.diffusion_model.state_dict().items():
        tensor.copy_(fixed(name, tensor.shape))
    return patcher


def changed(change: Callable[[dict[str, torch.Tensor]], Any], family: str = "Flux") -> str:
    """The fingerprint after ``change`` to the weights by name."""
    patcher = model(family)
    change(patcher.model.diffusion_model.state_dict())
    return ours.fingerprint(patcher)


def reordered(patcher: Any) -> Any:
    """The same model with its parts registered the other way round."""
    for part in patcher.model.diffusion_model.modules():
        for table in (part._modules, part._parameters):
            for name in reversed(list(table)):
                table[name] = table.pop(name)
    return patcher


def with_lora(strength: float, seed: int) -> Any:
    """The SD3 with a LoRA's patches on a layer, by core's own loader."""
    patcher, layer = model("SD3"), "joint_blocks.0.x_block.attn.proj"
    source = torch.Generator().manual_seed(seed)
    parts = {"lora_A": (1, 128), "lora_B": (128, 1)}
    lora = {f"diffusion_model.{layer}.{part}.weight": torch.randint(-8, 9, shape, generator=source) / 8
            for part, shape in parts.items()}  # fmt: skip
    return comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0.0)[0]


def quantized(form: str) -> Any:
    """The SD3 with scaled fp8 or int8 layers, as core loads a checkpoint: "scaled_fp8" is the older way to write it."""
    weights, layers = {}, {}
    for name, tensor in model("SD3").model.diffusion_model.state_dict().items():
        layer = name.removesuffix(".weight")
        if tensor.ndim != 2 or layer == name or (form == "float8_e4m3fn" and not name.startswith("joint_blocks")):
            weights[name] = tensor
            continue
        layers[layer] = {"format": form}
        stored = torch.int8 if form == "int8_tensorwise" else torch.float8_e4m3fn
        weights[name] = (tensor * 16).to(stored)
        weights[f"{layer}.scale_weight" if form == "scaled_fp8" else f"{layer}.weight_scale"] = torch.tensor(1 / 16)
    if form == "scaled_fp8":
        weights["scaled_fp8"] = torch.tensor([], dtype=torch.float8_e4m3fn)
        return comfy.sd.load_diffusion_model_state_dict(weights)
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    return comfy.sd.load_diffusion_model_state_dict(weights, metadata=metadata)


def go_on_from(earlier: str, folder: Path) -> list[Any]:
    """What TreeGRPO Policy makes of a run that is stored under an earlier fingerprint: the base before and after."""
    import folder_paths

    folder_paths.set_output_directory(str(folder))
    policy = importlib.import_module(f"{PACK}.nodes.policy")
    runs = importlib.import_module(f"{PACK}.treegrpo_core.run")
    inputs = {"rank": 2, "alpha": 2.0, "targets": "attention", "learning_rate": 1e-3, "optimizer": "adamw", "seed": 0}

    def opened() -> Any:
        policy.RUNS.clear()
        execute = policy.Policy.execute
        return (
            execute(model("Flux"), "run", **inputs, if_run_exists="continue or create", start_from="none").args[0].run
        )

    new = opened()
    new.settings = new.settings.model_copy(update={"base": earlier})
    new.save(None)
    bases = [runs.stored_base(new.folder)]
    again = opened()
    bases.append(runs.stored_base(new.folder))
    again.save(None)
    return [*bases, runs.stored_base(new.folder), opened().settings.base]


def main(folder: Path) -> dict[str, Any]:
    flux = "double_blocks.0.img_attn.qkv"
    forms = {"scaled_fp8", "float8_e4m3fn", *({"int8_tensorwise"} & comfy.quant_ops.QUANT_ALGOS.keys())}
    return {
        "families": {family: ours.fingerprint(model(family)) for family in MODELS},
        "half": ours.fingerprint(model("Flux", torch.bfloat16)),
        "earlier": {family: sorted(ours.earlier_fingerprints(model(family))) for family in MODELS},
        "reordered": ours.fingerprint(reordered(model("Flux"))),
        "one weight": changed(lambda weights: weights[f"{flux}.weight"][0, 0].add_(1)),
        "one bias": changed(lambda weights: weights[f"{flux}.bias"][0].add_(1)),
        "one gain": changed(lambda weights: next(w for name, w in weights.items() if "_norm." in name)[0].add_(1)),
        "unused": changed(lambda weights: weights.get("norm_final.weight", torch.zeros(1)).add_(1), "Z-Image"),
        "lora": [ours.fingerprint(with_lora(*how)) for how in ((1.0, 0), (1.0, 0), (0.5, 0), (1.0, 1))],
        "quantized": {form: ours.fingerprint(quantized(form)) for form in sorted(forms)},
        "quantized earlier": {form: len(ours.earlier_fingerprints(quantized(form))) for form in sorted(forms)},
        "run": go_on_from("3c815659f8c9b000a3c13948a5e17357", folder),
    }


with torch.inference_mode():
    print(json.dumps(main(Path(sys.argv[1]))))
