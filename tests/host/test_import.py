"""The pack as ComfyUI imports it: from a folder with any name, quickly, and without changing anything of the host."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools.host import ROOT, Server, comfyui_folder, install_pack, requirements

IMPORT_SECONDS = 0.5


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What probe_import.py found out."""
    pack = tmp_path_factory.mktemp("custom nodes") / "any name. with spaces"
    install_pack(ROOT, pack)
    command = [sys.executable, str(Path(__file__).with_name("probe_import.py")), str(comfyui_folder()), str(pack)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=pack.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pack_nodes(comfy: Server) -> dict[str, Any]:
    """The nodes that the server has from the pack."""
    module = f"custom_nodes.{comfy.pack_name}"
    return {name: info for name, info in comfy.object_info().items() if info["python_module"] == module}


def test_is_loaded_from_a_folder_with_a_random_name_with_spaces(comfy: Server) -> None:
    pattern = rf"^(?:\[INFO\])? *[\d.]+ seconds( \(IMPORT FAILED\))?: .*{re.escape(comfy.pack_name)}$"
    found = re.search(pattern, comfy.log(), re.MULTILINE)
    assert found, comfy.log()
    assert not found[1], comfy.log()
    assert pack_nodes(comfy)


def test_imports_quickly(probe: dict[str, Any]) -> None:
    """Computing time, which does not tell of what else the machine does."""
    assert 0 < probe["seconds"] <= IMPORT_SECONDS


def test_changes_no_function_of_the_host(probe: dict[str, Any]) -> None:
    assert probe["loaded"]
    assert probe["watched"] > 500  # the comparison saw core's functions
    assert probe["changed"] == []
    assert probe["replaced"] == []


def test_imports_no_heavy_library(probe: dict[str, Any]) -> None:
    assert not {"peft", "accelerate", "diffusers", "matplotlib"} & set(probe["modules"])


def test_the_nodes_module_stays_the_hosts(probe: dict[str, Any]) -> None:
    assert Path(probe["nodes_module"]).resolve() == (comfyui_folder() / "nodes.py").resolve()


def test_node_ids_do_not_clash(probe: dict[str, Any], comfy: Server) -> None:
    assert probe["nodes"]
    assert len(set(probe["nodes"])) == len(probe["nodes"])
    assert not set(probe["nodes"]) & set(probe["core_nodes"])
    assert set(probe["nodes"]) == set(pack_nodes(comfy))


def test_node_ids_are_the_methods_four_or_start_with_the_packs_name(probe: dict[str, Any]) -> None:
    of_the_method = {"TreeSampler", "RewardScorer", "TreeAdvantage", "LoRAUpdate"}
    assert all(name in of_the_method or name.startswith("TreeGRPO") for name in probe["nodes"])


def test_every_input_has_a_tooltip_and_every_node_a_description(comfy: Server) -> None:
    lacking = []
    for node, info in pack_nodes(comfy).items():
        assert info["category"].split("/")[0] == "TreeGRPO"
        lacking += [node] if not info["description"] else []
        for group in ("required", "optional"):
            for name, declared in info["input"].get(group, {}).items():
                options = declared[1] if len(declared) > 1 else {}
                lacking += [f"{node}.{name}"] if not options.get("tooltip") else []
    assert lacking == []


def core_requirements() -> list[str]:
    """What core lists, without torchaudio: it is not installed for tests."""
    return [line for line in requirements() if line != "torchaudio"]


def closure(names: list[str]) -> set[str]:
    """Normalised names of the installed distributions that these requirements bring, their dependencies included."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in names]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        needs = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        waiting += [need for need in needs if not need.marker or any(need.marker.evaluate(extra) for extra in extras)]
    return found


def pack_requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_requirements_list_nothing_that_core_brings_and_no_upper_cap() -> None:
    core = closure(core_requirements())
    for line in pack_requirements():
        requirement = Requirement(line)
        assert requirement.name not in core
        assert not [part for part in requirement.specifier if part.operator in ("<", "<=", "==", "===", "~=")]


@pytest.mark.slow
def test_installing_the_requirements_touches_no_core_package(tmp_path: Path) -> None:
    core = closure([*core_requirements(), "torch", "torchvision"])
    venv.create(tmp_path / "core", with_pip=False)
    python = next(path for path in (tmp_path / "core").glob("*/python*") if path.stem == "python")
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    for name in core:  # pip reads what is installed from these folders alone
        folder = importlib.metadata.distribution(name)._path  # type: ignore[attr-defined]
        shutil.copytree(folder, packages / folder.name)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--quiet", "--report", "-"]
    done = subprocess.run([*pip, "-r", str(ROOT / "requirements.txt")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new = {re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower() for one in json.loads(done.stdout)["install"]}
    assert new >= {Requirement(line).name for line in pack_requirements()}
    assert not new & core
