"""What is kept of a run's log agrees with the log, and does not grow but for one number per update."""

from __future__ import annotations

import math

import pytest

from treegrpo_core.history import History
from treegrpo_core.signals import WINDOW, warnings


def entry(number):
    return {
        "iteration": number,
        "loss": float(number),
        "rewards": {"jpeg": float(number), "quality": -float(number)},
        "window": [number % 3],
        "step_spread": [float(number)],
        "replay_noise": 0.5 if number == 4 else 0.0,
    }


@pytest.mark.parametrize("count", [0, 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 5 * WINDOW])
def test_the_ends_say_what_the_whole_log_says(count):
    log = [entry(number) for number in range(count)]
    history, weights = History(log), {"jpeg": 1.0, "quality": 0.0}
    assert warnings(history.ends(), weights) == warnings(log, weights)
    assert bool(warnings(log, weights)) == (count >= 2 * WINDOW)
    assert history.ends() == (log if count <= 2 * WINDOW else log[:WINDOW] + log[-WINDOW:])
    assert history.losses == [float(number) for number in range(count)]


def test_adding_is_reading_again():
    log = [entry(number) for number in range(40)]
    whole, grown = History(log), History(log[:15])
    for one in log[15:]:
        grown.add(one)
    assert (grown.losses, grown.ends()) == (whole.losses, whole.ends())
    assert grown.step_spread.means() == whole.step_spread.means()
    assert whole.step_spread.means() == {
        step: pytest.approx(sum(n**2 for n in range(step, 40, 3)) / len(range(step, 40, 3))) for step in range(3)
    }
    assert grown.replay_noise == 0.5, "the last that was measured"


def test_where_a_loss_is_missing_the_curve_stays_where_it_was():
    """As json writes one that is no number: null."""
    history = History([{"loss": None}, {"loss": 2.0}, {}, {"loss": None}])
    assert history.losses == [0.0, 2.0, 2.0, 2.0]
    assert all(map(math.isfinite, history.losses))
