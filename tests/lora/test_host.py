"""ComfyUI's own loader takes the files whole (host_probe.py asks it)."""

from __future__ import annotations

import pytest
from probed import FAMILIES, Probe

from treegrpo_core.architectures import architecture_named
from treegrpo_core.lora import FORMATS, Format
from treegrpo_core.lora.programs import loaded_by

NEWER_CORES_TOO = {("Z-Image", "diffusers")}
"""What the table leaves out because not every version of ComfyUI loads it."""


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_comfyui_loads_what_the_table_says(probe: Probe, family: str, to: Format) -> None:
    report = probe.report[family][to]
    stated = "ComfyUI (and SwarmUI)" in loaded_by(architecture_named(family), to, {"LoRA"})
    loads = report["unmatched"] == 0 and not report["missing"]
    assert loads == stated or (loads and (family, to) in NEWER_CORES_TOO)
    assert report["error"] < 1e-6
