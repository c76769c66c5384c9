"""Rewards of other packages, found through the entry points of the group ``treegrpo.rewards``.

A package says in its pyproject.toml::

    [project.entry-points."treegrpo.rewards"]
    prettiness = "their_package.prettiness:PrettinessReward"

The entry point's name is the reward's. It leads to a :class:`~.RewardInfo`, or to a class of rewards with one in its
attribute ``info``, which saves writing the target down a second time. In place of a RewardInfo a dict of its fields
will do: ComfyUI loads this pack under a name of its own, so other packages cannot always import it. The module is
imported when the names are listed, so heavy imports belong into functions.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from . import Checkpoint, RewardInfo

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
    own = getattr(loaded, "info", None)
    told = dict(_fields(loaded if own is None else own))
    if own is not None:
        told["target"] = f"{entry.module}:{entry.attr}"
    if not {"target", "measures", "range", "licence"} <= set(told):
        raise TypeError(f"{entry.value} is {loaded!r}, expected a RewardInfo or a class with one in its attribute info")
    told["checkpoints"] = tuple(Checkpoint(**_fields(each)) for each in told.get("checkpoints", ()))
    told["packages"] = tuple(told.get("packages", ()))
    info = RewardInfo(**told)
    texts = (info.target, info.measures, info.range, info.licence, info.source)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{texts} are not all texts")
    if info.target.startswith(".") or info.target.count(":") != 1:
        raise ValueError(f"its target is {info.target!r}, expected 'module:Class' with the module's full name")
    return info


def _fields(told: Any) -> dict[str, Any]:
    """The fields of a dict, or of a dataclass of another copy of this pack, which is another class than ours."""
    if isinstance(told, dict):
        return told
    if not dataclasses.is_dataclass(told) or isinstance(told, type):
        return {}
    return {field.name: getattr(told, field.name) for field in dataclasses.fields(told)}


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else entry.value
