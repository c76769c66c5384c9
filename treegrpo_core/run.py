"""A run on disk: one atomic state file (adapter, optimizer, iteration, settings) and a log of metrics.

State lives here, by name, and never in a node's output: queue again, restart the program, and the run goes on bit
for bit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from .architectures import OTHER, architecture_named
from .policy import Adapter
from .trainer import Metrics, UpdateSettings, update
from .tree import Tree

STATE, LOG = "state.safetensors", "metrics.jsonl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")


class RunSettings(BaseModel):
    """What defines a run. All but the learning rate is fixed at its first start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    """Fingerprint of the base model's weights."""
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: str = "attention+mlp"
    architecture: str = OTHER.name
    """Name of the base model's entry in :mod:`.architectures`, which says what the targets' presets mean."""
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    seed: int = Field(default=0, ge=0)
    start_from: str = ""
    """Name of the LoRA file the adapter started from; empty: from the base model."""


def check_name(name: str) -> str:
    """A run's or file's name without folders. ValueError says what is wrong with any other."""
    if not _NAME.fullmatch(name) or ".." in name or name.endswith((" ", ".")):
        raise ValueError(
            f"name {name!r} is not allowed: use letters, digits, spaces, '-', '_' and single dots, starting with "
            "a letter or "
            "digit, at most 100 characters, no folders and no '..'"
        )
    return name


def known_runs(root: Path) -> list[str]:
    """Names of the runs under ``root``."""
    return sorted(path.parent.name for path in root.glob(f"*/{STATE}"))


class Run:
    """A run in memory, in step with its folder. Use :meth:`open` or :meth:`create`."""

    def __init__(self, folder: Path, settings: RunSettings, adapter: Adapter) -> None:
        self.folder, self.settings, self.adapter = folder, settings, adapter
        self.iteration = 0
        self.losses: list[float] = []
        self.optimizer = torch.optim.AdamW(
            # Gradients here are tiny; Adam's usual eps of 1e-8 would swallow them.
            adapter.parameters(),
            lr=settings.learning_rate,
            weight_decay=0.01,
            eps=1e-12,
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @classmethod
    def create(
        cls, root: Path, name: str, settings: RunSettings, module: nn.Module, start: dict[str, Tensor] | None = None
    ) -> Run:
        """Start run ``name`` under ``root``, its adapter built for ``module`` and filled from ``start`` if given."""
        folder = root / check_name(name)
        if (folder / STATE).exists():
            raise ValueError(
                f"run {name!r} exists already in {root}; choose another run name, or set if_run_exists to 'continue'"
            )
        run = cls(folder, settings, _adapter(settings, module))
        if start is not None:
            run.adapter.load_state_dict(start)
        if (folder / LOG).exists():  # of a run whose state is gone
            (folder / LOG).replace(folder / f"old {LOG}")
        run.save(None)
        return run

    @classmethod
    def open(cls, root: Path, name: str, settings: RunSettings, module: nn.Module) -> Run:
        """Continue run ``name``.

        ValueError if there is none or it was started with other settings; nothing is changed then.
        """
        folder = root / check_name(name)
        if not (folder / STATE).exists():
            raise ValueError(
                f"run {name!r} is not known in {root}; known runs: {', '.join(known_runs(root)) or 'none'}. "
                "Correct run_name, or set if_run_exists to 'create'"
            )
        cls._check_settings(name, _read_metadata(folder / STATE)["settings"], settings)
        run = cls(folder, settings, _adapter(settings, module))
        run.reload()
        return run

    @staticmethod
    def _check_settings(name: str, stored: dict[str, Any], wanted: RunSettings) -> None:
        differing = []
        for key, value in wanted.model_dump().items():
            if key != "learning_rate" and stored.get(key) != value:
                what = (
                    "another base model" if key == "base" else f"{key} {_shown(stored.get(key))}, not {_shown(value)}"
                )
                differing.append(what)
        if differing:
            raise ValueError(
                f"run {name!r} was started with {'; '.join(differing)}. Set it back as it was, or choose another "
                "run name "
                "to start a new run; this run was left as it is"
            )

    def require(self, settings: RunSettings) -> None:
        """Take over a new learning rate; ValueError for any other difference to the run's settings."""
        self._check_settings(self.name, self.settings.model_dump(), settings)
        self.settings = settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate

    @property
    def stored_iteration(self) -> int | None:
        """Updates done according to the disk; None if the run's folder is gone."""
        path = self.folder / STATE
        return int(_read_metadata(path)["iteration"]) if path.exists() else None

    def reload(self) -> None:
        """Set adapter, optimizer and iteration to the state on disk."""
        from safetensors.torch import load_file

        metadata = _read_metadata(self.folder / STATE)
        tensors = load_file(self.folder / STATE)
        self.adapter.load_state_dict(_with_prefix(tensors, "adapter."))
        self._load_optimizer(_with_prefix(tensors, "optimizer."))
        self.iteration = int(metadata["iteration"])
        self._complete_log(metadata["metrics"])
        self.losses = [entry["loss"] for entry in self.log()]

    def update(self, trees: Sequence[Tree], settings: UpdateSettings) -> Metrics:
        """One update, saved to disk before it counts. If it fails, the run is set back to its last saved state."""
        try:
            metrics = update(trees, self.adapter, self.optimizer, settings, iteration=self.iteration)
            self.iteration += 1
            self.save(metrics)
        except BaseException:
            self.reload()
            raise
        self.losses.append(metrics.loss)
        return metrics

    def save(self, metrics: Metrics | None) -> None:
        """Write the state file in one atomic step, then append ``metrics`` to the log."""
        from safetensors.torch import save_file

        tensors = {f"adapter.{name}": value for name, value in self.adapter.state_dict().items()}
        tensors.update({f"optimizer.{name}": value for name, value in self._optimizer_state().items()})
        line = metrics.model_dump_json() if metrics else ""
        metadata = {"settings": self.settings.model_dump_json(), "iteration": str(self.iteration), "metrics": line}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / STATE, lambda path: save_file(tensors, path, metadata))
        if metrics:
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(line + "\n")

    def log(self) -> list[dict[str, Any]]:
        """All metrics so far, one dictionary per update."""
        return [json.loads(line) for line in self._log_lines()]

    def _log_lines(self) -> list[str]:
        """The complete lines of the log; a crash can leave half a line at the end."""
        path = self.folder / LOG
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return text.splitlines()[: text.count("\n")]

    def _complete_log(self, last: str) -> None:
        """A crash between state and log leaves the last line only in the state file: write it now."""
        lines = self._log_lines()
        if last and len(lines) < self.iteration:
            text = "\n".join([*lines, last]) + "\n"
            write_atomically(self.folder / LOG, lambda path: Path(path).write_text(text, encoding="utf-8"))

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self.adapter.named_parameters().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.state.clear()
        for name, parameter in self.adapter.named_parameters().items():
            state = _with_prefix(tensors, f"{name}.")
            if state:
                # Copies, because safetensors maps the file into memory, and Windows replaces no file that is mapped.
                moments = {
                    key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in state.items()
                }
                self.optimizer.state[parameter] = moments


def _shown(value: Any) -> str:
    """A setting as the node shows it: an empty start_from is 'none' there."""
    return "'none'" if value == "" else repr(value)


def _adapter(settings: RunSettings, module: nn.Module) -> Adapter:
    return Adapter(
        module,
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        seed=settings.seed,
        architecture=architecture_named(settings.architecture),
    )


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _read_metadata(path: Path) -> dict[str, Any]:
    from .lora import read_header

    metadata = read_header(path)
    return {**metadata, "settings": json.loads(metadata["settings"])}


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
