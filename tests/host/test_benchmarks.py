"""The benchmark's counts are exact, and little is spent beside the model; absolute times would prove nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import host
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


FULL_SIZE = """
import json
from benchmarks import full_size
full_size.FullSize.whole = False
one = full_size.session(8)
print(json.dumps([full_size.rows(one, (1, 3)), full_size.measure(one)]))
"""


def test_full_size_counts_are_those_of_whole_updates():
    """Counts as in the paper's comparison, where a backward is two forwards; half of them lie between measured ones."""
    done = subprocess.run([sys.executable, "-c", FULL_SIZE], cwd=ROOT, check=True, capture_output=True, text=True)
    rows, methods = json.loads(done.stdout.splitlines()[-1])
    assert [row["batch"] for row in rows] == [1, 3]
    assert [round(row["forwards"] + 3 * row["trained"]) for row in methods] == [216, 756, 999, 594]
    assert methods[0]["ratio"] == 1 < min(row["ratio"] for row in methods[1:])
    assert all(row["whole"] <= row["ratio"] for row in methods)


PROFILE = """
import json
from benchmarks import profile
print(json.dumps(profile.measure(["fox on blue"], 3)))
"""


def test_the_profile_accounts_for_the_whole_update():
    done = subprocess.run([sys.executable, "-c", PROFILE], cwd=ROOT, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert all(seconds > 0 for seconds in figures["items"].values()), "an item's function is not called any more"
    assert sum(figures["items"].values()) == pytest.approx(figures["seconds"], rel=0.3)
    assert figures["items"]["model forward"] > sum(figures["items"].values()) / 3
    assert figures["overhead"] < 0.5
    assert 0 < figures["operators"] < 1


def test_the_graph_costs_little_beside_the_update():
    figures = host.graph_seconds(3, 1)
    assert 0 < figures["loop"] < figures["update"]
    assert figures["loop"] < 2 * figures["queues"]


def test_the_first_queue_takes_longest_to_its_first_forward():
    figures = host.first_forward(2)
    assert 0 < figures["warm"]["low"] < figures["cold"]


def test_importing_the_pack_is_timed():
    figures = host.import_seconds(2)
    assert 0 < figures["low"] <= figures["seconds"] <= figures["high"]
