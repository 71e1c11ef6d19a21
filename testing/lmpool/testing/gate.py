"""Holding up a backend from another thread, and letting go of it at once."""

from __future__ import annotations

import threading
import time


class Gate:
    """What steps pass through; another thread may close it. It starts open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_shut = False
        self._is_over = False

    def shut(self) -> None:
        """Let no step end any more."""
        self._set(is_shut=True)

    def open(self) -> None:
        """Let steps end."""
        self._set(is_shut=False)

    def give_up(self) -> None:
        """Let all steps end at once, now and later."""
        self._is_over = True
        self._set(is_shut=False)

    def _set(self, *, is_shut: bool) -> None:
        with self._changed:
            self._is_shut = is_shut
            self._changed.notify_all()

    def pass_after(self, seconds: float) -> None:
        """Wait for `seconds`, and until the gate is open."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_over and (self._is_shut or (rest := end - time.monotonic()) > 0):
                self._changed.wait(None if self._is_shut else rest)
