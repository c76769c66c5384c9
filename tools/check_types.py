"""Run mypy over the pack as ComfyUI loads it: a package of any name, whose parts import each other relatively."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.host import CACHE, ROOT, install_pack


def main() -> int:
    """Check the pack, tools/, benchmarks/ and noxfile.py; returns mypy's exit status."""
    parent = CACHE / "types"
    shutil.rmtree(parent, ignore_errors=True)
    install_pack(ROOT, parent / "pack")
    search_path = os.pathsep.join([str(parent), str(ROOT)])
    command = [sys.executable, "-m", "mypy", "-p", "pack", "-p", "tools", "-p", "benchmarks", "-m", "noxfile"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": search_path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
