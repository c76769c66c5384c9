"""Prompts: read from whatever a text editor writes, and drawn so that all are met equally often."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegrpo_core.plan import derive_seed
from treegrpo_core.prompts import decoded, draw_prompts, prompt_lines

TEXT = "# mine\nfox on blue\n\n  small tulip, été 🦊  \n"
PROMPTS = ["fox on blue", "small tulip, été 🦊"]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        ("", "utf-8"),
        ("\ufeff", "utf-8"),
        ("\ufeff", "utf-16-le"),
        ("\ufeff", "utf-16-be"),
        ("\ufeff", "utf-32-le"),
        ("\ufeff", "utf-32-be"),
    ],
)
def test_a_file_of_any_unicode_encoding_is_read(mark, encoding, ending):
    data = (mark + TEXT).replace("\n", ending).encode(encoding)
    assert prompt_lines(decoded(data, "file: 'a.txt'"), "file") == PROMPTS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "owl\nfox \u2019\n".encode("cp1252"),
            "file: 'a.txt' is not text in UTF-8: line 2, byte 8 is 0x92; .* as UTF-8",
        ),
        ("fox\r\nété".encode("latin-1"), "line 2, byte 5 is 0xE9"),
        ("été".encode("utf-16-le"), "line 1, byte 0 is 0xE9"),
        (b"\xff\xfeo\x00\n\x00\x00\xd8x\x00", "not text in UTF-16: line 2, byte 6 is 0x00"),
        (b"fox\ncut \xf0\x9f", "line 2, byte 8 is 0xF0"),
        (b"fox\nhalf \xed\xa0\x80 pair", "line 2, byte 9 is 0xED"),
    ],
)
def test_any_other_file_is_refused_with_its_place(data, message):
    with pytest.raises(ValueError, match=message):
        decoded(data, "file: 'a.txt'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fox\r\nowl\0", r"text: line 2 has the character U\+0000"),
        ("# \ud83e", r"text: line 1 has the character U\+D83E"),
        ("f\0o\0x\0\n\0", r"line 1 has the character U\+0000.* save the file as UTF-8"),
    ],
)
def test_characters_that_are_no_text_are_refused_with_their_line(text, message):
    with pytest.raises(ValueError, match=message):
        prompt_lines(text, "text")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\x1d", "\x1e"])
def test_only_line_ends_end_a_line(character):
    assert prompt_lines(f"fox on{character}blue\nowl", "text") == [f"fox on{character}blue", "owl"]


def test_a_mark_in_the_text_box_or_between_joined_files_is_no_part_of_a_prompt():
    assert prompt_lines("\ufeff# mine\nfox\n\ufeffowl on\ufeff red", "text") == ["fox", "owl on red"]


@given(st.text())
def test_whatever_is_read_is_a_prompt(text):
    for line in prompt_lines(text.replace("\0", ""), "text"):
        assert line == line.strip() != ""
        assert not line.startswith("#")
        assert not set("\r\n") & set(line)


counts = st.integers(1, 60).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total)))


@given(counts, st.integers(0, 2**63 - 1))
def test_no_prompt_comes_twice_in_an_epoch_or_in_an_update(sizes, seed):
    total, count = sizes
    lines = list(map(str, range(total)))
    updates = [draw_prompts(lines, count, seed, step) for step in range(4 * total // count + 2)]
    assert all(len(set(update)) == len(update) == count for update in updates)
    stream = list(itertools.chain(*updates))
    for start in range(0, len(stream) - total + 1, total):
        assert sorted(stream[start : start + total]) == sorted(lines)


@given(counts, st.integers(0, 1000))
def test_an_update_is_the_same_whatever_was_drawn_before(sizes, step):
    """Nothing but seed and update counts: a run that goes on elsewhere draws what it would have drawn."""
    total, count = sizes
    lines = list(map(str, range(total)))
    one_after_the_other = [draw_prompts(lines, count, 7, past) for past in range(step - 3, step + 1) if past >= 0]
    draw_prompts(lines[1:] or lines, 1, 3, 5)
    draw_prompts(lines, count, 8, 0)
    assert draw_prompts(lines, count, 7, step) == one_after_the_other[-1]


@pytest.mark.parametrize(("total", "count"), [(12, 4), (5, 5), (9, 1)])
def test_where_updates_divide_the_epoch_its_order_is_the_seeds_shuffle(total, count):
    """As it always was, so that runs go on as they began."""
    lines = list(map(str, range(total)))
    for epoch in range(3):
        order = lines.copy()
        random.Random(derive_seed(1, "prompts", epoch)).shuffle(order)
        steps = range(epoch * total // count, (epoch + 1) * total // count)
        assert [line for step in steps for line in draw_prompts(lines, count, 1, step)] == order


def test_at_the_seam_of_two_epochs_only_what_came_twice_moves():
    lines, moved = list(map(str, range(10))), Counter()
    for seed in range(200):
        orders = []
        for epoch in range(2):
            orders.append(lines.copy())
            random.Random(derive_seed(seed, "prompts", epoch)).shuffle(orders[-1])
        seam, plain = draw_prompts(lines, 4, seed, 2), orders[0][8:] + orders[1][:2]
        twice = len(set(plain)) < 4
        moved[twice] += 1
        assert (seam == plain) != twice
        assert seam[:2] == plain[:2]
    assert moved[True] > 20, "it happens"


def test_a_hundred_thousand_lines_are_shuffled_once_and_not_for_every_prompt():
    lines = list(map(str, range(100_003)))

    def seconds(count):
        start = time.process_time()
        for step in range(20):
            draw_prompts(lines, count, count, step)
        return time.process_time() - start

    assert seconds(48) < 3 * seconds(1) + 0.1
