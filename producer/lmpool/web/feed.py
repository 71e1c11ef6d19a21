"""What the pool page shows, read once a second for all pages together, and an hour of it for the graphs."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from msgspec.json import encode as encode_json
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.aio import join_task
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory, read_memory
from lmpool.errors import LMPoolError, ProtocolError, to_json
from lmpool.producer.cli.dead_letters import shortened
from lmpool.producer.cli.status import SILENT, Survey, look, number
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE

HOUR = 3600
"""Samples that are kept: an hour of them at one a second."""

MAX_STREAMS = 256
"""Pages that may watch at once."""

SERIES = ("rows_per_s", "queued", "age_s", "p50_s", "p99_s")
"""What is kept of each model, in this order."""

MAX_EVENTS = 50
"""Events of workers that are kept and shown, the newest ones."""

_MAX_MODELS = 64
_MAX_TEXT = 120
_LOADING = "loading"
_PATIENCE_S = 5.0
# The fastest: others take three to six times as long, and numbers become a twentieth smaller.
_GZIP_LEVEL = 1
# What looks may take of a core: with a thousand workers one takes a third of a second.
_SHARE_WATCHED, _SHARE_ALONE = 0.25, 0.02
_TOLD = (
    "rows", "rows_per_s", "tokens", "reused", "lane", "in_flight", "failures", "homed", "stolen", "shared", "batch",
    "p50_s", "p99_s",
)  # fmt: skip


class Sample(NamedTuple):
    """One moment of the graphs.

    Attributes:
        at: seconds since 1970.
        memory: bytes that the server uses; None where it does not tell, or was away.
        models: name -> the values of `SERIES`; empty when the server was away.
    """

    at: float
    memory: int | None
    models: Mapping[str, tuple[float | None, ...]]


class Event(NamedTuple):
    """What has happened to a worker.

    Attributes:
        number: counts up from 1.
        at: seconds since 1970.
        model: name of the worker's model.
        worker: its id.
        what: "joined", "left", "died", "is gone" (left or died while nothing was read), or "took over 3 prompts".
    """

    number: int
    at: float
    model: str
    worker: str
    what: str


class Events:
    """Finds what has happened to the workers of a pool between two surveys of it."""

    def __init__(self) -> None:
        self.newest: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._before: dict[tuple[str, str], dict[str, Any]] | None = None
        self._before_at = 0.0

    def note(self, at: float, models: Survey) -> None:
        """Compare a survey with the one before; the first one has only workers that were there already."""
        now = {(model["name"], worker["id"]): worker for model in models for worker in model["workers"]}
        before, gap_s = self._before, at - self._before_at
        self._before, self._before_at = now, at
        if before is None:
            return
        for key, worker in before.items():
            if key not in now:
                self._add(at, key, _end_of(worker, gap_s))
        for key, worker in now.items():
            last = before.get(key, {"state": _LOADING})
            if last["state"] == _LOADING != worker["state"]:
                self._add(at, key, "joined")
            claimed = int((number(worker, "claimed") or 0) - (number(last, "claimed") or 0))
            if claimed > 0:
                self._add(at, key, f"took over {claimed} prompt{'s' * (claimed > 1)}")

    def _add(self, at: float, key: tuple[str, str], what: str) -> None:
        self._count += 1
        model, worker = (shortened(name, _MAX_TEXT) for name in key)
        self.newest.append(Event(self._count, at, model, worker, what))


def _end_of(worker: Mapping[str, Any], gap_s: float) -> str:
    """How a worker has ended that was there before: one that leaves removes its heartbeat, that of others expires."""
    unheard_s = (worker["silent_s"] or 0.0) + gap_s
    if worker["state"] == "draining" or unheard_s < (number(worker, "lease_s") or 0.0):
        return "left"
    return "died" if worker["state"] == SILENT else "is gone"


class History(NamedTuple):
    """All samples, as JSON in ASCII.

    Attributes:
        plain: the bytes.
        gzipped: the same, compressed.
    """

    plain: bytes
    gzipped: bytes


class Feed:
    """Looks at the pool again and again, and tells all pages that watch.

    A page that is slow, or does not read at all, costs nothing: it is sent the newest frame when it takes one, and is
    never told of those between. While no page watches, looks go on for the graphs, as seldom as keeps them below 2 % of
    a core.

    Args:
        server: the Redis server.
        keys: the deployment's key names.
        interval_s: seconds between two looks, at least.
        samples: how many samples are kept.
    """

    def __init__(self, server: Server, keys: Keys, interval_s: float = 1.0, samples: int = HOUR) -> None:
        self._server = server
        self._keys = keys
        self._interval_s = interval_s
        self._events = Events()
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._changed = asyncio.Condition()
        self._frame: dict[str, Any] = {}
        self._encoded = b""
        self._encoding: asyncio.Task[History] | None = None
        self._encoded_look = 0
        self._number = 0
        self._watching = 0
        self._wanted = asyncio.Event()
        self._is_over = False
        self._seen_at = 0.0
        self.trouble = "nobody has looked yet"

    @property
    def watching(self) -> int:
        """How many pages watch now."""
        return self._watching

    @property
    def looks(self) -> int:
        """How often the pool was looked at."""
        return self._number

    async def run(self) -> None:
        """Look until cancelled. A server that is away is waited for, and said to be."""
        redis = self._server.client(reply_timeout_s=_PATIENCE_S)
        try:
            while True:
                began = time.monotonic()
                await self._look(redis)
                await self._pause(time.monotonic() - began)
        finally:
            await redis.aclose()

    async def end(self) -> None:
        """End all streams: the service is about to stop."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    async def _pause(self, took_s: float) -> None:
        """Wait for the next look: at once when the first page comes, if this one was made for graphs alone."""
        share = _SHARE_WATCHED if self._watching else _SHARE_ALONE
        self._wanted.clear()
        try:
            async with asyncio.timeout(max(self._interval_s - took_s, took_s * (1 / share - 1))):
                await self._wanted.wait()
        except TimeoutError:
            pass

    async def _look(self, redis: Redis) -> None:
        at, models, memory, trouble = time.time(), [], None, ""
        try:
            models, memory = await look(redis, self._keys), await read_memory(redis)
            if self._watching:
                served = {model["name"]: model for model in await _read_served(redis, self._keys)}
                for model in models:
                    told = served.get(model["name"], {"adapters": [], "trouble": ""})
                    model["adapters"], model["trouble"] = told["adapters"], model["trouble"] or told["trouble"]
            self._events.note(at, models)
            self._seen_at = at
        except (RedisError, OSError, LMPoolError) as error:
            trouble = str(self._server.explain(error))
        sample = _sample(at, models, memory)
        self._samples.append(sample)
        async with self._changed:
            self._number += 1
            self.trouble = trouble
            self._frame = self._told(at, models, memory, trouble)
            self._encoded = b""
            self._changed.notify_all()

    async def served(self) -> list[dict[str, Any]]:
        """The models that can be asked, and their adapters, as they are now; see `_read_served`.

        Raises:
            ServerError: the server cannot be used.
        """
        redis = self._server.client(reply_timeout_s=_PATIENCE_S)
        try:
            return await _read_served(redis, self._keys)
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            await redis.aclose()

    def _told(self, at: float, models: Survey, memory: ServerMemory | None, trouble: str) -> dict[str, Any]:
        """What a page is sent: after trouble only what it is, and since when."""
        told: dict[str, Any] = {"number": self._number, "at": at, "trouble": shortened(trouble)}
        if trouble:
            return {**told, "seen_at": self._seen_at}
        return {
            **told,
            "server": _told_server(str(self._server)),
            "memory": None if memory is None else {**memory._asdict(), "doubt": memory.doubt() or ""},
            "models": [_told_model(model) for model in models],
            "events": [event._asdict() for event in reversed(self._events.newest)],
        }

    async def history(self) -> History:
        """The samples that are kept: encoded once a look for all that ask, and in a thread, for that may take long."""
        if self._encoding is None or (self._encoding.done() and self._encoded_look != self._number):
            self._encoded_look = self._number
            self._encoding = asyncio.create_task(asyncio.to_thread(_encode_history, list(self._samples)))
        return await join_task(self._encoding)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Frames as server-sent events, from the newest one on, until the service stops."""
        self._watching += 1
        seen = 0
        # What was seen when nobody watched has no adapters.
        if self._watching == 1:
            seen = self._number
            self._wanted.set()
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._is_over or self._number != seen)  # noqa: B023 at once
                    if self._is_over:
                        return
                    seen, frame = self._number, self._bytes()
                yield frame
        finally:
            self._watching -= 1

    def _bytes(self) -> bytes:
        """The newest frame, encoded once for all pages."""
        if not self._encoded:
            self._encoded = f"data: {to_json(self._frame, separators=(',', ':'))}\n\n".encode()
        return self._encoded


def _encode_history(samples: Sequence[Sample]) -> History:
    """Times, memory, and for each model one column for each of `SERIES`.

    Piece by piece, for no other thread runs while one call encodes.
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
    plain = b"".join([*pieces, b"}}"])
    return History(plain, gzip.compress(plain, _GZIP_LEVEL))


async def _read_served(redis: Redis, keys: Keys) -> list[dict[str, Any]]:
    """The models that are served, except for tries.

    Returns:
        per model: its name; its adapters as names and revisions; and `trouble`, why these cannot be read, or "". Any
        user who may write a model's adapters may write junk there, which must not hide other models.
    """
    served = []
    for name, info in (await Discovery(redis, keys).infos()).items():
        if info.is_trie:
            continue
        adapters, trouble = list[tuple[str, str]](), ""
        try:
            known = await AdapterRegistry(redis, keys.model(name), info.fingerprint).read()
            adapters = [
                (adapter, shortened(state.revision, _MAX_TEXT)) for adapter, state in sorted(known.adapters.items())
            ]
        except ProtocolError as error:
            trouble = shortened(str(error))
        served.append({"name": name, "adapters": adapters, "trouble": trouble})
    return served


def _sample(at: float, models: Survey, memory: ServerMemory | None) -> Sample:
    values = {model["name"]: tuple(_drawn(model[name]) for name in SERIES) for model in models[:_MAX_MODELS]}
    return Sample(at, None if memory is None else memory.used_bytes, values)


def _told_server(name: str) -> str:
    """A server's address; of a socket its file and folder only, for pages end up in pictures, and paths name people."""
    scheme, _, path = name.partition("://")
    if scheme != "unix":
        return shortened(name)
    parts = PurePath(path).parts[1:]
    return shortened(f"unix://…/{'/'.join(parts[-2:])}")


def _told_model(model: dict[str, Any]) -> dict[str, Any]:
    info = model["info"] or {}
    told = {name: _finite(model[name]) for name in ("queued", "age_s", "dead", "rows_per_s", "p50_s", "p99_s")}
    shown = {name: info.get(name) for name in ("backend", "vocab_size", "dtype", "encoding", "max_prompt_tokens")}
    if model["name"] == TRIE_SERVICE:
        shown["vocab_size"] = None  # Trie workers answer for any vocabulary.
    return {
        "name": model["name"],
        **shown,
        **told,
        "adapters": model.get("adapters", []),
        "trouble": model["trouble"],
        "workers": [_told_worker(worker) for worker in model["workers"]],
    }


def _told_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows of a worker; texts are cut, numbers are numbers, whatever was written."""
    told: dict[str, Any] = {name: _finite(number(worker, name)) for name in _TOLD}
    return {
        "id": shortened(str(worker["id"]), _MAX_TEXT),
        "state": shortened(str(worker.get("state", "")), 20),
        "silent_s": _finite(worker.get("silent_s")),
        "changed_files": shortened(str(worker.get("changed_files") or ""), _MAX_TEXT),
        **told,
    }


def _drawn(value: float | None) -> float | None:
    """A value of a graph, with no more digits than can be seen there: all of them would be half of what is sent."""
    value = _finite(value)
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _finite(value: float | None) -> float | None:
    """JSON has no infinity, and no NaN."""
    return value if value is not None and abs(value) < 1e300 else None
