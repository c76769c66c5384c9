"""A run on disk: one atomic state file (adapter, optimizer, iteration, settings) and a log of metrics.

State lives here, by name, and never in a node's output: queue again, restart the program, and the run goes on bit
for bit.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from .adapter import Adapter
from .architectures import OTHER, architecture_named
from .batches import Limits
from .files import append_line, check_name, read_lines, write_atomically
from .history import History
from .metrics import Metrics
from .trainer import UpdateSettings, follow_device, update
from .tree import Tree

warn = logging.getLogger("treegrpo")

STATE, LOG, EVALUATIONS = "state.safetensors", "metrics.jsonl", "evaluation.jsonl"


class RunSettings(BaseModel):
    """What defines a run. All but the learning rate is fixed at its first start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    """Fingerprint of the base model's weights."""
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: str = "attention+mlp"
    """A preset of :data:`.targets.TARGETS` or a regular expression over layer names."""
    kind: Literal["lora", "rslora", "dora", "loha", "lokr"] = "lora"
    """Kind of the adapter, see :data:`.adapter.KINDS`."""
    architecture: str = OTHER.name
    """Model family, an entry of :data:`.architectures.ARCHITECTURES`."""
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    seed: int = Field(default=0, ge=0)
    start_from: str = ""
    """Name of the LoRA file the adapter started from; empty: from the base model."""
    earlier_base: str = Field(default="", exclude=True)
    """Another fingerprint that the same model had in older versions: a run stored under it goes on under ``base``."""


def known_runs(root: Path) -> list[str]:
    """Names of the runs under ``root``."""
    return sorted(path.parent.name for path in root.glob(f"*/{STATE}"))


def stored_base(folder: Path) -> str | None:
    """The base model's fingerprint of the run in ``folder``; None if there is no run."""
    return _read_metadata(folder / STATE)["settings"]["base"] if (folder / STATE).exists() else None


_OLD_BASE = re.compile("[0-9a-f]{32}")
"""Fingerprints of version 0.1.0."""
_PERHAPS_OLD = " (or by TreeGRPO 0.1.0 under another version of ComfyUI: train an update there with this version first)"

AVERAGE_DECAY = 0.95
"""Of the moving average of the adapter's weights; shorter in a run's first updates."""


class Run:
    """A run in memory, in step with its folder. Use :meth:`open` or :meth:`create`."""

    def __init__(self, folder: Path, settings: RunSettings, adapter: Adapter) -> None:
        self.folder, self.settings, self.adapter = folder, settings, adapter
        self.iteration = 0
        self._known: tuple[int, int, int] | None = None
        self.history, self.limits = History(), Limits()
        self.average = adapter.state_dict()
        """Exponential moving average of the adapter's weights, one term per update."""
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

    @property
    def losses(self) -> list[float]:
        """One finite number per update."""
        return self.history.losses

    @property
    def replay_noise(self) -> float:
        """Of the last update that measured it."""
        return self.history.replay_noise

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        settings: RunSettings,
        module: nn.Module,
        start: dict[str, dict[str, Tensor]] | None = None,
    ) -> Run:
        """Start run ``name`` under ``root``, its adapter built for ``module``.

        ``start``: the layers of a LoRA file (:meth:`Adapter.load_factors`) to start from.
        """
        folder = root / check_name(name)
        if (folder / STATE).exists():
            raise ValueError(
                f"run {name!r} exists already in {root}; choose another run name, or set if_run_exists to 'continue'"
            )
        run = cls(folder, settings, _adapter(settings, module))
        if start is not None:
            run.adapter.load_factors(start)
            run.average = run.adapter.state_dict()
        for name in (LOG, EVALUATIONS):  # of a run whose state is gone
            if (folder / name).exists():
                (folder / name).replace(folder / f"old {name}")
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
        stored = RunSettings(**stored).model_dump()
        if stored["base"] not in (wanted.base, wanted.earlier_base):
            differing.append("another base model" + (_PERHAPS_OLD if _OLD_BASE.fullmatch(stored["base"]) else ""))
        for key, value in wanted.model_dump(exclude={"base", "learning_rate"}).items():
            if stored[key] != value:
                differing.append(f"{key} {_shown(stored[key])}, not {_shown(value)}")
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
    def on_disk(self) -> tuple[int, int, int] | None:
        """What tells one state file from another: time, inode and size; None if it is gone."""
        try:
            found = (self.folder / STATE).stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def follow_disk(self) -> None:
        """Reload if the state file is not the one this run wrote or read last; ValueError if it is another run's."""
        if self.on_disk != self._known:
            self._check_settings(self.name, _read_metadata(self.folder / STATE)["settings"], self.settings)
            self.reload()

    def reload(self) -> None:
        """Set adapter, optimizer and iteration to the state on disk."""
        from safetensors.torch import load_file

        known = self.on_disk
        metadata = _read_metadata(self.folder / STATE)
        tensors = load_file(self.folder / STATE)
        self.adapter.load_state_dict(_with_prefix(tensors, "adapter."))
        self._load_optimizer(_with_prefix(tensors, "optimizer."))
        average = _with_prefix(tensors, "average.")
        self.average = {name: value.clone() for name, value in average.items()} or self.adapter.state_dict()
        self.iteration = int(metadata["iteration"])
        self._complete_log(metadata["metrics"])
        self.history = History(self.log())
        self._known = known  # only now: a file that could not be read is tried again

    def update(self, trees: Sequence[Tree], settings: UpdateSettings) -> Metrics:
        """One update, saved to disk before it counts. If it fails, the run is set back to its last saved state."""
        if self.on_disk is None:
            raise ValueError(
                f"run {self.name!r}: its folder {self.folder} is gone. Queue again to start it over, or put the folder "
                "back to go on"
            )
        try:
            with self.adapter.staying():
                metrics = update(
                    trees,
                    self.adapter,
                    self.optimizer,
                    settings,
                    iteration=self.iteration,
                    noise=self.replay_noise,
                    average=self.average,
                    limits=self.limits,
                )
            self.iteration += 1
            self._move_average()
            self.save(metrics)
        except BaseException:
            self.reload()
            raise
        follow_device(self.optimizer)  # it leaves the device with the adapter
        self.history.add(json.loads(metrics.model_dump_json()))  # as it will be read from the disk
        return metrics

    def _move_average(self) -> None:
        decay = min(AVERAGE_DECAY, self.iteration / (self.iteration + 9))
        for name, value in self.adapter.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)

    def save(self, metrics: Metrics | None) -> None:
        """Write the state file in one atomic step, then append ``metrics`` to the log."""
        from safetensors.torch import save_file

        tensors = {f"adapter.{name}": value for name, value in self.adapter.state_dict().items()}
        tensors.update({f"average.{name}": value for name, value in self.average.items()})
        tensors.update({f"optimizer.{name}": value for name, value in self._optimizer_state().items()})
        line = metrics.model_dump_json() if metrics else ""
        metadata = {"settings": self.settings.model_dump_json(), "iteration": str(self.iteration), "metrics": line}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / STATE, lambda path: save_file(tensors, path, metadata))
        self._known = self.on_disk
        if metrics:
            try:
                append_line(self.folder / LOG, line)
            except OSError as error:  # the update counts: the state is saved, with this line in its header
                warn.warning("TreeGRPO: run %s: %s cannot be written (%s)", self.name, self.folder / LOG, error)

    def log(self) -> list[dict[str, Any]]:
        """All metrics so far, one dictionary per update."""
        return read_lines(self.folder / LOG, _entry)

    def _complete_log(self, last: str) -> None:
        """A crash between state and log leaves the last line only in the state file: write it now."""
        entries, path = self.log(), self.folder / LOG
        if last and (not entries or entries[-1].get("iteration") != self.iteration - 1):
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            whole = text[: text.rfind("\n") + 1]
            write_atomically(path, lambda place: Path(place).write_text(f"{whole}{last}\n", encoding="utf-8"))

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


def _entry(line: str) -> dict[str, Any]:
    """A line of the log; ValueError if it is none."""
    entry = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("rewards"), dict):
        raise ValueError("it is not the metrics of an update")
    return entry


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
        kind=settings.kind,
        architecture=architecture_named(settings.architecture),
    )


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _read_metadata(path: Path) -> dict[str, Any]:
    from .lora import read_header

    metadata = read_header(path)
    return {**metadata, "settings": json.loads(metadata["settings"])}
