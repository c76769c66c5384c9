"""Held-out evaluations of a run: one line of evaluation.jsonl each, beside the run's state."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from .files import write_atomically

FILE = "evaluation.jsonl"


class Evaluation(BaseModel):
    """Scores of fixed prompts from fixed noise after ``iteration`` updates; 0: the model without the adapter."""

    model_config = ConfigDict(extra="forbid")

    iteration: int
    scores: dict[str, list[float]]
    """Of every reward, one number per picture, in the order of the prompts."""

    @classmethod
    def of(cls, iteration: int, names: list[str], scores: Tensor) -> Evaluation:
        """scores: (R, N)."""
        return cls(iteration=iteration, scores=dict(zip(names, scores.tolist(), strict=True)))

    @property
    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.scores.items()}


def read_evaluations(folder: Path) -> list[Evaluation]:
    """All evaluations of a run, in the order they were made; a half-written last line is left out."""
    path = folder / FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Evaluation(**json.loads(line)) for line in text.splitlines()[: text.count("\n")]]


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Append one line, as a whole even after an earlier half-written one."""
    lines = [entry.model_dump_json() for entry in (*read_evaluations(folder), evaluation)]
    write_atomically(folder / FILE, lambda path: Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8"))
