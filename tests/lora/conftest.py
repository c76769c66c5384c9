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


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tmp_path_factory.mktemp("lora")
    program = Path(__file__).with_name("host_probe.py")
    done = subprocess.run(
        [sys.executable, str(program), str(comfyui_folder()), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Probe(folder, json.loads((folder / "report.json").read_text(encoding="utf-8")))
