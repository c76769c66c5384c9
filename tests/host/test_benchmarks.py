"""The benchmark's counts are exact, and little is spent beside the model; absolute times would prove nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools.host import ROOT

MEASURE = """
import json
from benchmarks import iteration
rows = iteration.measure(["fox on blue"], 1.0, 3)
print(json.dumps([rows, iteration.overhead(["fox on blue"], 5)]))
"""


@pytest.fixture(scope="module")
def figures():
    """Rows of every method and the overhead, from a process of their own."""
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_method_spends_the_forwards_of_its_plan(figures):
    counts = {row["method"].split(",")[0]: (row["forwards"], row["trained"]) for row in reversed(figures[0])}
    assert counts == {
        "TreeGRPO": (202, 13),
        "DanceGRPO": (270, 162),
        "DanceGRPO with the first step shared": (244, 136),
        "MixGRPO": (270, 108),
        "BranchGRPO": (118, 91),
    }
    tail = next(row for row in figures[0] if "tail" in row["method"])
    assert (tail["forwards"], tail["trained"]) == (94, 13)


def test_the_tree_is_clearly_faster_than_flat_plans(figures):
    ratios = {row["method"]: row["ratio"] for row in figures[0]}
    assert ratios["DanceGRPO, 6 of 9 steps trained"] > 1.2
    assert ratios["DanceGRPO, all 9 steps trained; Flow-GRPO"] > 1.5


def test_little_is_spent_beside_the_models_own_work(figures):
    assert figures[1]["overhead"] < 1.5
