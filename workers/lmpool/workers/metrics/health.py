"""Whether a worker lives, and whether it takes jobs: written by its event loop, read by whoever asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICKS_A_LEASE = 10

Clock = Callable[[], float]


class Health:
    """The state of one worker. Its loop tells it, other threads ask.

    Args:
        lease_s: how long the loop or the server may be silent.
        step_timeout_s: how long a step of the backend may take.
        clock: monotonic seconds.

    Attributes:
        state: "loading", "ready" or "draining".
        broken: why the backend cannot go on, or "".
        trouble: why the last heartbeat failed, or "".
    """

    def __init__(self, lease_s: float, step_timeout_s: float, clock: Clock = time.monotonic) -> None:
        self._lease_s = lease_s
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._ticked_at = self._answered_at = clock()
        self._stepping_since: Callable[[], float | None] = lambda: None
        self.state = "loading"
        self.broken = ""
        self.trouble = ""

    def start(self) -> None:
        """Show from now on that the running event loop runs."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(self._lease_s / _TICKS_A_LEASE, self.start)

    def end(self) -> None:
        """The event loop ends."""
        self._timer.cancel()

    def watch(self, stepping_since: Callable[[], float | None]) -> None:
        """Look at a backend: `stepping_since` tells since when its present step runs, or None."""
        self._stepping_since = stepping_since

    def answered(self) -> None:
        """The server has answered a heartbeat."""
        self._answered_at, self.trouble = self._clock(), ""

    @property
    def silent_s(self) -> float:
        """Seconds since the server last answered a heartbeat."""
        return self._clock() - self._answered_at

    def why_dead(self) -> str:
        """Why the process is to be replaced; "" when it lives."""
        silent_s = self._clock() - self._ticked_at
        if silent_s > self._lease_s:
            return f"the event loop has not run for {silent_s:.1f} s; a lease is {self._lease_s:g} s"
        if self.broken:
            return f"the backend broke: {self.broken}"
        # Read once: the backend's thread changes it.
        since = self._stepping_since()
        # A lease more: the watchdog ends the worker by itself, with its prompts handed back.
        step_s, limit_s = 0.0 if since is None else self._clock() - since, self._step_timeout_s + self._lease_s
        if step_s > limit_s:
            return f"the backend's step has run for {step_s:.0f} s; more than {limit_s:g} s is not normal"
        return ""

    def why_not_ready(self) -> str:
        """Why the worker takes no jobs; "" when it does."""
        if why := self.why_dead():
            return why
        if self.state == "loading":
            return "the model is loading"
        if self.state != "ready":
            return f"the worker is {self.state}"
        if self.trouble:
            return f"the last heartbeat failed: {self.trouble}"
        if self.silent_s > self._lease_s:
            return f"the server has not answered a heartbeat for {self.silent_s:.1f} s"
        return ""
