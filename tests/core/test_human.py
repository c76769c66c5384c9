"""Judgements of people become scores, and the log gives the same scores again."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from treegrpo_core.cli import main
from treegrpo_core.human import (
    MODES,
    Choice,
    Judging,
    Next,
    Ranking,
    Skip,
    Stars,
    Undo,
    bradley_terry,
    pairs_to_ask,
)
from treegrpo_core.human_log import Judgement, append, fingerprint, now, read_dataset, read_log


def order(scores):
    return sorted(range(len(scores)), key=lambda leaf: -scores[leaf])


def test_bradley_terry_recovers_the_order_of_all_comparisons():
    wins = [(better, worse) for better, worse in itertools.combinations([3, 0, 4, 1, 2], 2)]
    assert order(bradley_terry(wins, 5)) == [3, 0, 4, 1, 2]


def test_bradley_terry_recovers_strengths_from_noisy_comparisons():
    truth, chance = [1.5, 0.5, -0.5, -1.5], random.Random(0)
    wins = [
        (a, b) if chance.random() < 1 / (1 + math.exp(truth[b] - truth[a])) else (b, a)
        for a, b in itertools.combinations(range(4), 2)
        for _ in range(400)
    ]
    assert bradley_terry(wins, 4) == pytest.approx(truth, abs=0.25)


def test_bradley_terry_is_finite_where_a_leaf_always_wins():
    scores = bradley_terry([(0, 1)] * 1000, 3)
    assert all(math.isfinite(score) for score in scores)
    assert scores[0] > scores[2] == 0 > scores[1]


def test_bradley_terry_is_antisymmetric_and_forgets_names():
    wins = [(0, 1), (1, 2), (0, 3), (3, 2), (3, 1)]
    scores = bradley_terry(wins, 4)
    assert bradley_terry([(b, a) for a, b in wins], 4) == pytest.approx([-score for score in scores], abs=1e-4)
    moved = bradley_terry([(3 - a, 3 - b) for a, b in wins], 4)
    assert moved[::-1] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("wins", [[], [(0, 1), (1, 2), (2, 0)], [(0, 1), (1, 0)]], ids=str)
def test_what_nothing_tells_apart_is_exactly_equal(wins):
    """Advantages divide by the spread of the rewards, so a difference in the last digit would be trained on."""
    assert set(bradley_terry(wins, 3)) == {0.0}


@pytest.mark.parametrize("leaves", [2, 3, 4, 7, 27])
def test_the_pairs_are_different_and_the_first_of_them_connect_all_leaves(leaves):
    every = pairs_to_ask(leaves, 10**6, "x")
    assert len({frozenset(pair) for pair in every}) == len(every) == leaves * (leaves - 1) // 2
    reached = {0}
    for _ in range(leaves):
        reached |= {leaf for pair in pairs_to_ask(leaves, leaves, "x") if reached & set(pair) for leaf in pair}
    assert reached == set(range(leaves))


def test_stars_are_the_scores_and_a_leaf_without_them_has_the_mean():
    judging = Judging("stars", 2, 4)
    for answer in (Stars(leaf=0, stars=5), Stars(leaf=1, stars=1), Stars(leaf=1, stars=3), Skip(leaves=(2,))):
        judging.add(answer)
    assert judging.stars == [5, 3, None, None]
    judging.add(Next())
    assert judging.prompt == 1
    judging.add(Next())
    assert judging.prompt is None
    assert judging.scores().tolist() == [[5, 0], [3, 0], [4, 0], [4, 0]]


def test_a_ranking_is_one_for_the_best_and_zero_for_the_last():
    judging = Judging("rank", 2, 3)
    judging.add(Ranking(order=(2, 0, 1)))
    judging.add(Skip(leaves=(0, 1, 2)))
    assert judging.prompt is None
    assert judging.scores().tolist() == [[0.5, 0], [0, 0], [1, 0]]


def test_pairs_end_when_all_were_asked_and_skipped_ones_do_not_count():
    judging = Judging("pairs", 1, 4)
    asked = []
    while judging.pair:
        asked.append(judging.pair)
        better, worse = sorted(judging.pair)
        judging.add(Skip(leaves=judging.pair) if {better, worse} == {0, 3} else Choice(better=better, worse=worse))
    assert len(asked) == 6
    assert order(judging.scores()[:, 0].tolist()) == [0, 1, 2, 3]


def test_as_many_pairs_are_asked_as_the_user_wants():
    judging = Judging("pairs", 2, 27, comparisons=3)
    answers = 0
    while judging.pair:
        judging.add(Skip(leaves=judging.pair))
        answers += 1
    assert answers == 2 * 3
    assert not judging.scores().any()
    judging = Judging("pairs", 1, 27)
    assert len(judging.pairs[0]) == 54


def test_undo_takes_one_answer_back_also_that_which_ended_a_prompt():
    judging = Judging("stars", 2, 2)
    with pytest.raises(ValueError, match="no answer to take back"):
        judging.add(Undo())
    for answer in (Stars(leaf=0, stars=5), Next(), Stars(leaf=1, stars=2)):
        judging.add(answer)
    judging.add(Undo())
    assert judging.prompt == 1
    judging.add(Undo())
    assert judging.prompt == 0
    assert judging.stars == [5, None]
    assert judging.done == 1


@pytest.mark.parametrize(
    ("mode", "answer", "message"),
    [
        ("stars", Stars(leaf=3, stars=1), "leaf 3 does not exist; the leaves are 0 to 2"),
        ("stars", Skip(leaves=(-1,)), "leaf -1 does not exist"),
        ("stars", Choice(better=0, worse=1), "'choice' does not belong to mode 'stars'"),
        ("rank", Ranking(order=(0, 1)), "each of the 3 leaves once"),
        ("rank", Ranking(order=(0, 1, 1)), "each of the 3 leaves once"),
        ("pairs", Choice(better=1, worse=1), "were not asked"),
    ],
)
def test_an_answer_that_does_not_fit_changes_nothing(mode, answer, message):
    judging = Judging(mode, 1, 3)
    with pytest.raises(ValueError, match=message):
        judging.add(answer)
    assert judging.done == 0


def judge(folder, judging, answers, session="a"):
    """Answer and write the log as the node does."""
    pictures = [[f"{prompt} {leaf}".encode() for leaf in range(judging.leaves)] for prompt in range(judging.prompts)]
    for answer in answers:
        index = judging.place(answer)
        judging.add(answer)
        names = tuple(map(fingerprint, pictures[index]))
        line = Judgement(
            time=now(), session=session, run="r", update=7, mode=judging.mode, prompt_index=index, prompt=f"p{index}",
            leaves=names, answer=answer,
        )  # fmt: skip
        append(folder, line, pictures[index])


def answers_of(mode, judging):
    if mode == "stars":
        return [Stars(leaf=0, stars=4), Undo(), Stars(leaf=0, stars=5), Next(), Undo(), Stars(leaf=2, stars=1), Next()]
    if mode == "rank":
        return [Ranking(order=(2, 1, 0)), Undo(), Ranking(order=(1, 2, 0))]
    return [Choice(better=a, worse=b) for a, b in judging.pairs[0]]


@pytest.mark.parametrize("mode", MODES)
def test_the_log_gives_the_scores_again(tmp_path, mode):
    judging = Judging(mode, 2, 3)
    judge(tmp_path, judging, answers_of(mode, judging))
    with (tmp_path / "human.jsonl").open("a") as log:
        log.write('{"half a li')
    (row,) = read_dataset(tmp_path)
    assert row["scores"] == pytest.approx(judging.scores()[:, 0].tolist())
    assert (row["run"], row["update"], row["prompt"], row["mode"]) == ("r", 7, "p0", mode)
    assert [(tmp_path / name).read_bytes() for name in row["pictures"]] == [b"0 0", b"0 1", b"0 2"]


def test_the_command_writes_the_dataset_and_overwrites_nothing(tmp_path, capsys):
    for session in "ab":
        judging = Judging("rank", 1, 3)
        judge(tmp_path, judging, [Ranking(order=(0, 2, 1))], session)
    command = ["human", str(tmp_path), "--output", str(tmp_path / "data.jsonl")]
    assert main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in rows] == [[1, 0, 0.5]] * 2
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["human", str(tmp_path / "none"), "--output", str(tmp_path / "x")]) == 2
    assert "has no human.jsonl" in capsys.readouterr().err


def test_a_damaged_line_is_named_and_left_out(tmp_path, caplog):
    (tmp_path / "human.jsonl").write_text('{"time": 1}\n')
    assert read_log(tmp_path) == []
    assert "human.jsonl, line 1 is left out" in caplog.text
