"""The included model's tokenizer: any text of any length ends, and every word of it is there, in order."""

from __future__ import annotations

import json
import subprocess
import sys

from tools.host import ROOT

PROBE = """
import faulthandler, importlib, json
from benchmarks.session import PACK, load_pack
from hypothesis import given, settings, strategies as st
load_pack()
tiny = importlib.import_module(f"{PACK}.nodes.tiny_model")
clip = tiny._load_clip()
known = [word for word in tiny.VOCABULARY if not word.startswith("[")]

def rows(text):
    faulthandler.dump_traceback_later(10, exit=True)  # one that never ends also eats memory
    found = clip.tokenize(text)
    faulthandler.cancel_dump_traceback_later()
    assert all(len(row) == tiny.MAX_TOKENS and row[0][0] == tiny.START for row in found), found
    return found

def check(words, text):
    wanted = [tiny.VOCABULARY.index(word if word in known else "[UNK]") for word in words]
    assert [token for row in rows(text) for token, _ in row if token > tiny.END] == wanted, text

@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def any_text(text):
    rows(text)

@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*known, "unheard", "x" * 5000, "\\u00e9t\\u00e9", "\\U0001f98a"]), max_size=40))
def any_number_of_words(words):
    check(words, " ".join(words))

@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from(known), min_size=1, max_size=9), max_size=9), st.floats(0.1, 2))
def any_groups_of_a_weight(groups, weight):
    check(sum(groups, []), " ".join(f"({' '.join(group)}:{weight:.2f})" for group in groups))

for count in (*range(30), 1000, 10_000):
    check(["fox"] * count, "fox " * count)
for blank in ("", "   ", "\\n", "\\u2003\\u2028"):
    check([], blank)
any_text(), any_number_of_words(), any_groups_of_a_weight()
shapes = [list(clip.encode_from_tokens(rows("fox " * count)).shape) for count in (0, 6, 7, 12, 13)]
print(json.dumps([rows("(fox:1.3) on blue"), rows("fox on blue"), shapes]))
"""


def test_any_text_of_any_length_ends_with_all_of_its_words():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    weighted, plain, shapes = json.loads(done.stdout.splitlines()[-1])
    assert [token for token, _ in weighted[0]] == [token for token, _ in plain[0]]
    assert [weight for _, weight in weighted[0]] == [1.0, 1.3, *[1.0] * 6]
    assert shapes == [[1, rows * 8, 128] for rows in (1, 1, 2, 2, 3)], "six words fill a row"
