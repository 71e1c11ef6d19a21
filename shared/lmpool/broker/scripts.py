"""The Lua scripts of `lua/`, which change a queue atomically, and the functions that read queues, hashes and streams.

Any client of the pool may have written to the keys, so functions that read check sizes and types.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from lmpool.aio import silence_limit
from lmpool.broker.connection import Argument, reply_timeout
from lmpool.broker.replies import is_refusal
from lmpool.errors import ProtocolError
from lmpool.protocol.keys import GROUP, Keys, ModelKeys
from lmpool.protocol.model_info import LIMITS, MAX_INFO_BYTES, TRIE_SERVICE
from lmpool.protocol.version import pointer_of
from lmpool.settings import shown

Call = Callable[..., Awaitable[Any]]  # Runs one command: the method `call` of a connection.
MAX_AT_ONCE = 200  # Max prompts in one call of a script: while a script runs, the server serves no other client.
# Max lease of any worker, in ms: released jobs look idle for that long, so that a worker with any lease claims them.
_MAX_LEASE_MS = int(LIMITS["lease_s"][1] * 1000)
_REASONS_TTL_MS = 3_600_000  # Lifetime in ms of the reasons why jobs were released; dead letters contain them.
_MAX_REASONS = 1000  # Max reasons for the release of jobs that are kept per model.
_MAX_REASON_TEXT = 500  # Max characters of a reason.
# Name of a Lua file -> its text; names are unique across the folders. Read all files when this module is imported: an
# installation may be replaced while the program runs.
_TEXTS = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("lua").glob("*/*.lua")}
_INCLUDE = re.compile("^-- include (\\w+)$", re.MULTILINE)


def _text(name: str, included: set[str]) -> str:
    """The text of a file. A line "-- include NAME" is replaced by the text of that file, but only the first time."""
    included.add(name)
    return _INCLUDE.sub(lambda match: "" if match[1] in included else _text(match[1], included), _TEXTS[name])


class Script:
    """A Lua script. Its whole text is sent only if the server has not cached the script yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _text(name, set())
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def on(self, call: Call, keys: Sequence[bytes], args: Sequence[Argument]) -> Any:
        """Run the script by `call`, the method of a fast connection (`lmpool.broker.connection`)."""
        try:
            return await call("EVALSHA", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await call("EVAL", self.source, len(keys), *keys, *args)

    async def __call__(self, redis: Redis, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """Run the script through a redis-py client for control messages; NoPermissionError if a right is missing."""
        try:
            return await self.on(redis.execute_command, keys, args)
        except ResponseError as error:
            if is_refusal(error):  # Within a script, servers report a refusal as an ordinary error.
                raise NoPermissionError(str(error)) from error
            raise


async def run_in_order(redis: Redis, *calls: tuple[Script, Sequence[bytes], Sequence[Any]]) -> list[Any]:
    """Run scripts, each with its keys and arguments, and return their replies; on one server with one round trip.

    On a cluster each call is awaited alone: the master of a later call may be down. A script that fails runs twice.
    """
    if isinstance(redis, RedisCluster):
        return [await script(redis, keys, args) for script, keys, args in calls]
    async with redis.pipeline(transaction=False) as pipe:
        for script, keys, args in calls:
            pipe.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
        replies = await pipe.execute(raise_on_error=False)
    # The server may have lost a script. The second run sends the text of the script, or raises the error.
    failed = [isinstance(reply, ResponseError) for reply in replies]
    return [await call[0](redis, *call[1:]) if failed[at] else replies[at] for at, call in enumerate(calls)]


SUBMIT = Script("submit")
CANCEL = Script("cancel")
FINISH = Script("finish")
FIND_WORK = Script("find_work")
WAKE = Script("wake")
DROP_UNWANTED = Script("drop_unwanted")
CLAIM_EXPIRED = Script("claim_expired")
HEARTBEAT = Script("heartbeat")
REGISTER = Script("register")
KEEP_ALIVE = Script("keep_alive")
ALIVE = Script("alive")
ADD_DEADLINES = Script("add_deadlines")
RENEW = Script("renew")
RELEASE = Script("release")
RETRY = Script("retry")
REMOVE_GONE = Script("remove_gone")
SWAP = Script("swap")
ENTRIES = Script("entries")
CHANGE_ADAPTER = Script("change_adapter")
FIELDS = Script("fields")
SURVEY = Script("survey")
KEEP_QUEUE = Script("keep_queue")
CLEAR = Script("clear")
MEET = Script("meet")
LOAD = Script("load")
CLOSE_LANE = Script("close_lane")


Fields = dict[bytes, bytes]  # The fields of an entry of a stream.
Entries = list[tuple[bytes, Fields]]  # Entries of a stream: id, fields.
MAX_FIELD_BYTES = 1024 * 1024  # Max bytes of a field of a heartbeat; the names and refusals of all adapters take less.
MAX_WORKERS = 4000  # Max workers of a model that are listed by name; more workers are only counted.
_MAX_FIELDS = 4096  # Max fields of a hash whose fields are all read.
_MAX_LANE = 1e9  # Max jobs that are reported for a lane: clients may write any number.
# Beginnings of the error texts for a model that no worker has served yet: its stream or consumer group does not exist.
_NO_QUEUE = ("no such key", "NOGROUP", "WRONGTYPE")


def entries_by_stream(reply: Any) -> dict[bytes, Entries]:
    """Stream -> its entries, from the reply to a read of several streams, which RESP2 and RESP3 nest differently."""
    found: dict[bytes, Entries] = {}
    try:
        for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
            found[key] = of_stream = []
            for entry, fields in entries:
                if fields is None:  # The entry was deleted while it was pending.
                    continue
                if type(entry) is not bytes or set(map(type, fields)) != {bytes}:
                    raise TypeError
                of_stream.append((entry, dict(zip(fields[::2], fields[1::2], strict=True))))
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"no reply to a read of a stream: {shown(reply)}") from error
    return found


async def release_jobs(
    redis: Redis, keys: ModelKeys, worker_id: str, lanes: Iterable[bytes], max_deliveries: int, reason: str
) -> int:
    """Requeue a worker's jobs in the shared stream and in the lanes of the workers `lanes`; return the number of jobs.

    The jobs keep their delivery counts. Clients receive `reason` if a job is given up later.
    """
    count = 0
    for lane in {b"", *lanes}:
        streams, begin = [keys.lane(lane) if lane else keys.jobs, keys.reasons], b"-"
        tail = [max_deliveries, reason[:_MAX_REASON_TEXT], _REASONS_TTL_MS, _MAX_REASONS, b" " + lane if lane else b""]
        while begin:
            args = [GROUP, worker_id, _MAX_LEASE_MS, MAX_AT_ONCE, begin, *tail]
            released, begin = await RELEASE(redis, streams, args)
            count += released
    return count


async def read_hash(
    redis: Redis, key: bytes, *, most_bytes: int, fields: Sequence[str] = (), most_fields: int = _MAX_FIELDS
) -> dict[bytes, bytes | int]:
    """Read a hash ({} if it does not exist), atomically unless it has over a thousand fields or a megabyte.

    A value of more than `most_bytes` is replaced by its size. Fields whose names are over 1 KiB are left out.
    `most_fields` limits a hash that is read whole, without `fields`.

    Raises:
        ProtocolError: the key holds another type than a hash, or a hash with too many fields.
    """
    values: dict[bytes, bytes | int] = {}
    begin = 0
    while True:
        begin, (reply,) = await FIELDS(redis, [key], [most_fields, most_bytes, begin, *fields])
        if not isinstance(reply, list):
            content = "something else than a hash" if reply < 0 else f"{reply} fields: there can be {most_fields}"
            raise ProtocolError(f"{shown(key)} has {content}; remove it if it is not yours")
        values.update(zip(reply[::2], reply[1::2], strict=True))
        if not begin:
            return values


def info_key(keys: Keys, model: str) -> bytes:
    """The hash that has the info of a model."""
    return keys.trie_models() if model == TRIE_SERVICE else keys.models()


async def read_infos(redis: Redis, keys: Keys, name: str | None = None) -> dict[bytes, bytes | int]:
    """The encoded infos of one model or all models: name -> info, or its size if it exceeds `MAX_INFO_BYTES`.

    Versions of a model's weights are models of their own: see `lmpool.protocol.version`.
    """
    wanted = {keys.models(): [], keys.trie_models(): [TRIE_SERVICE]} if name is None else {info_key(keys, name): [name]}
    infos: dict[bytes, bytes | int] = {}
    for key, fields in wanted.items():
        infos |= await read_hash(redis, key, most_bytes=MAX_INFO_BYTES, fields=fields)
    return {field: info for field, info in infos.items() if not field.endswith(b"@")}


async def read_named(redis: Redis, keys: Keys, name: str) -> tuple[dict[bytes, bytes | int], int]:
    """The encoded info of one model, as `read_infos` returns it, and the version of its weights that clients use."""
    pointer = pointer_of(name)
    found = await read_hash(redis, info_key(keys, name), most_bytes=MAX_INFO_BYTES, fields=[name, pointer])
    used = found.pop(pointer.encode(), b"")
    return found, int(used) if isinstance(used, bytes) and used.isdigit() else 0


async def read_pointer(redis: Redis, keys: Keys, base: str) -> int:
    """The version of the model `base` that clients use."""
    return (await read_named(redis, keys, base))[1]


async def read_texts(redis: Redis, key: bytes, fields: Sequence[str] = ()) -> dict[str, str]:
    """Read a hash of texts, such as a heartbeat. Invalid UTF-8 is replaced; fields that are too large are left out."""
    values = await read_hash(redis, key, most_bytes=MAX_FIELD_BYTES, fields=fields)
    texts = [(name, value) for name, value in values.items() if isinstance(value, bytes)]
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in texts}


class QueueState(NamedTuple):
    """A model's queue at one moment."""

    depth: int  # Prompts that wait or are being computed.
    age_s: float  # Seconds since the oldest of these prompts was queued; 0 if the queue is empty.
    dead: int  # Number of dead letters: jobs that workers gave up.
    server_time: float  # Seconds since the epoch by the server's clock.


def drain_seconds(queue: QueueState, answers_per_s: float) -> float:
    """Seconds until the workers have emptied a queue, if no prompts are added.

    A rate of 0 means that the rate is unknown; the estimate is then the age of the oldest prompt.
    """
    return queue.depth / answers_per_s if answers_per_s > 0 else queue.age_s


async def read_queue(redis: Redis, keys: ModelKeys) -> QueueState:
    """The state of a model's queue. A queue that no worker has ever served is empty."""
    depth, age_ms, dead, now_ms = map(int, await SURVEY(redis, [keys.jobs, keys.dead], []))
    return QueueState(depth, age_ms / 1000, dead, now_ms / 1000)


async def read_queue_in(redis: Redis, partitions: Sequence[ModelKeys]) -> QueueState:
    """The state of a model's queue that consists of these partitions: sums, and the age of the oldest prompt."""
    states = [await read_queue(redis, keys) for keys in partitions]
    depth, dead = sum(state.depth for state in states), sum(state.dead for state in states)
    return QueueState(depth, max(state.age_s for state in states), dead, states[-1].server_time)


class Alive(NamedTuple):
    """The live workers of a model at one moment."""

    serving: int
    loading: int
    names: tuple[str, ...]  # Ids of the serving workers, up to `MAX_WORKERS`; () unless the caller requested names.


async def read_alive(redis: Redis, keys: ModelKeys, *, names: bool = False) -> Alive:
    """Count the live workers of a model, in constant time; with `names`, also list the serving workers."""
    args = [_MAX_LEASE_MS, MAX_WORKERS if names else 0]
    serving, loading, workers = await ALIVE(redis, [keys.workers, keys.loading], args)
    return Alive(int(serving), int(loading), tuple(sorted(name.decode("utf-8", "replace") for name in workers)))


async def read_alive_in(redis: Redis, partitions: Sequence[ModelKeys], *, names: bool = False) -> Alive:
    """Count the live workers in several partitions of a model's queue, as `read_alive` does in one."""
    alive = [await read_alive(redis, keys, names=names) for keys in partitions]
    listed = {name for each in alive for name in each.names}
    return Alive(sum(each.serving for each in alive), sum(each.loading for each in alive), tuple(sorted(listed)))


class Load(NamedTuple):
    """How busy one partition of a model's queue is."""

    workers: int  # Live workers that take jobs.
    batch: int  # Prompts that these workers compute at once.
    jobs: int  # Jobs that wait or are being computed.


async def read_load(redis: Redis, keys: ModelKeys) -> Load:
    """How busy one partition of a model's queue is, in constant time."""
    reply = await LOAD(redis, [keys.jobs], [])
    try:
        workers, batch, jobs = map(int, reply)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"no reply to load.lua: {shown(reply)}") from error
    return Load(workers, batch, jobs)


async def read_loads(
    redis: Redis, partitions: Iterable[ModelKeys], lease_s: float | None = None
) -> list[Load | Exception]:
    """How busy each partition is, or why its master did not answer.

    With the model's lease, wait a quarter of a reply timeout for each master: callers do more work in this timeout.
    """
    limit_s = None if lease_s is None else reply_timeout(lease_s) / 4

    async def read(keys: ModelKeys) -> Load | Exception:
        try:
            async with silence_limit(limit_s):
                return await read_load(redis, keys)
        except (RedisError, OSError, ProtocolError) as error:
            return error

    return await asyncio.gather(*map(read, partitions))


async def read_lanes(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """Worker -> jobs in its lane, waiting and held: the longest lanes first, up to `MAX_WORKERS`."""
    try:
        # Read one member more than MAX_WORKERS: the member "", which holds the sum of all lengths, may be among them.
        lanes: Any = await redis.zrevrange(keys.lanes, 0, MAX_WORKERS, withscores=True)
    except ResponseError as error:
        if not str(error).startswith(_NO_QUEUE):
            raise
        return {}
    return {name.decode("utf-8", "replace"): int(min(max(0.0, jobs), _MAX_LANE)) for name, jobs in lanes if name}


async def read_consumers(redis: Redis, keys: ModelKeys) -> list[bytes]:
    """The workers that a model's queue has recorded, live or not: its consumers, and the owners of its lanes."""
    try:
        consumers = await redis.xinfo_consumers(keys.jobs, GROUP)
        lanes = await redis.zrange(keys.lanes, 0, MAX_WORKERS)
    except ResponseError as error:
        if not str(error).removeprefix("ERR ").startswith(_NO_QUEUE):
            raise
        return []
    return list(dict.fromkeys([consumer["name"] for consumer in consumers] + [worker for worker in lanes if worker]))
