"""A model becomes a policy: the run's adapter on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import folder_paths
from comfy_api.latest import io
from torch import Tensor

from ..treegrpo_core.adapter import KINDS
from ..treegrpo_core.architectures import OTHER, architecture_named
from ..treegrpo_core.files import check_name
from ..treegrpo_core.lora import read_lora
from ..treegrpo_core.run import Run, RunSettings, stored_base
from ..treegrpo_core.targets import TARGETS
from . import host
from .fingerprint import FORM, earlier_fingerprints, fingerprint
from .guided import outside_inference_mode
from .types import CATEGORY, PolicyType

RUNS: WeakValueDictionary[Path, Run] = WeakValueDictionary()
"""Runs in use, by folder: all nodes share one. The disk is the truth."""
LAST_RUNS: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()
"""The last run of each loaded model, kept for the next Queue, which need not build its adapter and optimizer again."""


@dataclass(frozen=True)
class PolicyHandle:
    """What a POLICY wire carries: a run and the patcher whose samplings it takes part in."""

    run: Run
    patcher: Any


def open_run(patcher: Any, name: str, settings: RunSettings, if_run_exists: str) -> Run:
    """The run, from memory, from disk or newly created; ValueError leaves everything on disk as it was."""
    root = host.runs_folder()
    folder = root / check_name(name)
    module = patcher.model.diffusion_model
    settings = _with_earlier_base(patcher, folder, settings)
    with outside_inference_mode():
        live = RUNS.get(folder)
        if live and live.on_disk and if_run_exists != "create":
            live.require(settings)
            live.follow_disk()
            LAST_RUNS[patcher.model] = live
            return live
        if if_run_exists == "continue" or (
            if_run_exists == "continue or create" and (folder / "state.safetensors").exists()
        ):
            run = Run.open(root, name, settings, module)
        else:
            start = None
            if settings.start_from:
                start = _start(settings, module)
            run = Run.create(root, name, settings, module, start)
    RUNS[folder] = LAST_RUNS[patcher.model] = run
    return run


def _with_earlier_base(patcher: Any, folder: Path, settings: RunSettings) -> RunSettings:
    """The settings; they also name the model as the stored run does, if an older version of the pack named it so."""
    base = stored_base(folder)
    if base is None or base.startswith(FORM) or base not in earlier_fingerprints(patcher):
        return settings
    return settings.model_copy(update={"earlier_base": base})


def _start(settings: RunSettings, module: Any) -> dict[str, dict[str, Tensor]]:
    """The layers of the LoRA file to start from; whether the model has them, the adapter will say.

    Adapters of text encoders are left out, which the log says.
    """
    path, known = _lora_path(settings.start_from), architecture_named(settings.architecture)
    names = [name for name, part in module.named_modules() if isinstance(getattr(part, "weight", None), Tensor)]
    read = partial(read_lora, path, model_layers=names, without_text_encoder=True)
    try:
        return read(architecture=known).layers
    except ValueError as error:
        try:  # a variant of the family with layers of its own
            return read(architecture=OTHER).layers
        except ValueError:
            raise error from None


def _lora_path(name: str) -> Path:
    path = folder_paths.get_full_path("loras", name)
    if path is None:
        raise ValueError(
            f"start_from: {name!r} is not in the loras folders; refresh the page and choose a file that is there"
        )
    return Path(path)


class Policy(io.ComfyNode):
    """Opens or starts a run on a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOPolicy",
            display_name="TreeGRPO Policy",
            category=CATEGORY,
            description="Puts the trainable LoRA of a run on a model. The run lives on disk under "
            "output/treegrpo and goes on at the next "
            "Queue. The base model and every other branch of the graph stay untouched.",
            inputs=[
                io.Model.Input("model", tooltip="The model to train. Its weights are never changed."),
                io.String.Input(
                    "run_name",
                    default="my_run",
                    tooltip="Name of the run (letters, digits, spaces, - and _). The same name continues, "
                    "another one starts anew.",
                ),
                io.Int.Input("rank", default=16, min=1, max=1024, tooltip="Rank of the LoRA. Fixed for a run."),
                io.Float.Input(
                    "alpha",
                    default=16.0,
                    min=0.01,
                    max=4096.0,
                    step=0.01,
                    tooltip="Scale of the LoRA; its effect is alpha / rank. Fixed for a run.",
                ),
                io.Combo.Input(
                    "targets",
                    options=list(TARGETS),
                    default="attention+mlp",
                    tooltip="Which linear layers of the model's blocks get an adapter. The text encoder never does. "
                    "Fixed for a run.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=1e-8,
                    max=1.0,
                    step=1e-8,
                    round=False,
                    tooltip="Step size of AdamW per update. May be changed while a run goes on.",
                ),
                io.Combo.Input("optimizer", options=["adamw"], default="adamw", tooltip="Optimizer. Fixed for a run."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**63 - 1,
                    control_after_generate=False,
                    tooltip="Seed of the LoRA's initial weights. Fixed for a run.",
                ),
                io.Combo.Input(
                    "if_run_exists",
                    options=["continue or create", "continue", "create"],
                    default="continue or create",
                    tooltip="'continue' refuses an unknown name (typing errors), 'create' refuses one that exists.",
                ),
                io.Combo.Input(
                    "start_from",
                    options=["none", *folder_paths.get_filename_list("loras")],
                    default="none",
                    tooltip="LoRA file of this model family to start a new run from. 'none' starts from the base "
                    "model.",
                ),
                io.Combo.Input(
                    "adapter",
                    options=list(KINDS),
                    default="lora",
                    optional=True,
                    tooltip="lora loads everywhere; rslora scales with the square root of the rank; dora, loha and "
                    "lokr are exported for ComfyUI only. Fixed for a run.",
                ),
                io.String.Input(
                    "target_pattern",
                    default="",
                    optional=True,
                    tooltip="Regular expression over whole layer names, such as .*attn2.* ; replaces targets if not "
                    "empty. Fixed for a run.",
                ),
            ],
            outputs=[
                PolicyType.Output(display_name="POLICY", tooltip="The run, for TreeSampler and LoRAUpdate."),
                io.Model.Output(
                    display_name="MODEL", tooltip="The model with the run's LoRA live; build the guider on this one."
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, run_name: str | None, **_: Any) -> str | float:
        """The run's progress, so that another Queue of the same graph trains the next step."""
        if run_name is None:  # the name comes over a wire and is not known yet
            return float("nan")
        path = host.runs_folder() / run_name / "state.safetensors"
        try:
            found = path.stat()
        except (OSError, ValueError):
            return float("nan")
        # The inode too: a restored copy can have the time of the file it replaces.
        return f"{found.st_mtime_ns} {found.st_ino} {found.st_size}"

    @classmethod
    def execute(
        cls,
        model: Any,
        run_name: str,
        rank: int,
        alpha: float,
        targets: str,
        learning_rate: float,
        optimizer: str,
        seed: int,
        if_run_exists: str,
        start_from: str,
        adapter: str = "lora",
        target_pattern: str = "",
    ) -> io.NodeOutput:
        host.prediction_of(model)
        if adapter == "dora" and host.has_weight_patches(model):
            raise ValueError(
                "adapter: dora works with the size of the weights, and those of this model are patched by a LoRA or a "
                "merge in front, which ComfyUI applies later; use the adapter lora, or save the merged model first"
            )
        settings = RunSettings(
            base=fingerprint(model),
            rank=rank,
            alpha=alpha,
            targets=target_pattern.strip() or targets,
            kind=adapter,  # type: ignore[arg-type]
            architecture=host.architecture(model).name,
            optimizer=optimizer,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            seed=seed,
            start_from="" if start_from == "none" else start_from,
        )
        run = open_run(model, run_name, settings, if_run_exists)
        patcher = host.with_adapter(model, run.adapter)
        return io.NodeOutput(PolicyHandle(run, patcher), patcher)
