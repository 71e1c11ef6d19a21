"""What a pool serves: its models (`Discovery`), whether workers live (`Liveness`), and its vocabularies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from lmpool.broker.registries import look_up, look_up_tokenizer, register, register_tokens
from lmpool.broker.scripts import Alive, QueueState, read_alive, read_infos, read_queue, read_texts
from lmpool.errors import (
    AmbiguousModel,
    DeadlineExceeded,
    NoWorker,
    ProtocolError,
    UnknownModel,
    UnknownTokenizer,
    UnknownVocabulary,
    argument,
)
from lmpool.producer.client.connections import TROUBLE, Connections
from lmpool.producer.deadline import Deadline
from lmpool.protocol.keys import WANTED_TTL_MS, Keys
from lmpool.protocol.model_info import MAX_INFO_BYTES, TRIE_SERVICE, ModelInfo
from lmpool.protocol.token_set import TokenSet
from lmpool.settings import shown
from lmpool.vocabulary import Vocabulary

_log = logging.getLogger("lmpool.producer")

_MAX_WARNED = 100
_MAX_NAMED = 8
_RESTART_S = 5.0
_MIN_GAP_S = 2.0


class WorkerInfo(NamedTuple):
    """One live worker: its id and the fields of its heartbeat."""

    worker_id: str
    fields: Mapping[str, str]


class Discovery:
    """Reads which models a pool serves, and by which workers.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._warned: set[str] = set()

    async def infos(self) -> dict[str, ModelInfo]:
        """The infos of all models that are served, by name; those that cannot be read are left out."""
        return (await self._read_infos())[0]

    async def info(self, name: str | None) -> ModelInfo:
        """The info of one model; None means the only one there is.

        Raises:
            UnknownModel: no such model, or none at all.
            AmbiguousModel: `name` is None and there are several.
            ProtocolError: the info of that model, or every info there is, cannot be read.
        """
        if name is not None and (info := await self.find(name)) is not None:
            return info
        infos, unreadable = await self._read_infos()
        if name is None and unreadable and not infos:
            raise _unreadable(*next(iter(unreadable.items())))
        if name == TRIE_SERVICE and name not in infos:
            raise UnknownModel(
                f"no trie worker serves: start one with `lmpool trie-worker`, or pass {argument('local', 'True')} "
                "(calls with prompt= are answered by a model's workers too, if they run with --with-trie)"
            )
        if name != TRIE_SERVICE:
            infos.pop(TRIE_SERVICE, None)
        served = ", ".join(infos) or "none"
        if not infos:
            wanted = f"the model {name!r} is not served" if name else "no model is served"
            raise await self._unknown(name, f"{wanted}: ", "start a worker with `lmpool worker MODEL --name NAME`")
        if name is None:
            # The info of a model whose workers were killed may still be there.
            live = [info for info in infos.values() if await self._is_served(info.name)] if len(infos) > 1 else []
            if len(infos) > 1 and len(live) != 1:
                raise AmbiguousModel(f"several models are served, name one of them: {served}")
            return live[0] if live else next(iter(infos.values()))
        if name not in infos:
            otherwise = f"{_guess(name, infos)}served are: {served}; "
            otherwise += f"start a worker with `lmpool worker MODEL --name {name}`"
            error = await self._unknown(name, f"the model {name!r} is not served; ", otherwise)
            error.has_others = True
            raise error
        return infos[name]

    async def find(self, name: str) -> ModelInfo | None:
        """The info of one model; None when there is none.

        Raises:
            ProtocolError: it cannot be read.
        """
        infos, unreadable = await self._read_infos([name])
        if name in unreadable:
            raise _unreadable(name, unreadable[name])
        return infos.get(name)

    async def want(self, model: str) -> None:
        """Have whoever starts workers see that a model is waited for, of which nothing can be queued yet."""
        # A user with the rights of an older release may not say so.
        with contextlib.suppress(NoPermissionError):
            await self._redis.set(self._keys.model(model).wanted, b"", px=WANTED_TTL_MS)

    async def _is_served(self, model: str) -> bool:
        """Whether a model has live workers; one that this user may not ask has none for it."""
        try:
            return bool((await self.alive(model)).serving)
        except NoPermissionError:
            return False

    async def _unknown(self, name: str | None, text: str, otherwise: str) -> UnknownModel:
        """That a model is not served, and what to do: wait, when a worker is loading it just now.

        However many workers load, this costs the same, for who waits for a model looks again every second.
        """
        loading = {name} if name and (await self.alive(name)).loading else await self._some_loading()
        models = ", ".join(sorted(map(repr, loading)))
        if loading and (name is None or name in loading):
            error = UnknownModel(f"{text}a worker is loading {models}, try again in a moment")
            error.is_loading = True
            return error
        if self._keys != Keys():
            otherwise += f", or correct prefix={self._keys.prefix!r}, which names the pool"
        return UnknownModel(f"{text}{otherwise} (being loaded: {models})" if loading else f"{text}{otherwise}")

    async def _some_loading(self) -> set[str]:
        """Some of the models that workers are loading: those that this user may look at."""
        key, loading = self._keys.loading(), set[str]()
        try:
            names = cast(list[bytes] | None, await self._redis.hrandfield(key, _MAX_NAMED))
            if not names:
                return loading
            models = await read_texts(self._redis, key, [name.decode("utf-8", "replace") for name in names])
            for model in sorted(set(models.values())):
                # Of those that were killed as they loaded, some may not have been swept yet.
                if (await self.alive(model)).loading:
                    loading.add(model)
        except NoPermissionError:
            pass  # The rights of a user may end at its own models.
        return loading

    async def _read_infos(self, names: Sequence[str] = ()) -> tuple[dict[str, ModelInfo], dict[str, ProtocolError]]:
        """The infos by name, and why others cannot be read: one bad info must not take down every other model.

        Args:
            names: of these models alone; none for all.
        """
        packed = await read_infos(self._redis, self._keys, names)
        infos: dict[str, ModelInfo] = {}
        unreadable: dict[str, ProtocolError] = {}
        for key, data in sorted(packed.items()):
            name = key.decode(errors="backslashreplace")
            try:
                infos[name] = _read_info(name, data)
            except ProtocolError as error:
                unreadable[name] = error
                # Once: clients look every second.
                if len(self._warned) < _MAX_WARNED and name not in self._warned:
                    self._warned.add(name)
                    _log.warning("the info of the model %r is left out: %s", name, error)
        return infos, unreadable

    async def alive(self, model: str) -> Alive:
        """How many workers serve a model and load it; reading that costs the same however many there are."""
        return await read_alive(self._redis, self._keys.model(model))

    async def gone(self, model: str, workers: Collection[bytes]) -> list[bytes]:
        """Those of some workers of a model that have left it, or were removed as dead."""
        if not workers:
            return []
        asked = list(workers)
        key: Any = self._keys.model(model).workers
        deadlines: Any = await self._redis.zmscore(key, cast(list[str], asked))
        return [worker for worker, deadline in zip(asked, deadlines, strict=True) if deadline is None]

    async def workers(self, model: str) -> list[WorkerInfo]:
        """The live workers of a model, with their heartbeats, which this reads one after the other."""
        return await self._alive((await read_alive(self._redis, self._keys.model(model), names=True)).names)

    async def loading(self) -> list[WorkerInfo]:
        """The workers that load their models, of all models."""
        names = await read_texts(self._redis, self._keys.loading())
        workers = await self._alive(names)
        return [worker for worker in workers if worker.fields.get("state") == "loading"]

    async def _alive(self, names: Iterable[str]) -> list[WorkerInfo]:
        """Those of some workers whose heartbeats have not expired, and say what they serve."""
        workers = []
        for name in sorted(names):
            try:
                fields = await read_texts(self._redis, self._keys.worker(name))
            except ProtocolError as error:
                # One key that holds something else must not keep clients from all other workers.
                _log.warning("the worker %r is left out: %s", name, error)
                continue
            if "model" in fields:
                workers.append(WorkerInfo(name, fields))
        return workers

    async def silences(self, workers: Iterable[WorkerInfo]) -> dict[str, float]:
        """Seconds since the last heartbeat of each worker, of those whose heartbeats have their lease."""
        silences = {}
        for worker in workers:
            left_ms = await self._redis.pttl(self._keys.worker(worker.worker_id))
            with contextlib.suppress(KeyError, ValueError):
                silences[worker.worker_id] = max(0.0, float(worker.fields["lease_s"]) - max(0, left_ms) / 1000)
        return silences

    async def queue(self, model: str) -> QueueState:
        """The state of a model's queue."""
        return await read_queue(self._redis, self._keys.model(model))


def _guess(name: str, served: Iterable[str]) -> str:
    """What a model that is not served was most likely meant to be; "" where no name is near."""
    by_lower = {other.lower(): other for other in served}
    near = get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[near[0]]!r}? " if near else ""


def _read_info(name: str, data: bytes | int) -> ModelInfo:
    if isinstance(data, int):
        raise ProtocolError(f"a model info of {data} bytes is over the limit of {MAX_INFO_BYTES}")
    info = ModelInfo.unpack(data)
    if info.name != name:
        # Its queue would be that of another model.
        raise ProtocolError(f"it is that of {shown(info.name)}")
    return info


def _unreadable(name: str, error: ProtocolError) -> ProtocolError:
    return ProtocolError(f"the info of the model {name!r} cannot be read: {error}")


class Liveness:
    """Knows whether live workers serve the model, as far as the client has seen.

    Args:
        connections: the client's connections.
        discovery: tells which workers live.
    """

    def __init__(self, connections: Connections, discovery: Discovery) -> None:
        self._connections = connections
        self._discovery = discovery
        self._count = 0
        self._is_loading = False
        self._missing_since: float | None = None
        self._looked_at = -math.inf

    async def start(self, model: str) -> None:
        """Count the workers for the first time.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        self._count = (await self._discovery.alive(model)).serving

    @property
    def count(self) -> int:
        """How many live workers there were at the last look."""
        return self._count

    def pause(self) -> None:
        """Workers are not looked for now: nobody waits, or nobody can be seen."""
        self._missing_since = None

    async def look(self, now: float) -> NoWorker | None:
        """Count the live workers; returns the error that ends all requests when there has been none for long.

        Long is a lease, and time enough for a worker that is started again to say so; while one loads the model,
        requests wait for it as long as they may. Between two looks that are further apart than a lease, for this client
        was held up, workers may have lived and been silent again: so nobody is missed since before the second.

        Args:
            now: the event loop's time.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        info = self._connections.model.info
        gap, self._looked_at = now - self._looked_at, now
        alive = await self._discovery.alive(info.name)
        self._count, self._is_loading = alive.serving, not alive.serving and alive.loading > 0
        if self._count or self._is_loading:
            self._missing_since = None
            return None
        # Heartbeats are writes: where the server refuses these, live workers cannot be seen, and are not missed.
        await self._connections.check_writes(info.name)
        if self._missing_since is None or gap > max(info.lease_s, _MIN_GAP_S):
            self._missing_since = now
        elif now - self._missing_since >= max(info.lease_s, _RESTART_S):
            seconds = now - self._missing_since
            return NoWorker(
                f"no live worker has served {info.name!r} for {seconds:.0f} s: start one with `{info.start_command}`"
            )
        return None

    def deadline_error(self, text: str) -> DeadlineExceeded:
        """The exception for a request whose deadline has passed; its message begins with `text`."""
        info = self._connections.model.info
        if self._count:
            return DeadlineExceeded(
                f"{text}: {self._count} live worker(s) serve {info.name!r} and have not answered yet; "
                f"allow more time ({argument('timeout')}), ask for less at once, or add workers"
            )
        if self._is_loading:
            loading = f"{text}: a worker is loading {info.name!r}, none serves it yet"
            return NoWorker(f"{loading}; allow more time ({argument('timeout')})")
        return NoWorker(f"{text}: no live worker serves {info.name!r}; start one with `{info.start_command}`")


class Vocabularies:
    """Reads and registers vocabularies, and sets of their tokens, for one session.

    Args:
        connections: the connections, and the model.
        keys: the deployment's key names.
    """

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._sending = asyncio.Lock()
        self._sent: dict[str, float] = {}

    async def of_model(self, deadline: Deadline) -> Vocabulary:
        """The vocabulary of the model.

        Raises:
            UnknownVocabulary: its workers publish none.
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        info = self._connections.model.info
        if not info.vocabulary:
            raise UnknownVocabulary(
                f"the model {info.name!r} publishes no vocabulary, for its workers found no tokenizer that tells "
                "the bytes of its tokens: pass the byte strings yourself"
            )
        try:
            async with deadline.limit():
                return await look_up(self._connections.redis, self._keys, info.vocabulary)
        except TROUBLE as error:
            raise self._connections.explain(error) from error

    async def tokenizer(self, digest: str, deadline: Deadline) -> str:
        """The `tokenizer.json` of a digest, which is that of the model.

        Raises:
            UnknownTokenizer: its workers publish none, or the pool has something else in its place.
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        if not digest:
            name = self._connections.model.info.name
            raise UnknownTokenizer(
                f"the model {name!r} publishes no tokenizer (the log of its workers says why): pass token ids"
            )
        try:
            async with deadline.limit():
                return await look_up_tokenizer(self._connections.redis, self._keys, digest)
        except TROUBLE as error:
            raise self._connections.explain(error) from error

    async def register_tokens(self, tokens: TokenSet, deadline: Deadline) -> None:
        """Have the pool know a set of tokens by its name.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        try:
            async with deadline.limit():
                await register_tokens(self._connections.redis, self._keys, tokens)
        except TROUBLE as error:
            raise self._connections.explain(error) from error

    async def register(self, vocabulary: Vocabulary, deadline: Deadline) -> None:
        """Have the pool know a vocabulary that a worker has just said it does not know.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        time = asyncio.get_running_loop().time
        since = time()
        try:
            # One at a time: all requests that use a vocabulary for the first time are told at once that the pool does
            # not know it, and the first of them sends it for all.
            async with deadline.limit(), self._sending:
                if self._sent.get(vocabulary.digest, since) <= since:
                    # Whatever the pool has under its name, the worker could not read it.
                    await register(self._connections.redis, self._keys, vocabulary, anew=True)
                    self._sent[vocabulary.digest] = time()
        except TROUBLE as error:
            raise self._connections.explain(error) from error
