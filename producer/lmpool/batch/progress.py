"""How far a run is: a bar with rate and time left on a terminal, else a line from time to time."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from time import monotonic
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lmpool.cli import Terminal, say

_LINE_EVERY_S = 10.0


class Progress:
    """Shows what has been done, on standard error.

    Args:
        label: what is counted.
        is_silent: show nothing.

    Attributes:
        shards: how many are in place, and are there in all; of no use before something is asked.
        unplaced: lines that were answered, by the number of their shard, which is not in place.
    """

    def __init__(self, label: str = "lines", *, is_silent: bool = False) -> None:
        self._label = label
        self._is_silent = is_silent
        self._stack = ExitStack()
        self._bar: Bar | None = None
        self._total = self._done = self._here = self._positions = 0
        self._began = self._told = monotonic()
        self.shards = (0, 0)
        self.unplaced = Counter[int]()

    def begin(self, total: int, done: int) -> None:
        """Say how much there is, and how much of it was done before."""
        self._total, self._done = total, done
        self._began = self._told = monotonic()
        console = Terminal(err=True)
        if console.is_terminal:
            rates = TextColumn("{task.fields[rates]}")
            columns = (TextColumn(self._label), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), rates)
            self._bar = self._stack.enter_context(Bar(*columns, TimeRemainingColumn(), console=console))
            self._bar.add_task(self._label, total=total, completed=done, rates="")
        elif done:
            say(f"{done} of {total} {self._label} are done already", err=True)

    def advance(self, lines: int, positions: int) -> None:
        """Count what has been done."""
        self._done += lines
        self._here += lines
        self._positions += positions
        now = monotonic()
        seconds = max(now - self._began, 1e-3)
        rates = f"{self._here / seconds:.1f} {self._label}/s"
        if self._positions != self._here:
            rates += f", {self._positions / seconds:.0f} positions/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, rates=rates)
        elif not self._is_silent and now - self._told >= _LINE_EVERY_S:
            self._told = now
            left = (self._total - self._done) * seconds / max(self._here, 1)
            say(f"{self._done} of {self._total} {self._label}, {rates}, {_spoken(left)} left", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def counted(number: int, thing: str) -> str:
    """So many things, such as "1 shard" or "2 shards"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _spoken(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
