"""Held-out evaluations of a run: one line of evaluation.jsonl each, beside the run's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from .files import append_line, read_lines
from .run import EVALUATIONS


class Evaluation(BaseModel):
    """Scores of fixed prompts from fixed noise after ``iteration`` updates; 0: the model without the adapter."""

    model_config = ConfigDict(extra="forbid")

    iteration: int
    prompts: list[str]
    scores: dict[str, list[float]]
    """Of every reward, one number per picture, in the order of the prompts."""

    @classmethod
    def of(cls, iteration: int, prompts: Sequence[str], names: list[str], scores: Tensor) -> Evaluation:
        """scores: (R, N) for N prompts."""
        return cls(iteration=iteration, prompts=list(prompts), scores=dict(zip(names, scores.tolist(), strict=True)))

    @property
    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.scores.items() if values}


def read_evaluations(folder: Path, prompts: Sequence[str]) -> list[Evaluation]:
    """The evaluations of a run on these very prompts, in the order they were made: others do not compare."""
    found = read_lines(folder / EVALUATIONS, Evaluation.model_validate_json)
    return [entry for entry in found if entry.prompts == list(prompts)]


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Append one line."""
    append_line(folder / EVALUATIONS, evaluation.model_dump_json())
