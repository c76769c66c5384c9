"""``python -m benchmarks [--full | --learning SECONDS]`` measures and fills the tables of docs/benchmarks.md.

The short form (iteration, overhead, memory) takes a few minutes; ``--learning`` trains every method for that long with
three seeds; ``--full`` does both, with more repetitions. The figures are kept in benchmarks/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from datetime import date
from pathlib import Path
from typing import Any

from tools import measure_memory
from tools.host import ROOT

from . import iteration, learning

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PROMPTS = ["fox on blue", "tulip on white", "owl on green", "apple on yellow", "crab on pink", "panda on red"]


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.*)", text) or [platform.processor()]
    return {
        "date": date.today().isoformat(),
        "processor": f"{names[0]}, {os.cpu_count()} cores, instructions {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measured(repetitions: int) -> dict[str, Any]:
    """All figures of the short form, or with more repetitions the full one."""
    rows = []
    for prompts, cfg in ((PROMPTS[:1], 1.0), (PROMPTS, 1.0), (PROMPTS[:1], 4.0)):
        rows += iteration.measure(prompts, cfg, repetitions)
    return {
        "machine": machine(),
        "repetitions": repetitions,
        "iteration": rows,
        "overhead": [iteration.overhead(prompts, 2 * repetitions) for prompts in (PROMPTS[:1], PROMPTS)],
        "memory": [measure_memory.measure(depth) for depth in measure_memory.DEPTHS],
    }


def learned(seconds: float) -> dict[str, Any]:
    """Curves of every method on both rewards."""
    rows = [row for reward in ("text_image", "jpeg") for row in learning.compare(reward, (0, 1, 2), seconds)]
    return {"learning": rows, "learning machine": machine()}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Name of each place in the page -> its text."""
    found = {"machine": "; ".join(f"{name}: {value}" for name, value in results["machine"].items())}
    for number, (prompts, cfg) in enumerate(((1, 1.0), (6, 1.0), (1, 4.0))):
        rows = [row for row in results["iteration"] if (row["prompts"], row["cfg"]) == (prompts, cfg)]
        found[f"iteration {number}"] = table(
            ["method", "forwards", "trained", "rollout", "decode, reward", "update", "seconds", "times TreeGRPO"],
            [
                [
                    row["method"],
                    str(row["forwards"]),
                    str(row["trained"]),
                    f"{row['stages']['rollout']:.2f}",
                    f"{row['stages']['decode'] + row['stages']['reward']:.2f}",
                    f"{row['stages']['update']:.2f}",
                    f"{row['seconds']:.2f}",
                    f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
                ]
                for row in rows
            ],
        )
    found["overhead"] = table(
        ["prompts", "update", "bare", "overhead"],
        [
            [
                str(row["prompts"]),
                f"{row['seconds']:.3f} s",
                f"{row['bare_seconds']:.3f} s",
                f"{row['overhead']:.3f} ({row['overhead_low']:.3f} to {row['overhead_high']:.3f})",
            ]
            for row in results["overhead"]
        ],
    )
    if "learning" in results:
        found["learning machine"] = "; ".join(f"{name}: {value}" for name, value in results["learning machine"].items())
        found["learning"] = table(
            ["reward", "method", "seconds", "updates", "forwards", "before", "after", "seconds to the flat plan's end"],
            [_learning_row(row) for row in results["learning"]],
        )
    found["memory"] = table(
        ["leaves", "peak", "latents stored"],
        [
            [str(row["leaves"]), f"{row['peak'] / 1e6:.0f} MB", f"{row['stored'] / 1e6:.0f} MB"]
            for row in results["memory"]
        ],
    )
    return found


def _learning_row(row: dict[str, Any]) -> list[str]:
    def three(values: list[Any]) -> str:
        return ", ".join("never" if value is None else f"{value:.4g}" for value in values)

    name = row["reward"]
    return [
        name,
        row["method"],
        f"{row['seconds']:g}",
        three(row["updates"]),
        three(row["forwards"]),
        three([entry[name] for entry in row["before"]]),
        three([entry[name] for entry in row["after"]]),
        three(row["reached_flat"]),
    ]


def fill(page: str, texts: dict[str, str]) -> str:
    """The page with the text between ``<!-- name -->`` and ``<!-- end -->`` replaced."""
    for name, text in texts.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        page, count = re.subn(pattern, lambda match, text=text: match[1] + text + match[2], page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places named {name!r}; there must be one")
    return page


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="fifteen repetitions, and 300 seconds of learning")
    parser.add_argument("--learning", type=float, metavar="SECONDS", help="only learning, for each method and seed")
    args = parser.parse_args()
    start = time.time()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if args.learning is None:
        results |= measured(15 if args.full else 3)
    if args.learning or args.full:
        results |= learned(args.learning or 300.0)
    RESULTS.write_text(json.dumps(results, indent=1, default=vars) + "\n", encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")
    print(f"{RESULTS} and {PAGE}, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
