"""Count and clear a model's queue; list, retry and drop its dead letters, the jobs that workers gave up.

Any program with access to the queue may have written a job, so this code validates every field.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import starmap
from typing import Any, NamedTuple, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.admin.survey import shortened
from lmpool.broker import scripts
from lmpool.broker.registries import AdapterRegistry
from lmpool.errors import InvalidPrompt, LMPoolError, ProtocolError, QueueCleared, SettingsError
from lmpool.protocol import job as jobs
from lmpool.protocol import keys as key_names
from lmpool.protocol import query as queries
from lmpool.protocol.adapter import name_of, revision_of
from lmpool.protocol.keys import BULK, BULK_TIME, CONTINUED, CONTINUED_TIME, Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo

_LATER = b"later"
_PAGE = 8  # Stream entries per read: few, because one entry may hold a job of 16 MB.
_SCAN_COUNT = 1000  # Number of backlog digests that each ZSCAN call requests.
_CLEARED_PER_CALL = 50  # Max prompts that one script call removes: removing a prompt takes much longer than adding it.
_MAX_ROUNDS = 3  # Max passes over the queue, so that clearing ends even if clients keep submitting.
_MAX_CLIENTS = 50  # Max clients of each priority that `lmpool queue show` lists.
_FAILURE_FIELD = b"e"
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_MAX_CANDIDATES = 8  # Max matching ids that the error for an ambiguous dead letter lists.
_MAX_BYTES = 256  # Max bytes of a job that are shown if the job cannot be decoded.
_MAX_DESCRIPTION = 200  # Max characters of the text that describes a query.
_DROPPED_PER_CALL = 500  # Max dead letters that one XDEL deletes, so that other clients wait less than a millisecond.
_KEPT_MS = 3_600_000  # Milliseconds until the key expires that marks a retried job as in flight: no client renews it.


class Cleared(NamedTuple):
    """The result of clearing a queue."""

    removed: int
    held: int  # Prompts that workers hold and will still compute.
    queued: int  # Prompts that clients submitted during the clearing and that remain in the queue.


async def count_queue(redis: Redis, partitions: Sequence[ModelKeys]) -> dict[str, Any]:
    """Count the prompts of a queue in all of its partitions, as `lmpool queue show --json` prints them.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    state, lanes, clients = await scripts.read_queue_in(redis, partitions), dict[str, int](), Counter[str]()
    for keys in partitions:
        lanes |= await scripts.read_lanes(redis, keys)
        clients.update(await _clients(redis, keys))
    streams = [stream for keys in partitions for stream, _ in await _streams(redis, keys)]
    return {
        "queued": state.depth,
        "held": sum([await _held(redis, stream) for stream in streams]),
        "backlog": sum([int(await redis.zcard(keys.backlog)) for keys in partitions]),
        "bulk": sum([int(await redis.zcount(keys.backlog, BULK_TIME, "+inf")) for keys in partitions]),
        "lanes": lanes,
        "age_s": state.age_s,
        "clients": dict(clients),
    }


async def clear_queue(redis: Redis, partitions: Sequence[ModelKeys], model: str, *, lease_s: float) -> Cleared:
    """Remove the waiting prompts from all partitions of a queue and notify their clients; see `clear_partition`."""
    parts = [await clear_partition(redis, keys, model, lease_s=lease_s) for keys in partitions]
    return Cleared(*map(sum, zip(*parts, strict=True)))


async def clear_partition(redis: Redis, keys: ModelKeys, model: str, *, lease_s: float) -> Cleared:
    """Remove the waiting prompts from one partition of a queue and notify their clients.

    Args:
        redis: a client for control messages.
        keys: the keys of the partition.
        model: the model's name, for the error that clients get.
        lease_s: a job of a worker that has been silent for this many seconds counts as waiting.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    text = f"an operator has cleared the queue of {model!r} (`lmpool queue clear`): submit the request again if needed"
    failure, lease_ms = jobs.Failure(QueueCleared.__name__, text).pack(), int(lease_s * 1000)
    removed = queued = 0
    for _ in range(_MAX_ROUNDS):
        gone = held = 0
        prompts = await _list_prompts(redis, keys)
        for at in range(0, len(prompts), _CLEARED_PER_CALL):
            portion = prompts[at : at + _CLEARED_PER_CALL]
            while portion:
                names = [keys.jobs, keys.waiting, *(keys.waiting + digest for _, digest in portion)]
                head = [key_names.GROUP, failure, key_names.REPLY_CAP, key_names.REPLY_TTL_MS, lease_ms]
                args = [*head, *(entry for entry, _ in portion)]
                now_gone, now_held, again = await scripts.CLEAR(redis, names, args)
                gone, held = gone + now_gone, held + now_held
                portion = [portion[number - 1] for number in again]
        removed += gone
        if not gone:
            break
    else:
        queued = (await scripts.read_queue(redis, keys)).depth - held
    return Cleared(removed, held, max(0, queued))


async def _list_prompts(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """Return (entry id, digest) of each prompt; a backlog prompt has the id b"later", an invalid job the digest b"".

    The backlog is read first: a prompt that moves from the backlog to a stream during the call is found in the stream.
    """
    later = {digest async for digest, _ in redis.zscan_iter(keys.backlog, count=_SCAN_COUNT)}
    prompts = [(_LATER, digest) for digest in later]
    for stream, suffix in await _streams(redis, keys):
        first, newest = "-", cast(Any, await redis.xrevrange(stream, count=1))
        while newest and (page := cast(Any, await redis.xrange(stream, first, newest[0][0], _PAGE))):
            jobs = [(entry, fields) for entry, fields in page if key_names.WAKE_FIELD not in fields]
            prompts += [(entry + suffix, read_letter(entry, fields).digest) for entry, fields in jobs]
            first = f"({page[-1][0].decode('ascii')}"
    return prompts


async def _streams(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """Return a queue's streams and the suffixes of their entry ids: first the lanes, each one worker's own stream."""
    lanes: Any = await redis.zrange(keys.lanes, 0, scripts.MAX_WORKERS, desc=True)
    return [*((keys.lane(worker), b" " + worker) for worker in lanes if worker), (keys.jobs, b"")]


async def _held(redis: Redis, stream: bytes) -> int:
    try:
        groups: Iterable[Any] = await redis.xinfo_groups(stream)
    except RedisError as error:
        if "no such key" in str(error):
            return 0  # The stream does not exist until a worker serves the model.
        raise
    return sum(int(group["pending"]) for group in groups if group["name"] == key_names.GROUP.encode())


async def _clients(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """Return how far each client of the backlog is behind: its last start time minus the current virtual time.

    A continuation counts as its max number of tokens. An interactive client's continuations have the entry "ID:tokens".
    """
    behind: dict[str, int] = {}
    # Each priority has its own virtual time and its own range of start times (docs/design/queue.md).
    ranges = (("", -math.inf, CONTINUED_TIME), (CONTINUED, CONTINUED_TIME, BULK_TIME), (BULK, BULK_TIME, math.inf))
    for time, first, last in ranges:
        now = max(first, 0.0, float(await redis.zscore(keys.virtual_time, time) or 0))
        starts: Any = await redis.zrevrangebyscore(
            keys.virtual_time, last, first, start=0, num=_MAX_CLIENTS, withscores=True
        )
        prefix = keys.reply("").decode()
        counts = {name.decode("utf-8", "replace").removeprefix(prefix): int(start - now) for name, start in starts}
        behind |= {name: count for name, count in counts.items() if count > 0 and not name.startswith("owed")}
    return behind


class DeadLetter(NamedTuple):
    """One job that workers gave up."""

    entry: str  # Id of the stream entry, "MS-N": MS is the time when workers gave the job up, in ms since 1970.
    data: bytes  # The encoded job, as a client queued it.
    failure: jobs.Failure
    job: jobs.Job | None = None  # The decoded `data`; None if `data` cannot be decoded.
    query: queries.Query | None = None  # The job's query; None if the job requests a row.
    digest: bytes = b""  # The digest that the job's clients waited for; b"" if the job cannot be decoded.
    fault: str = ""  # Why no worker can compute the job; "" if the job can be retried.
    keys: ModelKeys | None = None  # Keys of the partition of the queue with this dead letter.

    @property
    def given_up(self) -> float:
        """Time at which the job was given up, in seconds since 1970."""
        return int(self.entry.partition("-")[0]) / 1000


def read_letter(entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """Decode an entry of the stream of dead letters; `fault` names invalid content."""
    data = fields.get(key_names.JOB_FIELD, b"")
    try:
        failure = jobs.unpack_failure(fields.get(_FAILURE_FIELD, b""))
    except ProtocolError as error:
        failure = jobs.Failure("", f"the reason cannot be read: {error}")
    letter = DeadLetter(entry.decode("ascii"), data, jobs.Failure(shortened(failure.kind, 60), shortened(failure.text)))
    try:
        job = jobs.unpack_job(data)
        prompt = jobs.digest_of(job.ids, job.adapter)
        letter = letter._replace(job=job, digest=jobs.query_digest(prompt, job.query) if job.query else prompt)
        return letter._replace(query=queries.unpack_query(job.query) if job.query else None)
    except ProtocolError as error:
        return letter._replace(fault=shortened(str(error)))


class DeadLetters:
    """The dead letters in all partitions of one model's queue; `redis` is a redis-py client for control messages."""

    def __init__(self, redis: Redis, *partitions: ModelKeys) -> None:
        self._redis, self._partitions = redis, partitions

    async def count(self) -> int:
        """Return the number of dead letters."""
        return sum([int(await self._redis.xlen(keys.dead)) for keys in self._partitions])

    async def newest(self, limit: int) -> list[DeadLetter]:
        """Return at most `limit` dead letters, the newest first."""
        letters = [letter for keys in self._partitions for letter in await self._newest(keys, limit)]
        return sorted(letters, key=lambda letter: letter.given_up, reverse=True)[:limit]

    async def _newest(self, keys: ModelKeys, limit: int) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        while len(letters) < limit:
            last = f"({letters[-1].entry}" if letters else "+"
            page: Any = await self._redis.xrevrange(keys.dead, last, "-", min(_PAGE, limit - len(letters)))
            if not page:
                break
            letters += (read_letter(*entry)._replace(keys=keys) for entry in page)
        return letters

    async def oldest_first(self) -> AsyncGenerator[DeadLetter, None]:
        """Iterate over all current dead letters, the oldest of each partition first, with few of them in memory."""
        for keys in self._partitions:
            first = "-"
            for newest in await self._newest(keys, 1):
                while page := cast(Any, await self._redis.xrange(keys.dead, first, newest.entry, _PAGE)):
                    for entry in page:
                        yield read_letter(*entry)._replace(keys=keys)
                    first = f"({page[-1][0].decode('ascii')}"

    async def find(self, names: Sequence[str]) -> list[DeadLetter]:
        """Return the dead letters with these names, each once.

        Args:
            names: ids or digests (in hexadecimal), or unambiguous prefixes of either.

        Raises:
            SettingsError: a name matches no dead letter, or several dead letters.
        """
        letters = [await self._find(name) for name in names]
        return list({(letter.keys, letter.entry): letter for letter in letters}.values())

    async def _find(self, name: str) -> DeadLetter:
        if found := await self._at(name):
            return found
        entries = []
        async for letter in self.oldest_first():
            if name and (letter.entry.startswith(name) or letter.digest.hex().startswith(name.lower())):
                entries.append(letter.entry)
                found = letter
        if found is None:
            raise SettingsError(f"id: {shortened(name, 60)!r} matches no dead letter: see `lmpool dead list`")
        if len(entries) > 1:
            more = f" and {len(entries) - _MAX_CANDIDATES} more" if len(entries) > _MAX_CANDIDATES else ""
            raise SettingsError(f"id: {name!r} matches {', '.join(entries[:_MAX_CANDIDATES])}{more}: name one of them")
        return found

    async def _at(self, entry: str) -> DeadLetter | None:
        is_id = _ID.fullmatch(entry) and all(int(number) < 2**64 for number in entry.split("-"))
        for keys in self._partitions if is_id else ():
            found: Any = await self._redis.xrange(keys.dead, entry, entry, 1)
            for letter in starmap(read_letter, found):
                return letter._replace(keys=keys)
        return None

    async def drop(self, letters: Sequence[DeadLetter]) -> int:
        """Delete dead letters; return how many existed. Letters of other partitions may have the same ids."""
        dropped = 0
        for keys in self._partitions:
            entries = [letter.entry for letter in letters if letter.keys == keys]
            for at in range(0, len(entries), _DROPPED_PER_CALL):
                dropped += int(await self._redis.xdel(keys.dead, *entries[at : at + _DROPPED_PER_CALL]))
        return dropped

    async def drop_all(self) -> int:
        """Delete all dead letters; return how many existed."""
        return sum([int(await self._redis.xtrim(key.dead, maxlen=0, approximate=False)) for key in self._partitions])

    async def retry(self, letter: DeadLetter, info: ModelInfo, adapters: Collection[str]) -> bool:
        """Queue a job again, with its delivery count set to zero; a worker then caches its row.

        Args:
            letter: the dead letter of the job.
            info: the info of the model that is served now.
            adapters: qualified names of the registered adapters; see `served_adapters`.

        Returns:
            True if the job was queued; False if another job of the same prompt is already in flight.

        Raises:
            LMPoolError: no worker can compute the job, or the queue is full; the dead letter stays.
        """
        reason = _refusal(letter, info, adapters)
        if not reason:
            partition = letter.keys or self._partitions[0]
            keys = [partition.jobs, partition.dead, partition.waiting + letter.digest]
            outcome = await scripts.RETRY(self._redis, keys, [letter.entry, letter.data, info.queue_limit, _KEPT_MS])
            if outcome in (b"Q", b"J"):
                return bool(outcome == b"Q")
            reason = "another program has just retried or dropped it"
            if outcome == b"F":
                reason = f"the queue is at its limit of {info.queue_limit} prompts: retry later"
        raise LMPoolError(f"{letter.entry}: {reason}")

    async def served_adapters(self, keys: Keys, info: ModelInfo) -> set[str]:
        """Return the qualified names of the registered adapters."""
        known = await AdapterRegistry(self._redis, keys.model(info.base), info.lineage).read()
        return {f"{name}@{adapter.revision}" for name, adapter in known.adapters.items()}


def _refusal(letter: DeadLetter, info: ModelInfo, adapters: Collection[str]) -> str:
    """Return why a job cannot be queued again; "" if the job can be queued."""
    if letter.fault or letter.job is None:
        return f"the job cannot be decoded, so no worker can compute it: {letter.fault}"
    job = letter.job
    if job.fingerprint != info.fingerprint:
        fingerprint = shortened(job.fingerprint, 60)
        return f"it is for another model of this name: its fingerprint is {fingerprint}, not {info.fingerprint}"
    if info.is_trie:
        return ""
    try:
        jobs.check_encoded(job.ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
    except InvalidPrompt as error:
        return str(error)
    if job.adapter and job.adapter not in adapters:
        name, revision = shortened(name_of(job.adapter), 60), shortened(revision_of(job.adapter), 60)
        return f"the adapter {name!r} of revision {revision!r} is no longer registered"
    return ""


def summary(letter: DeadLetter) -> dict[str, Any]:
    """Describe a dead letter, as JSON and tables show it."""
    job = letter.job
    try:
        given_up = datetime.fromtimestamp(letter.given_up, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # Any program that adds an entry may choose its id.
        given_up = "at an impossible time"
    return {
        "id": letter.entry,
        "given_up": given_up,
        "error": letter.failure.kind,
        "reason": letter.failure.text,
        "fault": letter.fault,
        "digest": letter.digest.hex(),
        "tokens": None if job is None else len(job.ids) // 4,
        "adapter": "" if job is None else shortened(job.adapter, 170),
        "asked": "" if job is None or letter.fault else "row" if letter.query is None else _describe(letter.query),
        "fingerprint": "" if job is None else shortened(job.fingerprint, 60),
    }


def contents(letter: DeadLetter, max_ids: int | None) -> dict[str, Any]:
    """Return the token ids of a dead letter, or the first bytes of a job that cannot be decoded."""
    if letter.job is None or len(letter.job.ids) % 4:
        begin, dots = letter.data[:_MAX_BYTES].hex(), "…" if len(letter.data) > _MAX_BYTES else ""
        return {"bytes": len(letter.data), "job": begin + dots}
    return {"ids": jobs.decode_ids(letter.job.ids)[:max_ids].tolist()}


def _describe(query: queries.Query) -> str:
    """The kind of a query and its options; an option whose value is bytes appears by name only."""
    kind = type(query).__name__.removesuffix("Query").lower()
    given = ((name, value) for name, value in msgspec.structs.asdict(query).items() if value not in (b"", ""))
    options = (name if isinstance(value, bytes) else f"{name}={value}" for name, value in given)
    return shortened(" ".join([kind, *options]), _MAX_DESCRIPTION)
