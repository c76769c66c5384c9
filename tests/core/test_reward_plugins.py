"""Rewards of other packages: installed, broken, badly named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from treegrpo_core.rewards import REWARDS, Checkpoint, known_rewards, load_reward
from treegrpo_core.rewards.plugins import found_rewards

MODULE = '''
import torch
from treegrpo_core.rewards import RewardInfo

class Red:
    """The mean of the red channel."""
    name = "red"
    info = RewardInfo("not.looked:At", "How red a picture is.", range="0 to 1", licence="MIT", needs_prompt=False)
    def score(self, images, prompts):
        return images[..., 0].mean((1, 2))

class Scaled:
    name = "scaled"
    def __init__(self, source, locate):
        self.factor = float(source)
    def score(self, images, prompts):
        return self.factor * images.mean((1, 2, 3))

SCALED = RewardInfo("{module}:Scaled", "Mean.", range="any", licence="MIT", source="the factor")
DOTTED = RewardInfo(".jpeg:JpegReward", "Ours.", range="any", licence="MIT")
NUMBER = 5
'''

WITHOUT_THE_PACK = '''
import torch
from dataclasses import dataclass

class Blue:
    """The mean of the blue channel, less what its file says."""
    name = "blue"
    info = dict(
        measures="How blue a picture is.", range="0 to 1", licence="MIT",
        checkpoints=[dict(file="blue.safetensors", repository="them/blue", path="blue.safetensors")],
    )
    def __init__(self, source, locate):
        self.path = locate
    def score(self, images, prompts):
        return images[..., 2].mean((1, 2))

@dataclass
class RewardInfo:
    """As another copy of the pack has it."""
    target: str
    measures: str = "How blue."
    range: str = "0 to 1"
    licence: str = "MIT"

COPY = RewardInfo("{module}:Blue")
NEWER = dict(target="{module}:Blue", measures="", range="", licence="", colour="blue")
LESS = dict(target="{module}:Blue")
ODD = dict(target="{module}:Blue", measures=5, range="", licence="")
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    found_rewards.cache_clear()
    yield tmp_path
    found_rewards.cache_clear()


def install(site: Path, package: str, entries: dict[str, str], module: str = MODULE) -> None:
    (site / f"{package}.py").write_text(module.replace("{module}", package))
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {package}{target}" for name, target in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[treegrpo.rewards]", *lines, ""]))


def test_without_other_packages_there_are_our_rewards() -> None:
    found_rewards.cache_clear()
    assert list(known_rewards())[: len(REWARDS)] == list(REWARDS)


def test_a_class_and_an_info_are_found_and_score(site: Path) -> None:
    install(site, "red_package", {"red": ":Red", "scaled": ":SCALED"})
    assert set(known_rewards()) - set(REWARDS) == {"red", "scaled"}
    assert known_rewards()["red"].measures == "How red a picture is."
    images = torch.tensor([1.0, 0.5, 0.0]).expand(2, 4, 4, 3)
    assert load_reward("red").score(images, ["", ""]).tolist() == [1.0, 1.0]
    assert load_reward("scaled", source="2").score(images, ["", ""]).tolist() == [1.0, 1.0]


def test_a_package_needs_nothing_of_ours(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    targets = {"blue": ":Blue", "copy": ":COPY", "newer": ":NEWER", "less": ":LESS", "odd": ":ODD"}
    install(site, "blue_package", targets, WITHOUT_THE_PACK)
    with caplog.at_level(logging.WARNING):
        known = known_rewards()
    assert set(known) - set(REWARDS) == {"blue", "copy"} and len(caplog.messages) == 3
    assert known["blue"].target == known["copy"].target == "blue_package:Blue"
    (checkpoint,) = known["blue"].checkpoints
    assert isinstance(checkpoint, Checkpoint) and checkpoint.repository == "them/blue"
    assert load_reward("blue").score(torch.ones(1, 2, 2, 3), [""]).tolist() == [1.0]


def test_broken_packages_are_logged_and_leave_the_others(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "good_package", {"red": ":Red"})
    install(site, "raising_package", {"raises": ":Red"}, "raise RuntimeError('no such driver')")
    install(site, "leaving_package", {"leaves": ":Red"}, "import sys; sys.exit(3)")
    install(site, "syntax_package", {"syntax": ":Red"}, "def (")
    install(site, "odd_package", {"number": ":NUMBER", "dotted": ":DOTTED", "absent": ":Nowhere", "module": ""})
    (site / "good_package-1.0.dist-info" / "RECORD").write_text("")
    with caplog.at_level(logging.WARNING):
        assert set(known_rewards()) - set(REWARDS) == {"red"}
    for name in ("raises", "leaves", "syntax", "number", "dotted", "absent", "module"):
        assert sum(f"'{name}' of package" in line and "left out" in line for line in caplog.messages) == 1
    assert "no such driver" in caplog.text and "expected a RewardInfo" in caplog.text
    with pytest.raises(ValueError, match="unknown reward 'raises'.*red"):
        load_reward("raises")


def test_a_name_that_is_taken_is_refused(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "first_package", {"jpeg": ":Red", "red": ":Red"})
    install(site, "second_package", {"red": ":Red"})
    with caplog.at_level(logging.WARNING):
        known = known_rewards()
    assert known["jpeg"] is REWARDS["jpeg"] and known["red"].target == "first_package:Red"
    assert [line for line in caplog.messages if "the name is taken" in line] == [
        "TreeGRPO: reward 'jpeg' of package first_package is left out: the name is taken",
        "TreeGRPO: reward 'red' of package second_package is left out: the name is taken",
    ]


def test_the_packages_are_imported_once(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "raising_package", {"raises": ":Red"}, "raise RuntimeError('no such driver')")
    with caplog.at_level(logging.WARNING):
        known_rewards(), known_rewards()
    assert len(caplog.messages) == 1
