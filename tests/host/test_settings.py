"""Every input of the training nodes reaches the method: no setting is ignored."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools.host import ROOT

UPDATE = {
    "clip": 2e-3,
    "kl": 0.25,
    "passes": 3,
    "max_batch": 7,
    "max_grad_norm": 0.5,
    "advantage_clip": 4.0,
    "gradient_checkpointing": True,
    "clip_high": 3e-3,
    "ratio_norm": True,
    "kl_reference": "average",
}
ADVANTAGE = {"estimator": "uniform", "normalisation": "siblings", "train_steps": 2, "train_share": 0.5}
PROBE = """
import importlib, json, sys
from benchmarks.session import PACK, Method, Session
update, advantage = json.loads(sys.argv[1])
session, seen = Session(["fox on blue"]), []
nodes = {name: importlib.import_module(f"{PACK}.nodes.{name}") for name in ("update", "advantage", "policy")}
class Enough(Exception):
    pass
def updated(trees, settings):
    seen.append(settings.model_dump())
    raise Enough
class Tree:
    def with_advantages(self, **settings):
        seen.append(settings)
tree, session.run.update = session.tree(Method("")), updated
handle = nodes["policy"].PolicyHandle(session.run, session.patcher)
lists = {name: [value] for name, value in update.items()}
try:
    nodes["update"].LoRAUpdate.execute(policy=[handle], tree=[tree], **lists)
except Enough:
    pass
nodes["advantage"].TreeAdvantage.execute(tree=Tree(), **advantage)
schemas = (nodes["update"].LoRAUpdate, nodes["advantage"].TreeAdvantage)
print(json.dumps([seen, [[one.id for one in node.define_schema().inputs] for node in schemas]]))
"""


@pytest.fixture(scope="module")
def probed():
    """What the two nodes asked for, and the names of their inputs."""
    command = [sys.executable, "-c", PROBE, json.dumps([UPDATE, ADVANTAGE])]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_setting_reaches_the_update_and_the_advantages(probed):
    assert probed[0] == [UPDATE, ADVANTAGE]


def test_no_input_is_left_out_of_this_test(probed):
    update, advantage = (set(names) for names in probed[1])
    assert update == UPDATE.keys() | {"policy", "tree"}
    assert advantage == ADVANTAGE.keys() | {"tree"}


SWITCHES = """
import importlib, json, sys, torch
from benchmarks.session import PACK, load_pack
load_pack()
import comfy.model_management as management
guided, names = importlib.import_module(f"{PACK}.nodes.guided"), ("in_training", "training_fp8_bwd")
def seen():
    return [*(getattr(management, name, None) for name in names), torch.is_inference_mode_enabled()]
def around():
    with torch.inference_mode():
        before = seen()
        with guided.outside_inference_mode():
            inside = seen()
        return [before, inside, seen()]
management.in_training, management.training_fp8_bwd = False, True
newer = around()
del management.in_training, management.training_fp8_bwd
print(json.dumps([newer, around()]))
"""


def test_core_knows_of_our_training_and_nothing_of_its_own_trainer_is_left_on():
    done = subprocess.run([sys.executable, "-c", SWITCHES], cwd=ROOT, check=True, capture_output=True, text=True)
    newer, older = json.loads(done.stdout.splitlines()[-1])
    assert newer == [[False, True, True], [True, False, False], [False, True, True]]
    assert older == [[None, None, True], [None, None, False], [None, None, True]]
