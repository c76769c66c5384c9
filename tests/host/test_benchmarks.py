"""The benchmark's counts are exact, and little is spent beside the model; absolute times would prove nothing."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks import host, learning, report
from benchmarks.search import best_of
from tools.host import ROOT

pytestmark = pytest.mark.once

MEASURE = """
import json
from benchmarks import iteration
rows = iteration.measure(["fox on blue"], 1.0, 2)
print(json.dumps([rows, iteration.overhead(["fox on blue"], 5)]))
"""


@pytest.fixture(scope="module")
def figures():
    """Rows of every method and the overhead, from a process of their own."""
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_method_spends_the_forwards_of_its_plan(figures):
    counts = {row["method"]: (row["forwards"], row["trained"]) for row in figures[0]}
    law = [0.5**start for start in range(7)]
    mean_start = sum(start * weight for start, weight in enumerate(law)) / sum(law)
    assert counts.pop("TreeGRPO") == pytest.approx((202 - 26 * mean_start, 13))
    assert counts == {
        "TreeGRPO, tail of 3": (95, 13),
        "TreeGRPO, tail of 2": (68, 13),
        "TreeGRPO, tail of 1": (41, 13),
        "DanceGRPO, 6 of 9 steps trained": (270, 162),
        "DanceGRPO, all 9 steps trained; Flow-GRPO": (270, 243),
        "DanceGRPO with the first step shared, 6 of 9 trained": (244, 136),
        "MixGRPO, window of 4": (270, 108),
        "BranchGRPO, 3 splits in 3": (118, 91),
    }


def test_the_tree_is_clearly_faster_than_flat_plans(figures):
    ratios = {row["method"]: row["ratio"] for row in figures[0]}
    assert ratios["DanceGRPO, 6 of 9 steps trained"] > 1.2
    assert ratios["DanceGRPO, all 9 steps trained; Flow-GRPO"] > 1.5
    assert ratios["TreeGRPO, tail of 1"] < 0.95


def test_little_is_spent_beside_the_models_own_work(figures):
    assert figures[1]["overhead"] < 1.5


def test_the_page_has_a_place_for_every_figure_and_every_target_a_verdict(tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    shutil.copy(report.PAGE, page)
    monkeypatch.setattr(report, "PAGE", page)
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    report.fill(report.texts(results))
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for line in report.targets(results).splitlines()[2:]:
        assert line.split("|")[4].strip() in ("yes", "**no**", ""), line
        assert "not measured" not in line


def test_time_to_a_level_lies_between_the_evaluations_around_it():
    points = [{"seconds": seconds, "rewards": {"a": value}} for seconds, value in ((0, 1.0), (10, 2.0), (20, 4.0))]
    assert learning.seconds_to_reach(points, "a", 3.0) == 15
    assert learning.seconds_to_reach(points, "a", 1.0) == 0
    assert learning.seconds_to_reach(points, "a", 5.0) is None


FULL_SIZE = """
import json
from benchmarks import full_size
full_size.FullSize.whole = False
one = full_size.session(8)
print(json.dumps([full_size.rows(one, (1, 3)), full_size.measure(one)]))
"""


def test_full_size_counts_are_those_of_whole_updates():
    """A backward counts as two forwards; most of the tree's starts lie between measured ones."""
    done = subprocess.run([sys.executable, "-c", FULL_SIZE], cwd=ROOT, check=True, capture_output=True, text=True)
    rows, methods = json.loads(done.stdout.splitlines()[-1])
    assert [row["batch"] for row in rows] == [1, 3]
    assert [round(row["forwards"] + 3 * row["trained"]) for row in methods] == [216, 756, 999, 594]
    assert methods[0]["ratio"] == 1 < min(row["ratio"] for row in methods[1:])


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


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_the_expected_best_of_n_is_the_mean_over_all_ways_to_draw_them(number):
    pool = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    draws = [pool[:, list(draw)] for draw in itertools.combinations(range(5), number)]
    best = [draw.gather(1, draw[:1].argmax(1, keepdim=True).expand(2, 1, 3))[:, 0] for draw in draws]
    assert torch.allclose(best_of(pool, number).float(), torch.stack(best).mean(0), atol=1e-6)
    if number < 5:
        halfway = (best_of(pool, number) + best_of(pool, number + 1)) / 2
        assert torch.allclose(best_of(pool, number + 0.5), halfway)
