"""``python -m benchmarks.ideas`` tries what might make the model's own work faster, one thing at a time."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from .session import LEAVES, Session

PROMPTS = ["fox on blue", "tulip on white", "owl on green", "apple on yellow", "crab on pink", "panda on red"]


def measure(repetitions: int) -> list[dict[str, Any]]:
    """Of every idea the median seconds without and with it, interleaved, and their ratio with its range."""
    import torch

    session = Session(PROMPTS)
    with torch.inference_mode():
        few, many = len(PROMPTS), len(PROMPTS) * LEAVES
        ideas = {
            f"bf16 autocast, a forward of {few} rows": _autocast(session, few),
            f"bf16 autocast, a forward of {many} rows": _autocast(session, many),
            f"torch.compile, a forward of {few} rows": _compiled(session, few),
            f"torch.compile, a forward of {many} rows": _compiled(session, many),
            f"channels last in the VAE, {many} pictures": _channels(session),
            f"texts remembered, {few} prompts": _remembered(session),
        }
        return [_compared(idea, *works, repetitions) for idea, works in ideas.items()]


def _compared(idea: str, plain: Callable[[], Any], changed: Callable[[], Any], repetitions: int) -> dict[str, Any]:
    pairs = [(_seconds(plain), _seconds(changed)) for _ in range(3 * repetitions + 1)][1:]
    ratios = [before / after for before, after in pairs]
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    low, high = min(ratios), max(ratios)
    return {
        "idea": idea,
        "without": before,
        "with": after,
        "times faster": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _forward(session: Session, module: Any, rows: int) -> Callable[[], Any]:
    """A forward of the denoiser's module on random latents of so many rows."""
    import torch

    entry = session.guider.original_conds["positive"][0]
    times = rows // len(session.prompts)
    text, pooled = (entry[key].repeat(times, *[1] * (entry[key].ndim - 1)) for key in ("cross_attn", "pooled_output"))
    latents, levels = torch.randn(rows, *session.latent), torch.full((rows,), 700.0)
    return lambda: module(latents, levels, context=text, y=pooled)


def _autocast(session: Session, rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    plain = _forward(session, session.model.model.diffusion_model, rows)

    def changed() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain()

    return plain, changed


def _compiled(session: Session, rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    module = session.model.model.diffusion_model
    changed = _forward(session, torch.compile(module), rows)
    changed()  # compiles
    return _forward(session, module, rows), changed


def _channels(session: Session) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    latents = torch.randn(len(PROMPTS) * LEAVES, *session.latent)
    plain = copy.deepcopy(session.vae.first_stage_model).to(memory_format=torch.contiguous_format)
    return lambda: plain.decode(latents), lambda: session.vae.first_stage_model.decode(latents)


def _remembered(session: Session) -> tuple[Callable[[], Any], Callable[[], Any]]:
    encoding = session.parts["nodes.encoding"]

    def plain() -> Any:
        encoding._KNOWN.clear()
        return session.encode(PROMPTS)

    return plain, lambda: session.encode(PROMPTS)


def main() -> None:
    """Print all rows."""
    print(json.dumps(measure(3), indent=1))


if __name__ == "__main__":
    main()
