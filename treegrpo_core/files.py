"""Files that are whole or not there, under names that stay in their folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
