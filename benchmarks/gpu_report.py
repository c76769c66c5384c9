"""``python -m benchmarks.gpu_report`` makes docs/gpu.md of benchmarks/gpu.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.host import ROOT

from .report import markdown

PAGE, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "benchmarks" / "gpu.json"
NOT_YET = "not yet run on a GPU"

HEAD = """# On a GPU

`python -m nox -s gpu` (or, with an interpreter that has what ComfyUI and this pack require, `python -m benchmarks.gpu`)
measures on a machine with one GPU, without network, in at most 8 minutes, writes `benchmarks/gpu.json` and makes this
page of it. The models are ComfyUI's own classes at their published sizes with random weights: what they draw is noise,
but weights, memory, time and gradients are those of the real ones. Everything goes through the nodes in a real server.

"""
WITHOUT = f"""**Status: {NOT_YET}.** The program is tested on the CPU with reduced models only, so nothing is known of
what is to stand here:

- the example workflow on a GPU;
- models of the sizes of SD1.5, SDXL, SD3.5 medium and Flux, in bf16 and fp8, with all or half of their weights on the
  device: whether the adapter's gradient is the same, and how the peak of memory compares with the estimate;
- seconds of an update of TreeGRPO and of DanceGRPO;
- a micro-batch that does not fit and is halved.
"""


def page(results: dict[str, Any] | None) -> str:
    """The whole page; without results it says that there are none."""
    return HEAD + (WITHOUT if results is None else _measured(results))


def _measured(results: dict[str, Any]) -> str:
    sections = results["sections"]
    figures = {name: section["figures"] for name, section in sections.items() if "figures" in section}
    models = [found for found in figures.values() if "full" in found]
    speeds = [found for found in figures.values() if "ratio" in found]
    machine = "; ".join(f"{name}: {value}" for name, value in results["machine"].items())
    parts = [
        f"Measured on {machine}.",
        f"## What was run\n\n{_outcomes(sections)}",
        *(
            [f"## Memory\n\n{MEMORY}\n\n{_memory(models)}\n\n## Gradients\n\n{GRADIENTS}\n\n{_gradients(models)}"]
            * bool(models)
        ),
        *([f"## Speed\n\n{SPEED}\n\n{_speed(speeds)}"] * bool(speeds)),
        *(f"## Out of memory\n\n{_halving(figures[name])}" for name in ("out of memory",) if name in figures),
    ]
    return "\n\n".join(parts) + "\n"


MEMORY = """One update, two nodes at a time, pictures of 512 x 512 pixels; all but SD1.5 with `gradient_checkpointing`.
On the device: weights there. Estimate: by what the console said at the run's first update, for the weights there."""
GRADIENTS = """The adapter's gradient with half of the weights on the device, against that with all of them. A core that
streams weights (DynamicVRAM) streams both, but only in the second do they all stay on the device."""
SPEED = """One prompt, 27 pictures of 512 x 512 pixels, 10 steps, bf16, without decoding and rewards. DanceGRPO trains 6
of 9 steps. TreeGRPO's window starts at step 1."""


def _outcomes(sections: dict[str, Any]) -> str:
    return markdown(
        ["section", "seconds", "result"],
        [[name, str(section.get("seconds", "")), _outcome(section)] for name, section in sections.items()],
    )


def _outcome(section: dict[str, Any]) -> str:
    if "failures" in section:
        return "**failed**: " + _cell("; ".join(section["failures"]))
    if "error" in section:
        return "**failed**: " + _cell(section["error"].splitlines()[0])
    return f"skipped, {_cell(section['skipped'])}" if "skipped" in section else "done"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _each(models: Iterable[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    for found in models:
        for place in ("full", "half"):
            yield f"{found['family']} {found['dtype']}, {place}", found[place]


def _memory(models: list[dict[str, Any]]) -> str:
    rows = []
    for name, one in _each(models):
        if "skipped" in one:
            rows.append([name, *[""] * 5, f"skipped: {_cell(one['skipped'])}"])
            continue
        peak, estimate = one["peak"], one["estimate"]
        measured = (_gb(peak), f"{peak / estimate:.2f}") if peak is not None else ("not counted here", "")
        rows.append(
            [
                name,
                _gb(one["weights"]),
                _gb(one["held"]),
                measured[0],
                _gb(estimate),
                measured[1],
                f"{one['seconds']:.1f}",
            ]
        )
    head = ["model", "weights", "on the device", "peak", "estimate", "peak by estimate", "seconds"]
    return markdown(head, rows)


def _gradients(models: list[dict[str, Any]]) -> str:
    rows = [
        [f"{found['family']} {found['dtype']}", f"{one['cosine']:.6f}", f"{one['relative_error']:.1e}"]
        for found in models
        if (one := found.get("gradient"))
    ]
    return markdown(["model", "cosine", "relative error"], rows)


def _speed(speeds: list[dict[str, Any]]) -> str:
    rows = [
        [
            found["family"],
            *(
                f"{one['seconds']:.2f} ({one['stages']['rollout']:.2f} + {one['stages']['update']:.2f})"
                for one in (found["TreeGRPO"], found["DanceGRPO"])
            ),
            f"{found['ratio']:.2f}",
        ]
        for found in speeds
    ]
    return markdown(["model", "TreeGRPO: seconds (rollout + update)", "DanceGRPO", "times faster"], rows)


def _halving(found: dict[str, Any]) -> str:
    sizes = ", then ".join(map(str, found["sizes"])) or "never smaller"
    return (
        "An update of SD1.5 with 0.6 of the memory that its micro-batch of 3 takes: the micro-batch became "
        f"{sizes}. Its gradient has the cosine {found['cosine']:.6f} with that of the update with enough memory, and a "
        f"relative error of {found['relative_error']:.1e}."
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def read() -> dict[str, Any] | None:
    """The figures of the last run on a GPU; None if there is none."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else None


def write(results: dict[str, Any] | None) -> None:
    """Make the page."""
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    write(read())
