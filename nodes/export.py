"""A LoRA file for ordinary workflows."""

from __future__ import annotations

import json

from comfy_api.latest import io

from ..treegrpo_core.files import check_name
from ..treegrpo_core.lora import FORMATS, Format, metadata, read_header, write_lora
from . import host
from .policy import PolicyHandle
from .types import CATEGORY, PolicyType


class Export(io.ComfyNode):
    """Writes the run's LoRA into the loras folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOExport",
            display_name="TreeGRPO Export",
            category=CATEGORY,
            description="Writes the run's LoRA as a .safetensors file into ComfyUI's loras folder, where every "
            "LoRA loader finds it, for ComfyUI or for other programs. A file of the same run is replaced, any other "
            "file of that name is never touched.",
            is_output_node=True,
            inputs=[
                PolicyType.Input("policy", tooltip="The run, from LoRAUpdate or TreeGRPO Loop End."),
                io.String.Input(
                    "file_name",
                    default="treegrpo",
                    tooltip="Name of the file, without folders and without .safetensors.",
                ),
                io.Combo.Input(
                    "format",
                    options=list(FORMATS),
                    default="comfyui",
                    optional=True,
                    tooltip="Whose names the file uses. 'comfyui' for ComfyUI and SwarmUI, 'kohya' for A1111, Forge "
                    "and InvokeAI (ComfyUI loads it too), 'diffusers' for Python programs.",
                ),
                io.Combo.Input(
                    "weights",
                    options=["last", "average"],
                    default="last",
                    optional=True,
                    tooltip="'average': the moving average of the run's last twenty updates or so, which is steadier.",
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where the file is.")],
        )

    @classmethod
    def execute(
        cls,
        policy: PolicyHandle,
        file_name: str,
        format: Format = "comfyui",  # noqa: A002
        weights: str = "last",
    ) -> io.NodeOutput:
        run, name = policy.run, check_name(file_name.removesuffix(".safetensors"))
        path = host.loras_folder() / f"{name}.safetensors"
        if path.exists() and read_header(path).get("treegrpo.run") != run.name:
            raise ValueError(
                f"file_name: {path.name} exists and does not come from run {run.name!r}; choose another file name"
            )
        extra = {
            "run": run.name,
            "weights": weights,
            "settings": run.settings.model_dump_json(),
            "last_update": json.dumps(run.history.ends()[-1:]),
        }
        state = run.average if weights == "average" else None
        write_lora(path, run.adapter, metadata(name, run.iteration, extra), format, state)
        return io.NodeOutput(str(path), ui={"text": [f"{path.name}: run {run.name}, {run.iteration} updates"]})
