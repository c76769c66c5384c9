"""``python -m benchmarks`` measures and fills the tables of docs/benchmarks.md.

The short form takes about five minutes. ``--full`` repeats more often and adds what takes longer: the full-size model
and learning. ``--only NAME ...`` measures these sections alone, ``--learning`` continues the runs of
benchmarks/learning.jsonl, ``--report`` only writes the page. Figures are kept in benchmarks/results.json, each section
with the machine it was measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from tools import measure_memory
from tools.host import ROOT

from . import figures, full_size, host, ideas, iteration, learning, loops, profile, report, search

RESULTS = ROOT / "benchmarks" / "results.json"
PROMPTS = ["fox on blue", "tulip on white", "owl on green", "apple on yellow", "crab on pink", "panda on red"]
SETTINGS = ((PROMPTS[:1], 1.0), (PROMPTS, 1.0), (PROMPTS[:1], 4.0))


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


SECTIONS: dict[str, Callable[[int], Any]] = {
    "iteration": lambda repetitions: [row for one in SETTINGS for row in iteration.measure(*one, repetitions)],
    "overhead": lambda repetitions: [iteration.overhead(one, 3 * repetitions) for one in (PROMPTS[:1], PROMPTS)],
    "profile": lambda repetitions: [profile.measure(one, 3 * repetitions) for one in (PROMPTS[:1], PROMPTS)],
    "memory": lambda _: [
        *(measure_memory.measure(depth) for depth in measure_memory.DEPTHS),
        *(measure_memory.measure(5, rows) for rows in measure_memory.BATCHES),
    ],
    "host": lambda repetitions: host.measure(repetitions),
    "ideas": ideas.measure,
    "search": lambda _: search.measure(),
    "full-size": lambda _: full_size.measure_all(),
    "loops": lambda _: loops.measure(),
}
"""Name -> what measures it, given the number of repetitions."""
LONG = ("ideas", "search", "full-size", "loops")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="ten repetitions of everything, and learning")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--learning", nargs="*", choices=learning.GROUPS, metavar="GROUP", help="only learning")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    start = time.time()
    chosen = args.only or [name for name in SECTIONS if args.full or name not in LONG]
    for name in [] if args.report or args.learning is not None else chosen:
        before = time.time()
        found = SECTIONS[name](10 if args.full else 2)
        results = read() | {name: {"machine": machine(), "figures": found}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.time() - before:.0f} s", flush=True)
    if args.learning is not None or (args.full and not (args.only or args.report)):
        learning.run(args.learning or learning.GROUPS)
    report.fill(report.texts(read()))
    figures.draw_pareto()
    if "loops" in read():
        figures.draw_loop(read()["loops"]["figures"]["curve"])
    figures.draw_iteration([row for row in read()["iteration"]["figures"] if row["prompts"] == len(PROMPTS)])
    print(f"{RESULTS} and {report.PAGE}, {time.time() - start:.0f} s")


def read() -> dict[str, Any]:
    """The figures so far."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return {name: section for name, section in found.items() if name in SECTIONS}


if __name__ == "__main__":
    main()
