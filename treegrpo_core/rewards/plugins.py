"""Rewards of other packages, found through the entry points of the group ``treegrpo.rewards``.

A package says in its pyproject.toml::

    [project.entry-points."treegrpo.rewards"]
    prettiness = "their_package.prettiness:PrettinessReward"

The entry point's name is the reward's. It leads to a :class:`~.RewardInfo`, or to a class of rewards with one in its
attribute ``info``, which saves writing the target down a second time. The module is imported when the names are listed,
so heavy imports belong into functions.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from . import RewardInfo

GROUP = "treegrpo.rewards"

_log = logging.getLogger(__name__)


@cache
def found_rewards(group: str, taken: frozenset[str]) -> dict[str, RewardInfo]:
    """The rewards of other packages by name; looked for once in a process.

    What is broken, or has a name that is taken, is logged and left out: no package can break the others' rewards.
    """
    found: dict[str, RewardInfo] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        if entry.name in taken or entry.name in found:
            _log.warning("TreeGRPO: reward %r of %s is left out: the name is taken", entry.name, _package(entry))
            continue
        try:
            found[entry.name] = _info(entry)
        except (Exception, SystemExit) as error:
            _log.warning("TreeGRPO: reward %r of %s is left out: %r", entry.name, _package(entry), error)
    return found


def _info(entry: EntryPoint) -> RewardInfo:
    loaded = entry.load()
    info = loaded if isinstance(loaded, RewardInfo) else getattr(loaded, "info", None)
    if not isinstance(info, RewardInfo):
        raise TypeError(f"{entry.value} is {loaded!r}, expected a RewardInfo or a class with one in its attribute info")
    if info is not loaded:
        info = dataclasses.replace(info, target=f"{entry.module}:{entry.attr}")
    if info.target.startswith(".") or info.target.count(":") != 1:
        raise ValueError(f"its target is {info.target!r}, expected 'module:Class' with the module's full name")
    return info


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else entry.value
