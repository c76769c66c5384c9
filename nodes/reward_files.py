"""Where the weights of learned rewards are found, how they come there, and which rewards are in memory."""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..treegrpo_core.rewards import Checkpoint, Reward, load_reward, missing
from . import host

_LOADED: WeakValueDictionary[tuple[str, str], Reward] = WeakValueDictionary()
"""Rewards that some output still holds, by name and source: gigabytes that a second node or update need not load."""


def reward_named(name: str, source: str, download: bool) -> Reward:
    """The reward of that name with its weights, loaded unless it already is.

    Raises ValueError as :func:`load_reward` does and for a damaged file; FileNotFoundError says which file is missing,
    where to get it and where to put it.
    """
    source = source.strip()
    reward = _LOADED.get((name, source))
    if reward is None:
        reward = load_reward(name, source=source, locate=partial(locate, download=download))
        _LOADED[name, source] = reward
        host.log.info("TreeGRPO: reward %s loaded", name)
    return reward


def locate(checkpoint: Checkpoint, *, download: bool) -> Path:
    """The checkpoint's file: in a folder of reward models, in ComfyUI itself, or fetched if ``download`` is set."""
    folders = host.reward_folders()
    own = [] if checkpoint.repository or checkpoint.path else host.clip_folders()  # of a file the user has named
    for folder in [*folders, *own]:
        # Of the name alone, because files and folders inside may well be links to a store elsewhere.
        path = Path(os.path.normpath(folder / checkpoint.file))
        if "\0" in checkpoint.file or not path.is_relative_to(os.path.normpath(folder)):
            raise ValueError(f"source: {checkpoint.file!r} is outside models/reward_models; give a name inside it")
        if path.is_file():
            check(path, checkpoint)
            return path
    carried = host.carried_file(checkpoint.file)
    if carried is not None:
        return carried
    if download and checkpoint.repository:
        return fetch(checkpoint, folders[0])
    return missing(checkpoint)


def check(path: Path, checkpoint: Checkpoint) -> None:
    """ValueError if the file is not, byte for byte, the published one, as far as that is known."""
    size = path.stat().st_size
    if checkpoint.size and size != checkpoint.size:
        fault = f"has {size} bytes, not {checkpoint.size}"
    elif checkpoint.sha256 and _sha256(path) != checkpoint.sha256:
        fault = f"has another SHA-256 than {checkpoint.sha256}"
    else:
        return
    raise ValueError(
        f"{checkpoint.file} {fault}: it is damaged or another file. Delete it and download it again from "
        f"https://huggingface.co/{checkpoint.repository} ({checkpoint.path})"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def fetch(checkpoint: Checkpoint, folder: Path) -> Path:
    """Download the checkpoint from Hugging Face; it appears in ``folder`` whole and checked, or not at all."""
    from huggingface_hub import hf_hub_download

    folder.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:  # older ones show progress on the console alone
        extra["tqdm_class"] = _progress_class()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download ", ignore_cleanup_errors=True) as temporary:
        try:
            got = hf_hub_download(checkpoint.repository, checkpoint.path, local_dir=temporary, **extra)
        except (OSError, ValueError) as error:
            raise OSError(
                f"download: {checkpoint.path} could not be fetched from https://huggingface.co/"
                f"{checkpoint.repository} ({error}); check the connection, or put the file into models/reward_models "
                f"as {checkpoint.file}"
            ) from error
        check(Path(got), checkpoint)
        os.replace(got, folder / checkpoint.file)
    return folder / checkpoint.file


def _progress_class() -> Callable[..., Any]:
    """The console's progress bar of huggingface_hub, which moves ComfyUI's too and stops at its cancel button."""
    from huggingface_hub.utils import tqdm

    class Progress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._bar = host.progress(self.total) if self.total else None

        def update(self, n: float | None = 1) -> bool | None:
            host.stop_if_interrupted()
            if self._bar is not None and n:
                self._bar.update(n)
            return super().update(n)

    return Progress
