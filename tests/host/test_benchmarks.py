"""The benchmark's counts are exact, and little is spent beside the model; absolute times would prove nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.search import best_of
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


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_the_expected_best_of_n_is_the_mean_over_all_ways_to_draw_them(number):
    pool = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    draws = [pool[:, list(draw)] for draw in itertools.combinations(range(5), number)]
    best = [draw.gather(1, draw[:1].argmax(1, keepdim=True).expand(2, 1, 3))[:, 0] for draw in draws]
    assert torch.allclose(best_of(pool, number).float(), torch.stack(best).mean(0), atol=1e-6)
    if number < 5:
        halfway = (best_of(pool, number) + best_of(pool, number + 1)) / 2
        assert torch.allclose(best_of(pool, number + 0.5), halfway)
