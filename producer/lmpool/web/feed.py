"""Collect the data of the pool page: one survey per second for all pages, and an hour of samples for the graphs."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from msgspec.json import encode as encode_json
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.admin.fleet import SILENT, number
from lmpool.admin.survey import Survey, pause_s, read_survey, shortened
from lmpool.aio import join_task
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_memory
from lmpool.errors import LMPoolError, ProtocolError, to_json
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.protocol.version import split_name
from lmpool.web.tables import MAX_TEXT, Tables, finite

HOUR = 3600
"""Max samples kept for the graphs: one hour at one sample per second."""

MAX_STREAMS = 256
"""Max pages that watch the pool concurrently, to limit memory and connections."""

SERIES = ("rows_per_s", "queued", "age_s", "p50_s", "p99_s")
"""Names of the values that a sample has for each model, in the order of the values."""

_SUMMED = ("rows_per_s", "queued")  # Values of the series that are added up over versions; of the others, the largest.

MAX_EVENTS = 50
"""Max worker events that a page shows; the oldest events are dropped."""

_MAX_MODELS = 64  # Max models in the graphs; more curves cannot be told apart.
_REPLY_TIMEOUT_S = 5.0  # Seconds to wait for the server before the page reports it as unreachable.
_GZIP_LEVEL = 1  # The fastest level: on numbers, higher levels take 3 to 6 times as long and save 5 %.
_WATCHED_SHARE = 0.25  # Max share of a core for surveys while a page watches.
_UNWATCHED_SHARE = 0.02  # Max share of a core for surveys while no page watches.


class Sample(NamedTuple):
    """One point in time of the graphs; memory and models are empty if the server was unreachable."""

    at: float  # Time of the sample, in seconds since 1970.
    memory: int | None  # Bytes of memory that the server uses, or None.
    models: Mapping[str, tuple[float | None, ...]]  # Name of a model -> its values, in the order of `SERIES`.


class Events:
    """Derives worker events from successive surveys.

    Attributes:
        newest: the newest events, as dicts. `what` is "joined", "left", "died", "is gone" (left or died between two
            surveys) or "took over 3 prompts"; `number` numbers the events from 1.
    """

    def __init__(self) -> None:
        self.newest: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._before: dict[tuple[str, str], dict[str, Any]] | None = None
        self._before_at = 0.0

    def add_survey(self, at: float, models: Survey) -> None:
        """Compare a survey with the previous one; the first survey produces no events."""
        now = {(split_name(model["name"])[0], worker["id"]): worker for model in models for worker in model["workers"]}
        before, gap_s = self._before, at - self._before_at
        self._before, self._before_at = now, at
        if before is None:
            return
        for key, worker in before.items():
            if key not in now:
                # A worker that leaves deletes its heartbeat; the heartbeat of a killed worker expires.
                unseen_s = (worker["silent_s"] or 0.0) + gap_s
                has_left = worker["state"] == "draining" or unseen_s < (number(worker, "lease_s") or 0.0)
                self._add(at, key, "left" if has_left else "died" if worker["state"] == SILENT else "is gone")
        for key, worker in now.items():
            last = before.get(key, {"state": "loading"})
            if last["state"] == "loading" != worker["state"]:
                self._add(at, key, "joined")
            claimed = int((finite(number(worker, "claimed")) or 0) - (finite(number(last, "claimed")) or 0))
            if claimed > 0:
                self._add(at, key, f"took over {claimed} prompt{'s' * (claimed > 1)}")

    def _add(self, at: float, key: tuple[str, str], what: str) -> None:
        self._count += 1
        model, worker = (shortened(name, MAX_TEXT) for name in key)
        self.newest.append({"number": self._count, "at": at, "model": model, "worker": worker, "what": what})


class Feed:
    """Surveys the pool, at most once per `interval_s` and 3 ms per worker, and sends frames to all pages that watch.

    A slow page skips frames: when the page reads, it gets the newest frame. While no page watches, surveys continue for
    the graphs, at an interval that uses at most 2 % of a core.

    Attributes:
        watching: number of pages that watch now.
        surveys: number of surveys so far.
        trouble: why the last survey failed; "" if it succeeded.
        tables: the tables of the last survey that succeeded.
    """

    def __init__(self, server: Server, keys: Keys, interval_s: float = 1.0, samples: int = HOUR) -> None:
        self._server = server
        self._keys = keys
        self._interval_s = interval_s
        self._events = Events()
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._changed = asyncio.Condition()
        self._frame = b""
        self._history: asyncio.Task[bytes] | None = None
        self._wanted = asyncio.Event()
        self._is_over = False
        self._seen_at = 0.0
        self.watching = 0
        self.surveys = 0
        self.trouble = "the pool has not been surveyed yet"
        self.tables = Tables([])

    async def run(self) -> None:
        """Survey the pool until cancelled; while the server is unreachable, frames contain the reason."""
        async with self._server.connected(reply_timeout_s=_REPLY_TIMEOUT_S) as redis:
            while True:
                began = time.monotonic()
                interval_s = pause_s(await self._survey(redis), self._interval_s)
                took_s = time.monotonic() - began
                share = _WATCHED_SHARE if self.watching else _UNWATCHED_SHARE
                # Wait until the next survey is due, or until `frames` sets the event for the first page that watches.
                self._wanted.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(interval_s - took_s, took_s * (1 / share - 1))):
                        await self._wanted.wait()

    async def end(self) -> None:
        """End all streams before the service stops."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    async def _survey(self, redis: Redis) -> Survey:
        at, models, memory, trouble = time.time(), [], None, ""
        try:
            models, memory = await read_survey(redis, self._keys), await read_memory(redis)
            if self.watching:
                served = {model["name"]: model for model in await _read_served(redis, self._keys)}
                for model in models:
                    known = served.get(model["name"], {"adapters": [], "trouble": ""})
                    model["adapters"], model["trouble"] = known["adapters"], model["trouble"] or known["trouble"]
            self._events.add_survey(at, models)
            self._seen_at, self.tables = at, Tables(models)
        except (RedisError, OSError, LMPoolError) as error:
            trouble = str(self._server.explain(error))
        values = _drawn_values(models)
        self._samples.append(Sample(at, None if memory is None else memory.used_bytes, values))
        async with self._changed:
            self.surveys += 1
            self.trouble = trouble
            if self._history is not None and self._history.done():
                self._history = None
            frame: dict[str, Any] = {"number": self.surveys, "at": at, "trouble": shortened(trouble)}
            if trouble:
                frame["seen_at"] = self._seen_at
            else:
                frame |= {
                    "server": _shown_server(str(self._server)),
                    "drawn": values,
                    "memory": None if memory is None else {**memory._asdict(), "doubt": memory.doubt() or ""},
                    "events": list(reversed(self._events.newest)),
                    **self.tables.frame(),
                }
            self._frame = f"data: {to_json(frame, separators=(',', ':'))}\n\n".encode()
            self._changed.notify_all()
        return models

    async def served(self) -> dict[str, Any]:
        """Return the served models with their adapters, as `_read_served` does; raises `ServerError`."""
        async with self._server.connected(reply_timeout_s=_REPLY_TIMEOUT_S) as redis:
            return {"models": await _read_served(redis, self._keys)}

    async def history(self) -> bytes:
        """Return all samples as gzipped JSON, encoded in a thread at most once per survey."""
        if self._history is None:
            self._history = asyncio.create_task(asyncio.to_thread(_encode_history, list(self._samples)))
        return await join_task(self._history)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Iterate over frames as server-sent events, starting with the newest frame, until the service stops."""
        self.watching += 1
        seen = 0
        # The last survey has no adapters if no page watched, so the first page waits for a new survey.
        if self.watching == 1:
            seen = self.surveys
            self._wanted.set()
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._is_over or self.surveys != seen)  # noqa: B023 runs now
                    if self._is_over:
                        return
                    seen, frame = self.surveys, self._frame
                yield frame
        finally:
            self.watching -= 1


def _encode_history(samples: Sequence[Sample]) -> bytes:
    """Encode samples as columns: the times, the memory, and a column per model and entry of `SERIES`.

    Encode in pieces, because one call of the encoder blocks all threads.
    """
    names = sorted({name for sample in samples for name in sample.models})[:_MAX_MODELS]
    nothing = (None,) * len(SERIES)
    pieces = [
        b'{"at":', encode_json([round(sample.at, 2) for sample in samples]),
        b',"memory":', encode_json([sample.memory for sample in samples]),
        b',"series":', encode_json(SERIES), b',"models":{',
    ]  # fmt: skip
    for place, name in enumerate(names):
        columns = list(zip(*(sample.models.get(name, nothing) for sample in samples), strict=True))
        pieces += [b"," if place else b"", to_json(name).encode(), b":", encode_json(columns)]
    return gzip.compress(b"".join([*pieces, b"}}"]), _GZIP_LEVEL)


async def _read_served(redis: Redis, keys: Keys) -> list[dict[str, Any]]:
    """Return the served models except trie services: name, adapters (name, revision), any error of reading adapters.

    Next to the names of versions, the model's own name stands for the version that clients use. Invalid data of one
    model must not hide other models.
    """
    served = []
    infos = await Discovery(redis, keys).live()
    for name, info in sorted(({info.base: info for info in infos.values()} | infos).items()):
        if not info.is_trie:
            model: dict[str, Any] = {"name": name, "adapters": [], "trouble": ""}
            try:
                known = (await AdapterRegistry(redis, keys.model(info.base), info.lineage).read()).adapters
                model["adapters"] = [(n, shortened(a.revision, MAX_TEXT)) for n, a in sorted(known.items())]
            except ProtocolError as error:
                model["trouble"] = shortened(str(error))
            served.append(model)
    return served


def _drawn_values(models: Survey) -> dict[str, tuple[float | None, ...]]:
    """The values of each model for the graphs, in the order of `SERIES`; all versions of its weights together."""
    by_base: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        by_base.setdefault(split_name(model["name"])[0], []).append(model)
    values = {}
    for base, versions in list(by_base.items())[:_MAX_MODELS]:
        known = {name: [value for each in versions if (value := each[name]) is not None] for name in SERIES}
        values[base] = tuple(
            _drawn((sum if name in _SUMMED else max)(numbers)) if (numbers := known[name]) else None for name in SERIES
        )
    return values


def _shown_server(name: str) -> str:
    """Return a server's address, or the file and folder of its Unix socket, because paths contain user names."""
    scheme, _, path = name.partition("://")
    return shortened(f"unix://…/{'/'.join(PurePath(path).parts[1:][-2:])}" if scheme == "unix" else name)


def _drawn(value: float | None) -> float | None:
    """Round a value for a graph: full precision would double the bytes of the history."""
    value = finite(value)
    return float(f"{value:.5g}") if isinstance(value, float) else value
