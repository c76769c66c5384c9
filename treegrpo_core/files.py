"""Files that are whole or not there, logs that survive a crash, and names that stay in their folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("treegrpo")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
_WINDOWS = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices."""


def check_name(name: str) -> str:
    """A run's or file's name without folders. ValueError says what is wrong with any other."""
    if not _NAME.fullmatch(name) or ".." in name or name.endswith((" ", ".")) or _WINDOWS.fullmatch(name):
        raise ValueError(
            f"name {name!r} is not allowed: use letters, digits, spaces, '-', '_' and single dots, starting with "
            "a letter or "
            "digit, at most 100 characters, no folders, no '..' and none of Windows' device names"
        )
    return name


def write_atomically(path: Path, write: Callable[[str], Any]) -> None:
    """Call ``write(temporary path)`` and move the finished file to ``path``, or leave everything as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(str(temporary))
        # safetensors writes files only their owner can read; give them the usual rights of a new file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a log; after half a line, which a crash can leave, on a line of its own."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(f"{line}\n".encode())


def read_lines(path: Path, parse: Callable[[str], T]) -> list[T]:
    """What ``parse`` makes of every whole line of a log, oldest first; [] if there is no log.

    Lines it cannot read (ValueError) are left out, and a warning names them.
    """
    if not path.is_file():
        return []
    found = []
    # Not splitlines, which also splits at characters that JSON keeps as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").split("\n")[:-1], 1):
        try:
            if line.strip():
                found.append(parse(line))
        except ValueError as error:
            log.warning("TreeGRPO: %s, line %d is left out: %s", path, number, str(error).split("\n", 1)[0])
    return found
