"""The files of host_probe.py, made once by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from probed import Probe

from tools.host import comfyui_folder


def run_in_comfyui(program: str, folder: Path) -> None:
    """Run a program of this folder in a process of its own, with ComfyUI's folder and the one to write to."""
    path = Path(__file__).with_name(program)
    done = subprocess.run(
        [sys.executable, str(path), str(comfyui_folder()), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tmp_path_factory.mktemp("lora")
    run_in_comfyui("host_probe.py", folder)
    return Probe(folder, json.loads((folder / "report.json").read_text(encoding="utf-8")))
