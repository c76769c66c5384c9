"""What the source text must and must not contain, file by file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pathspec import GitIgnoreSpec

from tools.host import PACK_FILES, ROOT

HOST_MODULES = {
    "app", "comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "latent_preview",
    "node_helpers", "nodes", "server", "utils",
}  # fmt: skip
OWN_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} | {ROOT.name}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "os.execv",
    "os.execvp",
    "os.spawnv",
}
FORBIDDEN_MODULES = {"subprocess", "pip", "ensurepip"}


def shipped() -> list[Path]:
    """The pack's Python files, relative to the repository."""
    entries = [ROOT / name for name in PACK_FILES]
    files = [file for entry in entries for file in ([entry] if entry.is_file() else sorted(entry.rglob("*.py")))]
    return [file.relative_to(ROOT) for file in files if file.suffix == ".py"]


def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), str(file))


def absolute_imports(file: Path) -> Iterator[str]:
    """Top-level names of the modules imported absolutely, anywhere in the file."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


def relative_imports(file: Path) -> Iterator[tuple[str, ...]]:
    """Place in the pack, as folders and module, of everything imported relatively."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = file.parent.parts
            assert node.level <= len(folder) + 1, f"{file}:{node.lineno} climbs out of the pack"
            base = folder[: len(folder) + 1 - node.level]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((*base, *module.split(".")) for module in modules)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_there_are_shipped_files() -> None:
    assert Path("treegrpo_core/__init__.py") in shipped()


@pytest.mark.parametrize("file", shipped(), ids=str)
def test_the_pack_imports_itself_relatively(file: Path) -> None:
    own = OWN_FOLDERS - ({"nodes"} if file.parts[0] == "nodes" else set())  # there, `import nodes` is core's module
    assert not own & set(absolute_imports(file))
    assert all(place[0] in (*PACK_FILES, "__init__") for place in relative_imports(file))


@pytest.mark.parametrize("file", shipped(), ids=str)
def test_only_the_nodes_import_the_host(file: Path) -> None:
    if file.parts[0] != "nodes":
        assert not HOST_MODULES & set(absolute_imports(file))


@pytest.mark.parametrize("file", [file for file in shipped() if file.parts[0] == "treegrpo_core"], ids=str)
def test_the_core_imports_no_layer_above_it(file: Path) -> None:
    assert {place[0] for place in relative_imports(file)} <= {"treegrpo_core"}


@pytest.mark.parametrize("file", shipped(), ids=str)
def test_no_shipped_file_runs_text_or_other_programs(file: Path) -> None:
    calls = {dotted(node.func) for node in ast.walk(tree(file)) if isinstance(node, ast.Call)}
    assert not FORBIDDEN_CALLS & calls
    assert not FORBIDDEN_MODULES & set(absolute_imports(file))


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in {host!r}:
    sys.modules[name] = None  # importing it raises ImportError
import treegrpo_core
heavy = {{"peft", "transformers", "diffusers", "accelerate"}} & set(sys.modules)
assert not heavy, heavy
for module in pkgutil.walk_packages(treegrpo_core.__path__, "treegrpo_core."):
    importlib.import_module(module.name)
"""


def test_the_core_imports_without_a_host_and_heavy_libraries_only_when_needed() -> None:
    program = IMPORT_EVERYTHING.format(host=sorted(HOST_MODULES))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def published(paths: list[Path]) -> list[str]:
    """Those of the paths, below the repository, that .comfyignore lets into the archive."""
    ignore = GitIgnoreSpec.from_lines((ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines())
    names = [path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts]
    return [name for name in names if not ignore.match_file(name)]


def test_the_whole_pack_is_published_and_nothing_else_but_texts() -> None:
    pack = [path for name in PACK_FILES for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.is_file()]
    assert len(published(pack)) == len([path for path in pack if "__pycache__" not in path.parts])
    rest = [path for path in ROOT.iterdir() if path.name not in PACK_FILES]
    files = [path for top in rest for path in ([top] if top.is_file() else top.glob("*"))]
    assert set(published(files)) <= {"README.md", "CHANGELOG.md", "LICENSE"}
