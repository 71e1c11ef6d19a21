"""Connect a client session to a pool, and read the pool's served models, live workers and vocabularies."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from lmpool import errors
from lmpool.aio import copy_error, delays
from lmpool.broker import scripts
from lmpool.broker.registries import VersionRegistry, look_up, look_up_tokenizer, register, register_tokens
from lmpool.broker.server import Server
from lmpool.producer.client.partitions import Partitions
from lmpool.producer.client.requests import Deadline, Tasks
from lmpool.protocol.keys import WANTED_TTL_MS, Keys, ModelKeys
from lmpool.protocol.model_info import MAX_INFO_BYTES, TRIE_SERVICE, ModelInfo
from lmpool.protocol.token_set import TokenSet
from lmpool.protocol.tokenizer import special_tokens
from lmpool.protocol.version import name_of_version, split_name
from lmpool.rows.cache import RowCache
from lmpool.rows.datagram import DatagramReceiver
from lmpool.rows.direct import DirectReader
from lmpool.rows.shared_memory import SegmentReader, is_shared, reader_token
from lmpool.settings import shown
from lmpool.vocabulary import Vocabulary

TROUBLE = (RedisError, OSError, errors.LMPoolError)
"""The exceptions that any use of the server may raise."""
_UNKNOWN = (errors.UnknownVocabulary, errors.UnknownTokenizer)
_ADVICE = "name the server as the user `producer` (docker/redis/users.acl)"

CLOSED = "the producer was closed while the request was in flight"

# Seconds between two scans for shared memory. A new worker's rows are read from Redis until a scan finds its memory.
_SCAN_S = 1.0
_DIRECT_CHECK_S = 1.0  # Min seconds between two lookups of a worker's row server, while rows come through Redis.

T = TypeVar("T")

_log = logging.getLogger("lmpool.producer")

# Max unreadable model infos that one client logs. An info is logged only once, because it is read every second.
_MAX_WARNED = 100
_MAX_NAMED = 8  # Max loading workers whose models an error text names, so that its cost does not grow with the pool.
_MAX_LATER = 4  # Max later versions, the newest ones, that are checked for workers which load them.
# Min seconds without a worker before requests fail: a worker that restarts needs about as long to register again.
_RESTART_S = 5.0
# If two checks are at least this many seconds apart, workers may have joined and left unnoticed in between.
_MIN_GAP_S = 2.0


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """The model that a session uses; other weights have another fingerprint and need another `AdoptedModel`."""

    info: ModelInfo  # The info of the model that was read last.
    fingerprint: str
    lineage: str  # Fingerprint that all versions of the model share.
    keys: ModelKeys  # Keys of partition 0 of version 0, which has the registries of adapters and versions.
    rows: RowCache
    host: bytes = b""  # Identifier of this machine's shared memory; b"" if rows are too small to be shared.
    reads: bytes = b""  # The `reader_token` of this client.


class Connections(Tasks):
    """The connections and background tasks of one session.

    Attributes:
        partitions: the partitions of the model's queue, each with connections of its own.
        redis: client for all other commands.
        closed: whether the session has ended.
        trouble: why the server cannot be used now, or None.
        segments: reader of rows in the shared memory of this machine.
        datagrams: receiver of notifications from workers on this machine.
        direct: reader of rows from the row servers of workers on other hosts, or None.
        model: the model that `adopt` sets before the first request.
    """

    model: AdoptedModel

    def __init__(self, server: Server, keys: Keys, *, is_bulk: bool = False, is_direct: bool = False) -> None:
        super().__init__()
        self.server = server
        self.keys = keys
        self._is_bulk = is_bulk
        self._client_id = secrets.token_hex(8)
        self.segments = SegmentReader()
        self.datagrams = DatagramReceiver()
        self.direct = DirectReader(server, self._read_row_token, self._on_direct) if is_direct else None
        self._direct_checked_at = -math.inf
        self.redis = server.client()
        self.partitions = Partitions(server, keys)
        self.closed = False
        self.trouble: errors.LMPoolError | None = None

    def adopt(self, info: ModelInfo) -> None:
        """Switch to a model, or to other weights of the same model."""
        if hasattr(self, "model") and info.name != self.model.info.name:
            self.partitions.leave()
        # From now on no row of other weights may be found.
        self.segments.select(info.fingerprint)
        if self.direct is not None:
            self.direct.forget()
        self._close_rows()
        rows = RowCache(self.server, self.keys, info, self.segments, self.direct)
        host = self.segments.host if is_shared(info.vocab_size) else b""
        self.model = AdoptedModel(info, info.fingerprint, info.lineage, self.keys.model(info.base), rows, host)
        self._set_reader()

    def _set_reader(self) -> None:
        """Set the client's token, which the reply key includes, so that scripts see which rows this client can read."""
        model = self.model
        is_direct = self.direct is not None and self.direct.is_on and is_shared(model.info.vocab_size)
        reads = reader_token(model.host, is_direct=is_direct)
        self.model = replace(model, reads=reads)
        self.partitions.adopt(model.info, f"{self._client_id}{reads.decode()}", is_bulk=self._is_bulk)

    def _on_direct(self) -> None:
        """Change the reply key: the client now reads rows from row servers, or does so no more."""
        self._client_id = secrets.token_hex(8)  # Read no old messages if the client changes back later.
        self._set_reader()
        self.partitions.hang_up()

    async def _read_row_token(self) -> bytes | None:
        with suppress(*TROUBLE):  # Do not record the error: rows still come through Redis.
            return cast(bytes | None, await self.redis.get(self.keys.row_token()))
        return None

    def want_direct(self, worker: bytes) -> None:
        """Try to use row servers, because this worker has sent a row through Redis."""
        now, direct = self.loop.time(), self.direct
        if direct is None or direct.is_on or not is_shared(self.model.info.vocab_size):
            return
        if now < max(direct.next_try_at, self._direct_checked_at + _DIRECT_CHECK_S):
            return
        self._direct_checked_at = now

        async def try_worker() -> None:
            with suppress(*TROUBLE):  # Do not record the error: rows still come through Redis.
                key = self.keys.worker(worker.decode("utf-8", "replace"))
                if address := cast(bytes | None, await cast(Any, self.redis.hget(key, "direct"))):
                    await direct.try_on(address)

        self.spawn(try_worker())

    def follow(self, info: ModelInfo) -> bool:
        """Use the current info of the same model; returns whether its partitions have changed."""
        has_changed = info.partitions != self.model.info.partitions
        self.model = replace(self.model, info=info)
        if has_changed:
            self._set_reader()
        return has_changed

    async def scan_segments(self) -> None:
        """Find the shared-memory segments of workers on this machine."""
        if self.model.host:
            # RuntimeError: no thread can start, because too many threads run or the main thread has ended.
            with suppress(RuntimeError):
                await self.segments.refresh(self.model.fingerprint)

    async def follow_segments(self) -> None:
        """Scan for shared-memory segments, and close idle connections to row servers, once a second, forever.

        The scan has its own task, because it waits for a thread, and the program may keep all threads busy.
        """
        while True:
            await asyncio.sleep(_SCAN_S)
            if self.direct is not None:
                self.direct.close_idle()
            await self.scan_segments()

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        if self.closed:
            raise errors.ProducerClosed(CLOSED)

    async def check_writes(self, model: str) -> None:
        """Write a key that expires at once, to check that the server accepts writes. Missing rights are ignored."""
        with suppress(NoPermissionError):
            await self.redis.set(self.keys.probe(model, self._client_id), b"", px=1)

    def note(self, error: BaseException) -> None:
        """Record why the server cannot be used, for the error of requests that time out."""
        self.trouble = self.server.explain(error)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Suppress errors of the server, and record them as `note` does."""
        try:
            yield
        except TROUBLE as error:
            self.note(error)

    async def insist(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline, advice: str = "") -> T:
        """Repeat `attempt` until the server replies, or until the deadline.

        With `advice`, raises `AuthenticationFailed` with this text as soon as the server's user lacks a right.
        """
        deadline = deadline.bounded()
        trouble: BaseException | None = None
        try:
            async with deadline.limit():
                for wait in delays():
                    self.check_open()
                    try:
                        return await attempt()
                    except (errors.SettingsError, errors.ProducerClosed, *_UNKNOWN):
                        raise
                    except TROUBLE as error:
                        trouble = error
                        self.note(error)
                        explained = self.server.explain(error)
                        if advice and isinstance(explained, errors.AuthenticationFailed):
                            raise errors.AuthenticationFailed(f"{explained}; {advice}") from error
                    await asyncio.sleep(wait)
        except errors.DeadlineExceeded as late:
            # If another request has made this attempt for this request, use the error that was noted.
            if late.__cause__ is not None and (why := trouble or self.trouble) is not None:
                raise copy_error(self.server.explain(why)) from late
            raise
        raise AssertionError("the waits never end")

    def describe_full_queue(self) -> str:
        """Return the text of the error for a full queue."""
        info, advice = self.model.info, "ask for less at once, add workers, or raise the workers' --queue-limit"
        return f"the queue of {info.name!r} is at its limit of {info.queue_limit} prompts; {advice}"

    def _close_rows(self) -> None:
        if hasattr(self, "model"):
            self.model.rows.close()

    async def close(self) -> None:
        """Close all connections."""
        self._close_rows()
        self.segments.close()
        self.datagrams.close()
        if self.direct is not None:
            self.direct.close()
        self.partitions.close()
        await self.redis.aclose()


class Discovery:
    """Reads the models that a pool serves, and their workers."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._warned: set[str] = set()

    async def infos(self) -> dict[str, ModelInfo]:
        """Return the infos of all served models by name; leaves out infos that cannot be read."""
        return (await self._read_infos())[0]

    async def served(self) -> dict[str, ModelInfo]:
        """Return the infos of all served models by names for commands: version 0 next to others is "syn@0"."""
        infos = await self.infos()
        versioned = {info.base for info in infos.values() if info.version}
        return {f"{name}@0" if name in versioned else name: info for name, info in infos.items()}

    async def live(self) -> dict[str, ModelInfo]:
        """As `served`, but leave out versions without workers, if workers serve another version of the model.

        The info of a version outlives its last worker by up to a minute.
        """
        infos = await self.served()
        versioned = {name: info for name, info in infos.items() if split_name(name)[1] is not None}
        old = {name for name, info in versioned.items() if not (await self.alive(info.name, info.partitions)).serving}
        known = {info.base for name, info in infos.items() if name not in old}
        return {name: info for name, info in infos.items() if name not in old or info.base not in known}

    async def info(self, name: str | None) -> ModelInfo:
        """Return the info of the model `name`, or of the only served model if `name` is None.

        Raises:
            UnknownModel: the model `name` is not served, or no model is served.
            AmbiguousModel: `name` is None and several models are served.
            ProtocolError: the info of the model, or every info, cannot be read.
        """
        if name is not None and (info := await self.find(name)) is not None:
            return info
        infos, unreadable = await self._read_infos()
        if name is None and unreadable and not infos:
            raise next(iter(unreadable.values()))
        # The model was registered after the call of `find`; or clients do not use a version yet, and workers serve one.
        used = await scripts.read_pointer(self._redis, self._keys, name) if name is not None else 0
        if named := [info for info in infos.values() if name in (info.name, info.base) and info.version >= used]:
            return max(named, key=lambda info: info.version)
        if name == TRIE_SERVICE:
            otherwise = f"{errors.argument('local', 'True')} (workers with --with-trie answer calls with prompt= too)"
            text = f"no trie worker serves: start one with `lmpool trie-worker`, or pass {otherwise}"
            raise errors.UnknownModel(text)
        infos.pop(TRIE_SERVICE, None)
        if not infos:
            wanted = f"the model {name!r} is not served" if name else "no model is served"
            raise await self._unknown(name, f"{wanted}: ", "start a worker with `lmpool worker MODEL --name NAME`")
        if name is not None and (base := split_name(name)[0]) in {info.base for info in infos.values()}:
            start = f" in version {used}, which clients use: start a worker with `lmpool worker MODEL --name {name}`"
            advice = f"`lmpool weights list --model {base}` lists the versions of its weights"
            raise await self._unknown(name, f"the model {name!r} is not served{start if used else ''}; ", advice)
        if name is not None:
            near = get_close_matches(name.lower(), by_lower := {other.lower(): other for other in infos}, 1)
            guess = f"did you mean {by_lower[near[0]]!r}? " if near else ""
            advice = f"{guess}served are: {', '.join(infos)}; start a worker with `lmpool worker MODEL --name {name}`"
            error = await self._unknown(name, f"the model {name!r} is not served; ", advice)
            error.has_others = True
            raise error
        if len({info.base for info in infos.values()}) == 1:  # All are versions of one model.
            return await self.info(next(iter(infos.values())).base)
        # The info of a model outlives workers that were killed, so check which models have live workers.
        live = []
        for info in infos.values():
            with suppress(NoPermissionError):
                live += [info] if (await self.alive(info.name, info.partitions)).serving else []
        if len(live) != 1:
            raise errors.AmbiguousModel(f"several models are served, name one of them: {', '.join(infos)}")
        return live[0]

    async def find(self, name: str) -> ModelInfo | None:
        """Return the info of a model, in the version that clients use or that `name` names, or None.

        A version that no worker serves has an info while it is in the model's registry, because its rows may be cached.
        """
        base, number = split_name(name)
        served = base if number == 0 else name
        packed, used = await scripts.read_named(self._redis, self._keys, served)
        if number is None and used:
            served = name_of_version(base, used)
            packed = await scripts.read_infos(self._redis, self._keys, served)
        infos, unreadable = self._unpack(packed)
        if served in unreadable:
            raise unreadable[served]
        if served not in infos and number is not None and (newest := await self.find(base)) is not None:
            versions = (await VersionRegistry(self._redis, self._keys.model(base)).read()).versions
            if not number:
                return newest.of_version(None)
            return next((newest.of_version(version) for version in versions if version.number == number), None)
        return infos.get(served)

    async def find_served(self, base: str, number: int) -> ModelInfo | None:
        """Return the info of a version that workers serve, whether or not clients use it already; or None."""
        name = name_of_version(base, number)
        info = (await self._read_infos(name))[0].get(name)
        return info if info is not None and (await self.alive(name, info.partitions)).serving else None

    async def is_changing(self, info: ModelInfo) -> bool:
        """Return whether a worker loads a later version of a model's weights, to which clients will change."""
        versions = (await VersionRegistry(self._redis, self._keys.model(info.base)).read()).versions
        later = [version.number for version in versions if version.number > info.version]
        return any([(await self.alive(name_of_version(info.base, number))).loading for number in later[-_MAX_LATER:]])

    async def want(self, model: str) -> None:
        """Record that a client waits for a model that is not served, so that an autoscaler can start a worker."""
        # Ignore missing rights: the server user that an older release documents may not write this key.
        with suppress(NoPermissionError):
            await self._redis.set(self._keys.model(model).wanted, b"", px=WANTED_TTL_MS)

    async def _unknown(self, name: str | None, text: str, advice: str) -> errors.UnknownModel:
        """Return the error for a model that is not served; the error says whether a worker is loading the model.

        A waiting client calls this method every second, so the cost must not grow with the number of loading workers.
        """
        loading = {name} if name and (await self.alive(name)).loading else set[str]()
        if not loading:
            key = self._keys.loading()
            with suppress(NoPermissionError):
                workers = cast(list[bytes] | None, await self._redis.hrandfield(key, _MAX_NAMED)) or []
                names = [worker.decode("utf-8", "replace") for worker in workers]
                entries = await scripts.read_texts(self._redis, key, names)
                for model in sorted(set(entries.values())):
                    # A worker that was killed while it loaded a model may still have an entry: check for a heartbeat.
                    if (await self.alive(model)).loading:
                        loading.add(model)
        models = ", ".join(sorted(map(repr, loading)))
        if loading and (name is None or name in loading):
            error = errors.UnknownModel(f"{text}a worker is loading {models}, try again in a moment")
            error.is_loading = True
            return error
        if self._keys != Keys():
            advice += f", or correct prefix={self._keys.prefix!r}, which names the pool"
        return errors.UnknownModel(f"{text}{advice} (being loaded: {models})" if loading else f"{text}{advice}")

    async def _read_infos(self, model: str | None = None) -> tuple[dict[str, ModelInfo], dict[str, Exception]]:
        """Return the infos of one or all models by name, and the errors of unreadable infos by name."""
        return self._unpack(await scripts.read_infos(self._redis, self._keys, model))

    def _unpack(self, packed: dict[bytes, bytes | int]) -> tuple[dict[str, ModelInfo], dict[str, Exception]]:
        infos: dict[str, ModelInfo] = {}
        unreadable: dict[str, Exception] = {}
        for key, data in sorted(packed.items()):
            name = key.decode(errors="backslashreplace")
            try:
                if isinstance(data, int):
                    raise errors.ProtocolError(f"a model info of {data} bytes is over the limit of {MAX_INFO_BYTES}")
                info = infos[name] = ModelInfo.unpack(data)
                if info.name != name:
                    # The stored info names another model, whose queue the client would use.
                    raise errors.ProtocolError(f"it is the info of {shown(infos.pop(name).name)}")
            except errors.ProtocolError as error:
                unreadable[name] = errors.ProtocolError(f"the info of the model {name!r} cannot be read: {error}")
                if len(self._warned) < _MAX_WARNED and name not in self._warned:
                    self._warned.add(name)
                    _log.warning("%s; the model is left out", unreadable[name])
        return infos, unreadable

    async def alive(self, model: str, partitions: Sequence[int] = (0,)) -> scripts.Alive:
        """Return how many workers serve a model and how many load it; the cost does not depend on these numbers."""
        return await scripts.read_alive_in(self._redis, [self._keys.model(model, number) for number in partitions])

    async def partitions(self, model: str) -> list[ModelKeys]:
        """Return the keys of each partition of a model's queue; of partition 0 if the model is not served."""
        info = None
        with suppress(errors.ProtocolError):
            info = await self.find(model)
        return [self._keys.model(model)] if info is None else self._keys.partitions(info)

    async def loads(self, info: ModelInfo) -> dict[int, scripts.Load | Exception]:
        """Return how busy each partition of a model's queue is, or why its master did not answer."""
        loads = await scripts.read_loads(self._redis, self._keys.partitions(info), info.lease_s)
        return dict(zip(info.partitions, loads, strict=True))

    async def gone(self, model: str, workers: Sequence[bytes], partition: int = 0) -> list[bytes]:
        """Return the ids in `workers` whose workers have left a partition of the model or were removed as dead."""
        key: Any = self._keys.model(model, partition).workers
        deadlines = await self._redis.zmscore(key, cast(list[str], workers)) if workers else []
        return [worker for worker, deadline in zip(workers, deadlines, strict=True) if deadline is None]


class Liveness:
    """Records whether live workers served the model at the last check.

    Attributes:
        count: number of live workers at the last check.
        missing_since: loop time of the first check without workers, or None.
    """

    def __init__(self, connections: Connections, discovery: Discovery) -> None:
        self._connections = connections
        self._discovery = discovery
        self.count = 0
        self._is_loading = False
        self.missing_since: float | None = None
        self._checked_at = -math.inf

    async def check(self, now: float) -> errors.NoWorker | None:
        """Count the live workers; returns the error for all requests if workers have been missing for too long.

        Workers may be missing for a lease, but at least 5 s, so that a restarting worker can register again. While a
        worker loads the model, requests wait without limit. If this client was blocked for longer than a lease, workers
        may have joined and left unnoticed, so the time without workers starts again. `now` is the loop time.
        """
        info = self._connections.model.info
        gap, self._checked_at = now - self._checked_at, now
        alive = await self._count()
        self.count, self._is_loading = alive.serving, not alive.serving and alive.loading > 0
        if not self.count and not self._is_loading:
            # The last worker of this version may be changing to another version, which can take long.
            self._is_loading = await self._discovery.is_changing(info)
        if self.count or self._is_loading:
            self.missing_since = None
            return None
        # Raise an error if the server refuses writes: it then refuses heartbeats too, so live workers seem missing.
        await self._connections.check_writes(info.name)
        if self.missing_since is None or gap > max(info.lease_s, _MIN_GAP_S):
            self.missing_since = now
        elif (seconds := now - self.missing_since) >= max(info.lease_s, _RESTART_S):
            text = f"no live worker has served {info.name!r} for {seconds:.0f} s"
            return errors.NoWorker(f"{text}: start one with `{info.start_command}`")
        return None

    async def _count(self) -> scripts.Alive:
        """Count the workers, and record the load of each partition if the model's queue has several."""
        info = self._connections.model.info
        if len(info.partitions) == 1:
            return await self._discovery.alive(info.name)
        loads = await self._discovery.loads(info)
        known = {number: load for number, load in loads.items() if isinstance(load, scripts.Load)}
        for number, load in loads.items():
            self._connections.partitions.note_load(number, load if isinstance(load, scripts.Load) else None)
        if serving := sum(load.workers for load in known.values()):
            return scripts.Alive(serving, 0, ())
        # Workers that drain take no jobs, but may still compute this client's prompts. Workers load in partition 0.
        return await self._discovery.alive(info.name, sorted({0, *known}))

    async def poll(self) -> None:
        """Count the workers, and record the load of each partition."""
        self.count = (await self._count()).serving

    def deadline_error(self, text: str) -> errors.DeadlineExceeded:
        """Return the exception for a request that timed out; its message begins with `text`."""
        info, more_time = self._connections.model.info, f"allow more time ({errors.argument('timeout')})"
        if self.count:
            workers = f"{self.count} live worker(s) serve {info.name!r} and have not answered yet"
            return errors.DeadlineExceeded(f"{text}: {workers}; {more_time}, request less at once, or add workers")
        if self._is_loading:
            return errors.NoWorker(f"{text}: a worker is loading {info.name!r}, none serves it yet; {more_time}")
        return errors.NoWorker(f"{text}: no live worker serves {info.name!r}; start one with `{info.start_command}`")


class Vocabularies:
    """Reads and registers vocabularies, tokenizers and token sets, for one session.

    All methods try again until the deadline while the server cannot be used, and then raise ServerError or
    DeadlineExceeded.
    """

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._sending = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._spelling: tuple[ModelInfo, Vocabulary] | None = None
        self._sent: dict[str, float] = {}
        self.pool = str(connections.server)

    async def of_model(self, deadline: Deadline) -> Vocabulary:
        """Return the vocabulary of the model; raises UnknownVocabulary if the workers publish no vocabulary."""
        info = self._connections.model.info
        if not info.vocabulary:
            why = "because its workers found no tokenizer with the bytes of its tokens: pass the byte strings yourself"
            raise errors.UnknownVocabulary(f"the model {info.name!r} publishes no vocabulary, {why}")
        return await self._insist(lambda: look_up(self._connections.redis, self._keys, info.vocabulary), deadline)

    async def spelling(self, deadline: Deadline) -> Vocabulary:
        """Return the vocabulary of the model as `of_model` does, but special tokens have no bytes; keep the result.

        Special tokens are read from the tokenizer that the workers publish; without a tokenizer, none are known.
        """
        info = self._connections.model.info
        async with deadline.limit(), self._reading:
            if self._spelling is None or self._spelling[0] != info:
                vocabulary = await self.of_model(deadline)
                text = await self.tokenizer(info.tokenizer, deadline) if info.tokenizer else "{}"
                self._spelling = info, await asyncio.to_thread(_without_special_tokens, vocabulary, text)
            return self._spelling[1]

    async def tokenizer(self, digest: str, deadline: Deadline) -> str:
        """Return the text of the `tokenizer.json` with this digest.

        Raises:
            UnknownTokenizer: the digest is "" (no tokenizer is published), or the stored text has another digest.
        """
        if not digest:
            name, advice = self._connections.model.info.name, "(the log of its workers says why): pass token ids"
            raise errors.UnknownTokenizer(f"the model {name!r} publishes no tokenizer {advice}")
        return await self._insist(lambda: look_up_tokenizer(self._connections.redis, self._keys, digest), deadline)

    async def register_tokens(self, tokens: TokenSet, deadline: Deadline) -> None:
        """Store a token set in the pool under its name."""
        await self._insist(lambda: register_tokens(self._connections.redis, self._keys, tokens), deadline)

    async def register(self, vocabulary: Vocabulary, deadline: Deadline) -> None:
        """Store a vocabulary that a worker could not find."""
        since = deadline.loop.time()

        async def attempt() -> None:
            # Requests that use a new vocabulary fail together; the request that first gets the lock stores it for all.
            async with self._sending:
                if self._sent.get(vocabulary.digest, since) <= since:
                    # Overwrite a stored vocabulary, because a worker could not read it.
                    await register(self._connections.redis, self._keys, vocabulary, anew=True)
                    self._sent[vocabulary.digest] = deadline.loop.time()

        await self._insist(attempt, deadline)

    async def _insist(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        return await self._connections.insist(attempt, deadline, _ADVICE)


def _without_special_tokens(vocabulary: Vocabulary, tokenizer: str) -> Vocabulary:
    try:
        special = set(special_tokens(tokenizer))
    except errors.InvalidVocabulary as error:
        raise errors.UnknownTokenizer(f"the special tokens of the model are unknown: {error}") from error
    return Vocabulary([b"" if i in special else token for i, token in enumerate(vocabulary.tokens)])
