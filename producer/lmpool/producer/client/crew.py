"""The workers that serve a client's model, and what becomes of requests while there are none."""

from __future__ import annotations

import math

from lmpool.errors import DeadlineExceeded, NoWorker
from lmpool.producer.client.connections import Channel

_RESTART_S = 5.0
_LEAST_GAP_S = 2.0


class Crew:
    """Who serves the model, as far as the client has seen.

    Args:
        channel: the client's connections.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._count = 0
        self._is_loading = False
        self._missing_since: float | None = None
        self._looked_at = -math.inf

    async def meet(self, model: str) -> None:
        """Look for the first time.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        self._count = (await self._channel.lobby.alive(model)).serving

    def rest(self) -> None:
        """They are not looked for now: nobody waits, or nobody can be seen."""
        self._missing_since = None

    async def look(self, now: float) -> NoWorker | None:
        """Look who is there; returns the end of all requests when nobody has been for long.

        That is a lease, and time enough for one that is started again to say so; while one loads the model, requests
        wait for it as long as they may. Between two looks that are further apart than a lease, for this client was held
        up, workers may have lived and been silent again: so nobody is missed since before the second.

        Args:
            now: the event loop's time.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        card = self._channel.model.card
        gap, self._looked_at = now - self._looked_at, now
        alive = await self._channel.lobby.alive(card.name)
        self._count, self._is_loading = alive.serving, not alive.serving and alive.loading > 0
        if self._count or self._is_loading:
            self._missing_since = None
            return None
        # Heartbeats are writes: where the server refuses these, who lives cannot be seen, and is not missed.
        await self._channel.check_writes(card.name)
        if self._missing_since is None or gap > max(card.lease_s, _LEAST_GAP_S):
            self._missing_since = now
        elif now - self._missing_since >= max(card.lease_s, _RESTART_S):
            seconds = now - self._missing_since
            return NoWorker(
                f"no live worker has served {card.name!r} for {seconds:.0f} s: start one with `{card.start_command}`"
            )
        return None

    def late(self, what: str) -> DeadlineExceeded:
        """The end of a request whose deadline has passed; `what` says of what it has waited for."""
        card = self._channel.model.card
        if self._count:
            return DeadlineExceeded(
                f"{what}: {self._count} live worker(s) serve {card.name!r} and have not answered yet; "
                "allow more time (timeout=), ask for less at once, or add workers"
            )
        if self._is_loading:
            return NoWorker(
                f"{what}: a worker is loading {card.name!r}, none serves it yet; allow more time (timeout=)"
            )
        return NoWorker(f"{what}: no live worker serves {card.name!r}; start one with `{card.start_command}`")
