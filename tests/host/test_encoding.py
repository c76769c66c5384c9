"""Texts are encoded once, and again as soon as anything but the text has changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools.host import ROOT

PROBE = """
import importlib, json, sys, torch
from benchmarks.session import PACK, Session
session = Session(["fox on blue"])
encoding, encode = importlib.import_module(f"{PACK}.nodes.encoding"), session.parts["nodes.prompts"].Encode.execute
encoder, calls = session.clip.cond_stage_model, []
plain = encoder.encode_token_weights
encoder.encode_token_weights = lambda tokens: calls.append(1) or plain(tokens)
def count(clip, *texts):
    before = len(calls)
    found = encode([clip], list(texts)).args[0][0][0]
    return len(calls) - before, found
other = session.clip.clone()
other.patcher.patches_uuid = "a LoRA"
hooked = session.clip.clone()
hooked.apply_hooks_to_conds = "hooks"
swapped = session.clip.clone()
swapped.patcher.add_object_patch("transformer", encoder.transformer)
valued = [session.clip.clone(), session.clip.clone()]
for one in valued:
    one.patcher.add_object_patch("training", False)
class Wrapper:
    def __init__(self, inner):
        self.__dict__.update(inner.__dict__)
        self.tokenize, self.encode_from_tokens_scheduled = inner.tokenize, inner.encode_from_tokens_scheduled
with torch.inference_mode():
    seen = {"new": count(session.clip, "owl on red", "fox on red")}
    seen["again"] = count(session.clip, "owl on red", "fox on red")
    seen["one more"] = count(session.clip, "owl on red", "crab on red")
    seen["patched"] = count(other, "owl on red")
    seen["hooked"] = count(hooked, "owl on red")
    seen["hooked again"] = count(hooked, "owl on red")
    seen["swapped"] = count(swapped, "owl on red")
    seen["swapped again"] = count(swapped, "owl on red")
    seen["valued"] = count(valued[0], "owl on red")
    seen["valued again"] = count(valued[1], "owl on red")
    seen["wrapped"] = count(Wrapper(session.clip), "owl on red")
    size = encoding._size(session.clip.encode_from_tokens_scheduled(session.clip.tokenize("owl on red")))
    encoding.LIMIT = 2 * size
    for text in ("a", "b", "c"):
        encode([session.clip], [text])
    seen["long ago"] = count(session.clip, "a")
    seen["just now"] = count(session.clip, "c")
same = torch.equal(seen["new"][1], seen["again"][1])
print(json.dumps([{name: calls for name, (calls, _) in seen.items()}, same]))
"""


@pytest.fixture(scope="module")
def probed():
    """Calls of the encoder in each case, and whether what was kept equals what was new."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_text_is_encoded_once_and_stays_the_same(probed):
    calls, same = probed
    assert (calls["new"], calls["again"], calls["one more"]) == (2, 0, 1)
    assert same


def test_what_changes_the_encoder_is_seen(probed):
    calls, _ = probed
    assert (calls["patched"], calls["hooked"], calls["hooked again"]) == (1, 1, 1)
    assert (calls["swapped"], calls["swapped again"], calls["wrapped"]) == (1, 1, 1)


def test_a_patched_value_is_told_from_others_and_kept(probed):
    """Newer cores patch the data type of every encoder's arithmetic; nothing would ever be kept otherwise."""
    calls, _ = probed
    assert (calls["valued"], calls["valued again"]) == (1, 0)


def test_what_was_not_used_for_long_is_dropped(probed):
    calls, _ = probed
    assert (calls["long ago"], calls["just now"]) == (1, 0)
