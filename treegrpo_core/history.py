"""What later updates ask of a run's log, without reading it again after every one of thousands."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from .metrics import next_loss
from .signals import WINDOW, StepSpread

Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


class History:
    """A run's log in short. Of an update long ago it keeps one number, the loss."""

    def __init__(self, log: Iterable[Entry] = ()) -> None:
        """``log``: lines of metrics.jsonl, oldest first."""
        self.losses: list[float] = []
        """One finite number per update, see :func:`.metrics.next_loss`."""
        self.replay_noise = 0.0
        """Of the last update that measured it."""
        self.step_spread = StepSpread()
        self._first: list[Entry] = []
        self._last: deque[Entry] = deque(maxlen=WINDOW)
        for entry in log:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """The next line."""
        self.losses.append(next_loss(self.losses, entry.get("loss")))
        self.replay_noise = entry.get("replay_noise") or self.replay_noise
        self.step_spread.add(entry)
        (self._last if len(self._first) == WINDOW else self._first).append(entry)

    def ends(self) -> list[Entry]:
        """The first and the last :data:`.signals.WINDOW` lines; of a shorter log all of them."""
        return [*self._first, *self._last]
