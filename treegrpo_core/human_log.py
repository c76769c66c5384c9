"""The log of judgements: one line each of ``human.jsonl`` in the run's folder, and the pictures as they were seen.

So judgements outlive the training; :func:`read_dataset` makes the same scores of them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from .files import append_line, read_lines
from .human import Answer, Mode, Undo, scores

LOG, PICTURES = "human.jsonl", "human"


class Judgement(BaseModel):
    """One line of the log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: str
    session: str
    run: str
    update: int
    mode: Mode
    prompt_index: int
    prompt: str
    leaves: tuple[str, ...]
    """Of each leaf the beginning of its picture's SHA-256, which is also the picture's file name."""
    answer: Answer


def fingerprint(picture: bytes) -> str:
    """Name of a picture file in the log: the beginning of its SHA-256."""
    return hashlib.sha256(picture).hexdigest()[:32]


def now() -> str:
    """The time as it stands in the log."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def append(run: Path, judgement: Judgement, pictures: Sequence[bytes]) -> None:
    """Add a judgement to the log in the run's folder, and its leaves' pictures (JPEG files) if they are new."""
    folder = run / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in zip(judgement.leaves, pictures, strict=True):
        path = folder / f"{name}.jpg"
        if not path.exists():
            path.write_bytes(picture)
    append_line(run / LOG, judgement.model_dump_json())


def read_log(run: Path) -> list[Judgement]:
    """All judgements in a run's folder, oldest first. ValueError if nothing was judged there."""
    path = run / LOG
    if not path.is_file():
        raise ValueError(f"{run}: it has no {LOG}; give the folder of a run that was judged by TreeGRPO Human Reward")
    return read_lines(path, Judgement.model_validate_json)


def read_dataset(run: Path) -> list[dict[str, Any]]:
    """Every judged prompt of a run with its pictures (file names below the run's folder), answers and scores."""
    groups: dict[str, dict[int, list[Judgement]]] = {}
    for line in read_log(run):
        prompts = groups.setdefault(line.session, {})
        if isinstance(line.answer, Undo):
            if prompts.get(line.prompt_index):
                prompts[line.prompt_index].pop()
        else:
            prompts.setdefault(line.prompt_index, []).append(line)
    return [_row(lines) for prompts in groups.values() for lines in prompts.values() if lines]


def _row(lines: list[Judgement]) -> dict[str, Any]:
    first = lines[0]
    answers = [line.answer for line in lines]
    row: dict[str, Any] = {key: getattr(first, key) for key in ("run", "update", "prompt", "mode")}
    row["pictures"] = [f"{PICTURES}/{name}.jpg" for name in first.leaves]
    row["scores"] = scores(first.mode, answers, len(first.leaves))
    row["answers"] = [answer.model_dump(mode="json") for answer in answers]
    return row


def write_dataset(run: Path, output: Path) -> int:
    """Write :func:`read_dataset` as JSON lines to a new file; returns how many. ValueError if the file exists."""
    if output.exists():
        raise ValueError(f"--output {output} exists; nothing is overwritten, choose another name")
    rows = read_dataset(run)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
