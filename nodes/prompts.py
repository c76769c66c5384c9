"""Prompts in, conditioning with one row per prompt out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from ..treegrpo_core.prompts import check_text, decoded, draw_prompts, prompt_lines
from .encoding import encoded
from .policy import PolicyHandle
from .types import CATEGORY, PolicyType


class Prompts(io.ComfyNode):
    """Chooses the prompts of an update."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOPrompts",
            display_name="TreeGRPO Prompts",
            category=CATEGORY,
            description="Draws the prompts of each update from a list: every prompt once per epoch, in an order "
            "given by the seed.",
            inputs=[
                io.String.Input(
                    "text",
                    default="",
                    multiline=True,
                    tooltip="One prompt per line; empty lines and lines starting with # are skipped.",
                ),
                io.Int.Input(
                    "prompts_per_step",
                    default=4,
                    min=1,
                    max=4096,
                    tooltip="Prompts per update, each a group of its own.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**63 - 1,
                    control_after_generate=False,
                    tooltip="Seed of the order in which prompts are drawn.",
                ),
                io.String.Input(
                    "file",
                    default="",
                    optional=True,
                    tooltip="Name of a text file in ComfyUI's input folder with more prompts, one per line. "
                    "Empty: only the text box.",
                ),
                PolicyType.Input(
                    "policy",
                    optional=True,
                    tooltip="The run whose step decides which prompts come next. Without it: always the first.",
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="prompts", is_output_list=True, tooltip="The prompts of this update, as a list."
                ),
                io.Int.Output(display_name="step", tooltip="The number of the update they are for, from 0."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str | None = "", **_: Any) -> str | float:
        """What the file has in it, so that one that was edited is read again."""
        if file is None:  # the name comes over a wire and is not known yet
            return float("nan")
        try:
            return hashlib.sha256(_input_file(file).read_bytes()).hexdigest() if file.strip() else ""
        except (OSError, ValueError):  # execute says what is wrong
            return float("nan")

    @classmethod
    def execute(
        cls, text: str, prompts_per_step: int, seed: int, file: str = "", policy: PolicyHandle | None = None
    ) -> io.NodeOutput:
        lines = prompt_lines(text, "text")
        if file.strip():
            name = f"file: {file.strip()!r}"
            lines += prompt_lines(decoded(_input_file(file).read_bytes(), name), name)
        if not lines:
            raise ValueError("text: there is no prompt; write at least one line or name a file in the input folder")
        if prompts_per_step > len(lines):
            raise ValueError(
                f"prompts_per_step is {prompts_per_step}, but there are only {len(lines)} prompts; add prompts or "
                "lower it"
            )
        step = policy.run.iteration if policy else 0
        return io.NodeOutput(draw_prompts(lines, prompts_per_step, seed, step), step)


def _input_file(name: str) -> Path:
    folder = Path(folder_paths.get_input_directory()).resolve()
    path = (folder / name.strip()).resolve()
    if not path.is_relative_to(folder):
        raise ValueError(
            f"file: {name!r} is outside ComfyUI's input folder; give the name of a file inside it, without '..'"
        )
    if not path.is_file():
        raise ValueError(
            f"file: there is no {name!r} in ComfyUI's input folder; put the text file there or clear the field"
        )
    return path


class Encode(io.ComfyNode):
    """CLIP Text Encode for many prompts at once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOEncode",
            display_name="TreeGRPO Encode",
            category=CATEGORY,
            description="Encodes a list of prompts into one conditioning with a row per prompt, so that one "
            "guider samples them as one batch.",
            is_input_list=True,
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder of the model."),
                io.String.Input(
                    "prompts", multiline=True, tooltip="The prompts: a list, or one prompt.", dynamic_prompts=False
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    display_name="CONDITIONING", tooltip="One row per prompt; give it to the guider."
                ),
                io.String.Output(display_name="prompts", tooltip="The prompts, one per line, for TreeSampler."),
            ],
        )

    @classmethod
    def execute(cls, clip: list[Any], prompts: list[str]) -> io.NodeOutput:
        for prompt in prompts:
            check_text(prompt, "prompts")
        lines = [" ".join(prompt.split()) for prompt in prompts]
        texts = [encoded(clip[0], line) for line in lines]
        for line, text in zip(lines, texts, strict=True):
            if not all(entry[0].isfinite().all() for entry in text):
                raise ValueError(
                    f"prompts: {line[:60]!r} encodes to NaN or infinite values; correct its weights, as in (fox:1.3)"
                )
        return io.NodeOutput(_stack(texts, lines), "\n".join(lines))


def _stack(encoded: list[Any], prompts: list[str]) -> Any:
    """Conditionings of one entry each -> one conditioning whose tensors have a row per prompt."""
    if any(len(conditioning) != 1 for conditioning in encoded):
        raise ValueError(
            "clip: this text encoder schedules several encodings per prompt; encode one prompt at a time with "
            "CLIP Text Encode"
        )
    lengths = {tuple(conditioning[0][0].shape[1:]) for conditioning in encoded}
    if len(lengths) > 1:
        longest = max(zip(encoded, prompts, strict=True), key=lambda pair: pair[0][0][0].shape[1])[1]
        raise ValueError(
            f"prompts: they encode to different lengths {sorted(lengths)}, so they cannot share a batch; shorten "
            "the longest "
            f"({longest[:60]!r}) or use CLIP Text Encode on a list of prompts"
        )
    extras = encoded[0][0][1]
    stacked = {
        key: torch.cat([conditioning[0][1][key] for conditioning in encoded])
        if isinstance(value, torch.Tensor)
        else value
        for key, value in extras.items()
    }
    return [[torch.cat([conditioning[0][0] for conditioning in encoded]), stacked]]
