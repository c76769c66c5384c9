"""From benchmarks/results.json and benchmarks/learning.jsonl to the tables of docs/benchmarks.md."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.host import ROOT

from . import learning, search

PAGE = ROOT / "docs" / "benchmarks.md"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def fill(texts: dict[str, str]) -> None:
    """Replace the page's text between ``<!-- name -->`` and ``<!-- end -->``; ValueError if a place is missing."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in texts.items():
        place = f"<!-- {name} -->\n"
        pattern, new = rf"{place}.*?(?=<!-- end -->)", place + text + "\n"
        page, count = re.subn(pattern, lambda _, new=new: new, page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places named {name!r}; there must be one")
    PAGE.write_text(page, encoding="utf-8")


def texts(results: dict[str, Any]) -> dict[str, str]:
    """Name of each place in the page -> its text, of whatever was measured."""
    found = {}
    for name, work in TABLES.items():
        section = name.split(",")[0]
        if section in results:
            found[name] = work(results[section]["figures"])
            found[f"{section}, machine"] = _machine(results[section]["machine"])
    found |= {group: text for group in learning.GROUPS if (text := learned(group))}
    found["targets"] = targets(results)
    return found


def _machine(machine: dict[str, str]) -> str:
    return "Measured on " + "; ".join(f"{name}: {value}" for name, value in machine.items()) + "."


def _iteration(prompts: int, cfg: float) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: _stages([row for row in rows if (row["prompts"], row["cfg"]) == (prompts, cfg)])


def _stages(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["method", "forwards", "trained", "rollout", "decode, reward", "update", "seconds", "times TreeGRPO"],
        [
            [
                row["method"],
                f"{row['forwards']:.0f}",
                f"{row['trained']:.0f}",
                f"{row['stages']['rollout']:.2f}",
                f"{row['stages']['decode'] + row['stages']['reward']:.2f}",
                f"{row['stages']['update']:.2f}",
                f"{row['seconds']:.2f}",
                _spread(row, "ratio"),
            ]
            for row in rows
        ],
    )


def _spread(row: dict[str, Any], name: str, digits: int = 2) -> str:
    text = f"{row[name]:.{digits}f}"
    low, high = row.get(f"{name}_low", row.get("low")), row.get(f"{name}_high", row.get("high"))
    return text if low is None or low == high else f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def _overhead(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["prompts", "update", "bare", "overhead"],
        [
            [
                str(row["prompts"]),
                f"{row['seconds']:.3f} s",
                f"{row['bare_seconds']:.3f} s",
                _spread(row, "overhead", 3),
            ]
            for row in rows
        ],
    )


def _memory(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["leaves", "micro-batch", "peak", "latents stored"],
        [
            [str(row["leaves"]), str(row["max_batch"]), *(f"{row[key] / 1e6:.0f} MB" for key in ("peak", "stored"))]
            for row in rows
        ],
    )


def _full_size(settings: list[dict[str, Any]]) -> str:
    parts = []
    for one in settings:
        with_it = ", `gradient_checkpointing`" if one["checkpointing"] else ""
        rows = markdown(
            ["rows in a batch", "seconds per row, forward", "with backward"],
            [[str(row["batch"]), f"{row['forward']:.2f}", f"{row['with backward']:.2f}"] for row in one["rows"]],
        )
        parts.append(f"Latents of {one['size']} by {one['size']}{with_it}:\n\n{rows}\n\n{_stages(one['methods'])}")
    return "\n\n".join(parts)


def _profile(rows: list[dict[str, Any]]) -> str:
    head = ["milliseconds of", *(f"prompts: {row['prompts']}" for row in rows)]
    items = [
        [item, *(f"{1000 * row['items'][item]:.1f} ({row['items'][item] / row['seconds']:.0%})" for row in rows)]
        for item in rows[0]["items"]
    ]
    return markdown(head, [*items, ["all", *(f"{1000 * row['seconds']:.0f}" for row in rows)]])


def _search(figures: dict[str, list[dict[str, Any]]]) -> str:
    tables = []
    for reward, rows in figures.items():
        others = [name for name in rows[0] if name in search.WATCHED and name != reward]
        head = ["way", "forwards", "seconds", f"`{reward}`", "over best of n", *(f"`{name}`" for name in others)]
        body = [
            [
                row["way"],
                str(row["forwards"]),
                f"{row['seconds']:.2f}",
                f"{row[reward]:.4f} ± {row['error']:.4f}",
                f"{row['gain']:+.4f} ± {row['gain error']:.4f}",
                *(f"{row[name]:.3f}" for name in others),
            ]
            for row in rows
        ]
        tables.append(f"Searched for `{reward}`:\n\n{markdown(head, body)}")
    return "\n\n".join(tables)


def _ideas(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["idea", "milliseconds without", "with", "times faster"],
        [
            [row["idea"], f"{1000 * row['without']:.1f}", f"{1000 * row['with']:.1f}", _spread(row, "times faster")]
            for row in rows
        ],
    )


def _host(figures: dict[str, Any]) -> str:
    first, graph = figures["first forward"], figures["graph"]
    rows = [
        ["import of the pack, by core's own loader in a new process", _spread(figures["import"], "seconds")],
        ["from Queue to the first forward of the quickstart, new server", f"{first['cold']:.2f}"],
        ["the same, when it has run before", _spread(first["warm"], "seconds")],
    ]
    for row in graph:
        what = f"{row['prompts']} prompts: an update in a loop, beside its own {row['update']:.2f} s"
        rows += [[what, f"{row['loop']:.3f}"], ["the same as a Queue of its own", f"{row['queues']:.3f}"]]
    return markdown(["what is waited for", "seconds"], rows)


def _loops(figures: dict[str, Any]) -> str:
    first, last = figures["first"], figures["last"]
    rows = [
        ["seconds by the clock, median", *(f"{one['seconds']:.3f}" for one in (first, last))],
        ["seconds of computing, mean", *(f"{one['computing']:.3f}" for one in (first, last))],
        ["resident memory, median", *(f"{one['memory'] / 1e6:.1f} MB" for one in (first, last))],
        ["messages to the page", *(f"{one['messages']:.2f}" for one in (first, last))],
        ["their size", *(f"{one['bytes'] / 1000:.2f} kB" for one in (first, last))],
    ]
    shares = [
        f"{last[name] / first[name] - 1:+.1%}" for name in ("seconds", "computing", "memory", "messages", "bytes")
    ]
    begin, part, end = figures["warm"], figures["compared"], figures["updates"]
    head = ["of one update", f"updates {begin} to {begin + part}", f"{end - part} to {end}", "difference"]
    return markdown(head, [[*row, share] for row, share in zip(rows, shares, strict=True)])


TABLES: dict[str, Callable[[Any], str]] = {
    "iteration, one prompt": _iteration(1, 1.0),
    "iteration, six prompts": _iteration(6, 1.0),
    "iteration, guidance": _iteration(1, 4.0),
    "overhead": _overhead,
    "memory": _memory,
    "full-size": _full_size,
    "profile": _profile,
    "host": _host,
    "ideas": _ideas,
    "search": _search,
    "loops": _loops,
}
"""Place in the page -> what writes it; the section of the results is the part before the comma."""


def mean_and_error(values: Sequence[float]) -> str:
    """``mean ± standard error`` over seeds."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+.4f} ± {error:.4f}"


def learned(group: str) -> str:
    """What the methods of a group learned, means over seeds; empty if there is no run yet."""
    methods, rewards = learning.GROUPS[group]
    rows = [
        _learned_row(method.name, methods[0].name, reward)
        for reward, method in itertools.product(rewards, methods)
        if learning.of(method.name, reward)
    ]
    head = ["trained on", "method", "seconds", "updates", "forwards"]
    gains = (f"gain in `{name}`" for name in learning.WATCHED)
    return markdown([*head, *gains, "over the first row", "time to the flat plan's end"], rows) if rows else ""


def _learned_row(method: str, first: str, reward: str) -> list[str]:
    curves = learning.of(method, reward)
    ends = [curve[-1] for curve in curves.values()]
    base = _gains(first, reward, reward)
    over = [gain - base[seed] for seed, gain in _gains(method, reward, reward).items() if seed in base]
    shares = learning.shares_of_flat(method, reward)
    return [
        f"`{reward}`",
        method,
        *(f"{statistics.mean(end[key] for end in ends):.3g}" for key in ("seconds", "updates", "forwards")),
        *(mean_and_error(list(_gains(method, reward, name).values())) for name in learning.WATCHED),
        mean_and_error(over) if over and method != first else "",
        ", ".join("never" if share is None else f"{share:.2f}" for share in shares) or "-",
    ]


def _gains(method: str, reward: str, name: str) -> dict[int, float]:
    """Seed -> how much the held-out mean of ``name`` rose while ``reward`` was trained on."""
    curves = learning.of(method, reward)
    return {seed: curve[-1]["rewards"][name] - curve[0]["rewards"][name] for seed, curve in curves.items()}


@dataclass(frozen=True)
class Target:
    """What was asked for, what was measured (None: not yet), and how."""

    what: str
    limit: float
    value: float | None
    command: str
    at_least: bool = True

    def row(self) -> list[str]:
        sign = "at least" if self.at_least else "at most"
        if self.value is None:
            return [self.what, f"{sign} {self.limit:.3g}", "not measured", "", self.command]
        reached = self.value >= self.limit if self.at_least else self.value <= self.limit
        return [self.what, f"{sign} {self.limit:.3g}", _value(self.value), "yes" if reached else "**no**", self.command]


def _value(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"


def targets(results: dict[str, Any]) -> str:
    """Every target beside its measured figure."""
    rows = [target.row() for target in _targets(results)]
    return markdown(["target", "asked", "measured", "reached", "command"], rows)


def _targets(results: dict[str, Any]) -> Iterable[Target]:
    bench = "`python -m nox -s bench`"
    speed = (("DanceGRPO, 6 of 9", 2.4, 3.2), ("DanceGRPO, all 9", 3.2, 4.2), ("MixGRPO", 2.0, 2.5))
    included = [row for row in _figures(results, "iteration") if row["prompts"] == 6]
    for name, limit, _ in speed:
        yield Target(f"faster than {name}, included model, six prompts", limit, _ratio(included, name), bench)
    for one in _figures(results, "full-size"):
        with_it = ", checkpointing" if one["checkpointing"] else ""
        for name, _, limit in speed:
            what = f"faster than {name}, SD1.5, latents of {one['size']} by {one['size']}{with_it}"
            yield Target(what, limit, _ratio(one["methods"], name), "`python -m nox -s bench -- --only full-size`")
    for steps in (3, 2, 1):
        flat, tail = _ratio(included, "DanceGRPO, 6 of 9"), _ratio(included, f"TreeGRPO, tail of {steps}")
        value = flat / tail if flat and tail else None
        yield Target(f"faster than DanceGRPO, 6 of 9, with a tail of {steps}", 5, value, bench)
    for row in _figures(results, "overhead"):
        yield Target(f"overhead, prompts: {row['prompts']}", 1.05, row["overhead"], bench, False)
    trees, rewards = learning.TREES, learning.GROUPS["rivals"][1]
    for method, reward in itertools.product(trees, rewards):
        shares = learning.shares_of_flat(method.name, reward)
        value = statistics.mean(math.inf if share is None else share for share in shares) if shares else None
        if shares:
            what = f"time to the flat plan's final `{reward}`, {method.name}"
            yield Target(what, 1 / 3, value, "`python -m nox -s bench -- --learning`", False)
    memory = {row["leaves"]: row for row in _figures(results, "memory") if row["max_batch"] == 3}
    beyond = (
        (memory[243]["peak"] - memory[27]["peak"]) / (memory[243]["stored"] - memory[27]["stored"]) if memory else None
    )
    yield Target("memory of 243 leaves over 27, per byte of latents stored", 1.3, beyond, bench, False)
    imported = results.get("host", {}).get("figures", {}).get("import", {}).get("seconds")
    yield Target("seconds to import the pack", 0.3, imported, bench, False)


def _figures(results: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return list(results.get(section, {}).get("figures", []))


def _ratio(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return next((float(row["ratio"]) for row in rows if row["method"].startswith(name)), None)
