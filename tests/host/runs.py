"""What is trained in a real ComfyUI, as data: tests take their cases from here, docs/architectures.md its table."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tools.host import ROOT
from treegrpo_core.architectures import ARCHITECTURES, Architecture, architecture_named

OLDER, NEWER = "0.3.75", "0.33"
GPU_RESULTS = ROOT / "benchmarks" / "gpu.json"


@dataclass(frozen=True)
class Runs:
    """Models of these families with weights held in this way."""

    weights: str
    families: tuple[str, ...]
    hosts: tuple[str, ...] = (OLDER, NEWER)
    """The versions of ComfyUI, on a CPU."""
    note: str = "yes"
    """What the table says of these."""
    section: str = ""
    """What benchmarks/gpu.json calls the same on a GPU, after the family's name."""


RUNS = (
    Runs("float32", tuple(entry.name for entry in ARCHITECTURES)),
    Runs("bfloat16", ("SDXL", "SD3", "Flux")),
    Runs("float16", ("SDXL", "SD3", "Flux")),
    Runs("fp8", ("SD3",)),
    Runs("scaled fp8, older and newer form", ("SD3",)),
    Runs("nvfp4, mxfp8, int8, int4", ("SD3",), hosts=(NEWER,)),
    Runs("GGUF (layers as ComfyUI-GGUF's)", ("SD3",)),
    Runs("float32, published size", ("SD1.5",)),
    Runs("bfloat16, published size", ("SDXL",), hosts=(OLDER,), note="slow test", section="bf16"),
    Runs("bfloat16, published size", ("SD1.5", "SD3", "Flux"), hosts=(), section="bf16"),
    Runs("fp8, published size", ("SD1.5", "SDXL", "SD3", "Flux"), hosts=(), section="fp8"),
)


def families(weights: str) -> list[Architecture]:
    """The families that are trained with such weights."""
    return [
        architecture_named(name) for runs in RUNS if runs.weights == weights and runs.hosts for name in runs.families
    ]


def table() -> str:
    """The table in docs/architectures.md: what was run in which host on what, by family."""
    lines = [
        f"| family | weights | {OLDER}, CPU | {NEWER}, CPU | GPU |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in ARCHITECTURES:
        for runs in RUNS:
            if entry.name in runs.families:
                on_cpu = [runs.note if host in runs.hosts else "-" for host in (OLDER, NEWER)]
                lines.append(f"| {entry.name} | {runs.weights} | {' | '.join(on_cpu)} | {_on_gpu(entry.name, runs)} |")
    return "\n".join(lines)


def _on_gpu(family: str, runs: Runs) -> str:
    sections = json.loads(GPU_RESULTS.read_text(encoding="utf-8"))["sections"] if GPU_RESULTS.is_file() else {}
    found = sections.get(f"{family} {runs.section}", {})
    return "yes" if "figures" in found and "failures" not in found else "not yet run on a GPU"
