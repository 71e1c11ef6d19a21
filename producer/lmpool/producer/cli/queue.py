"""`lmpool queue`: how many prompts wait in a model's queue and for which clients, and a way to remove them."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.scripts import MAX_WORKERS, read_lanes, read_queue
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import ProtocolError, QueueCleared, SettingsError, UnknownModel
from lmpool.producer.cli.options import AsJson, Prefix, RedisUrl, run, with_server
from lmpool.producer.cli.status import Column, fitting, seconds
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.job import Failure, digest_of, query_digest, unpack_job
from lmpool.protocol.keys import (
    BULK,
    BULK_TIME,
    CONTINUED,
    CONTINUED_TIME,
    GROUP,
    JOB_FIELD,
    REPLY_CAP,
    REPLY_TTL_MS,
    Keys,
    ModelKeys,
)
from lmpool.settings import check_name

T = TypeVar("T")

_LATER = b"later"
# A job may have 16 MB.
_READ_AT_ONCE = 8
_LISTED_AT_ONCE = 1000
# Each takes the server several times as long as one that is submitted.
_REMOVED_AT_ONCE = 50
# What is queued while the queue is being emptied may be left, or this would never end.
_MAX_ROUNDS = 3
_MAX_CLIENTS = 50

queue_app = typer.Typer(
    name="queue", help="The queue of a model: its depth, its clients, emptying it.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help="Name of the model, which need not be served.")]


class Queued(NamedTuple):
    """A prompt in a queue: its entry or "later", and its digest; b"" when it does not decode."""

    entry: bytes
    digest: bytes


class Cleared(NamedTuple):
    """What has become of a queue.

    Attributes:
        removed: prompts that were removed.
        held: prompts that workers hold and answer.
        queued: prompts that were queued meanwhile and are left.
    """

    removed: int
    held: int
    queued: int


@queue_app.command()
def show(
    model: Annotated[
        str | None, typer.Argument(help="Name of the model, which need not be served (default: all that are served).")
    ] = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Show how many prompts wait, how many workers hold, how many are in lanes, and whose are in the backlog."""

    async def look(client: Redis, discovery: Discovery, names: Keys) -> dict[str, tuple[dict[str, Any], str]]:
        models = sorted(await discovery.infos()) if model is None else [model]
        return {name: await _counts(client, discovery, names.model(name), name) for name in models}

    if model is not None:
        check_name("model", model)
    looked = run(with_server(redis, prefix, look))
    if as_json:
        counts = {name: counts for name, (counts, _) in looked.items()}
        say_json(counts if model is None else counts[model])
    elif not looked:
        say("no model is served")
    else:
        for name, (counts, doubt) in looked.items():
            _say_counts("" if model is not None else f"{name}: ", counts, doubt)


async def _counts(client: Redis, discovery: Discovery, keys: ModelKeys, model: str) -> tuple[dict[str, Any], str]:
    """The state of one queue, and what to add where it is empty."""
    state = await discovery.queue(model)
    counts = {
        "queued": state.depth,
        "held": sum([await _held(client, stream) for stream, _ in await _streams(client, keys)]),
        "backlog": int(await client.zcard(keys.backlog)),
        "bulk": int(await client.zcount(keys.backlog, BULK_TIME, "+inf")),
        "lanes": await read_lanes(client, keys),
        "age_s": state.age_s,
        "clients": await _clients(client, keys),
    }
    return counts, "" if state.depth else await _doubt(discovery, model)


def _say_counts(head: str, counts: dict[str, Any], doubt: str) -> None:
    held, backlog, lanes = counts["held"], counts["backlog"], counts["lanes"].values()
    of_bulk = f", {counts['bulk']} of them yield to others" if counts["bulk"] else ""
    laned = f"; {sum(lanes)} are in lanes, {max(lanes)} of them in the longest" if any(lanes) else ""
    oldest = f", the oldest of {seconds(counts['age_s']) or '0 s'}" if counts["queued"] else ""
    say(
        f"{head}{counts['queued']} prompts{oldest}: workers hold {held}, "
        f"{counts['queued'] - held - backlog} are next, {backlog} wait behind them{of_bulk}{laned}{_joined(doubt)}"
    )
    if counts["clients"]:
        console, clients = Terminal(), counts["clients"]
        columns = [Column("client", list(clients), 0), Column("behind", [str(count) for count in clients.values()], 1)]
        console.print(fitting(None, columns, console.width))


@queue_app.command()
def clear(
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Remove all prompts that wait for workers. Their clients' requests end at once, with QueueCleared.

    What workers hold is computed and delivered.
    """
    check_name("model", model)
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError("yes: the requests of all clients of this queue would end: say --yes if that is meant")
        typer.confirm(f"End the requests of all who wait in the queue of {model!r}?", abort=True)

    async def change(client: Redis, discovery: Discovery, names: Keys) -> tuple[Cleared, str]:
        info = await discovery.find(model)
        cleared = await clear_queue(client, names.model(model), model, lease_s=info.lease_s if info else 0.0)
        return cleared, "" if cleared.removed else await _doubt(discovery, model)

    cleared, doubt = run(with_server(redis, prefix, change, right="emptying a queue is a right of operators"))
    if as_json:
        say_json(cleared._asdict())
    else:
        rest = f"; workers hold {cleared.held}, which are answered" if cleared.held else ""
        say(f"removed {cleared.removed} prompts from the queue of {model!r}{rest}{_joined(doubt)}")
        if cleared.queued:
            say(f"{cleared.queued} more were queued meanwhile: stop who asks, or run this again", err=True)


async def clear_queue(redis: Redis, keys: ModelKeys, model: str, *, lease_s: float) -> Cleared:
    """Take the prompts that wait out of a queue, and tell the clients; what is queued meanwhile may be left.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
        model: its name, for the text that clients get.
        lease_s: seconds of silence after which what a worker holds counts as not held.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    failure = Failure(
        QueueCleared.__name__,
        f"an operator has cleared the queue of {model!r} (`lmpool queue clear`): ask again if the row is still wanted",
    )
    head: list[bytes | str | int] = [GROUP, failure.pack(), REPLY_CAP, REPLY_TTL_MS, int(lease_s * 1000)]
    removed = queued = 0
    for _ in range(_MAX_ROUNDS):
        gone = held = 0
        # The backlog first: what moves up meanwhile is found in a stream.
        streams = await _streams(redis, keys)
        for listed in (_backlog(redis, keys), *(_stream(redis, *stream) for stream in streams)):
            async for portion in _portions(listed):
                while portion:
                    names = [keys.jobs, keys.waiting, *(keys.waiting + prompt.digest for prompt in portion)]
                    counts = await scripts.CLEAR(redis, names, [*head, *(prompt.entry for prompt in portion)])
                    gone, held = gone + counts[0], held + counts[1]
                    portion = [portion[number - 1] for number in counts[2]]
        removed += gone
        if not gone:
            break
    else:
        queued = (await read_queue(redis, keys)).depth - held
    return Cleared(removed, held, max(0, queued))


async def _portions(queued: AsyncIterator[Queued]) -> AsyncIterator[list[Queued]]:
    """Portions for one call of a script."""
    portion: list[Queued] = []
    async for prompt in queued:
        portion.append(prompt)
        if len(portion) == _REMOVED_AT_ONCE:
            yield portion
            portion = []
    if portion:
        yield portion


async def _backlog(redis: Redis, keys: ModelKeys) -> AsyncIterator[Queued]:
    """The prompts in the backlog now."""
    digests: set[bytes] = set()
    async for digest, _ in redis.zscan_iter(keys.backlog, count=_LISTED_AT_ONCE):
        digests.add(digest)
    for digest in digests:
        yield Queued(_LATER, digest)


async def _streams(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """The streams of a queue, the lanes before the shared one, each with what follows the ids of its entries."""
    lanes: Any = await redis.zrange(keys.lanes, 0, MAX_WORKERS, desc=True)
    return [*((keys.lane(worker), b" " + worker) for worker in lanes if worker), (keys.jobs, b"")]


async def _stream(redis: Redis, stream: bytes, suffix: bytes) -> AsyncIterator[Queued]:
    """The prompts in a stream now, a few jobs in memory at a time."""
    first = "-"
    newest: Any = await redis.xrevrange(stream, count=1)
    while newest:
        page: Any = await redis.xrange(stream, first, newest[0][0], _READ_AT_ONCE)
        for entry, fields in page:
            yield Queued(entry + suffix, _digest(fields.get(JOB_FIELD, b"")))
        if not page:
            break
        first = f"({page[-1][0].decode('ascii')}"


def _digest(data: bytes) -> bytes:
    """The digest of what a job's clients wait for; b"" when the job does not decode."""
    try:
        job = unpack_job(data)
        prompt = digest_of(job.ids, job.adapter)
        return query_digest(prompt, job.query) if job.query else prompt
    except ProtocolError:
        return b""


async def _held(redis: Redis, stream: bytes) -> int:
    """Number of the prompts of a stream that workers hold."""
    try:
        groups: Iterable[Any] = await redis.xinfo_groups(stream)
    except RedisError as error:
        if "no such key" in str(error):
            return 0  # Nobody has served the model yet.
        raise
    return sum(int(group["pending"]) for group in groups if group["name"] == GROUP.encode())


async def _clients(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """The clients that have most in the backlog, and how much: so far do their last prompts start after now.

    Continuations count as the tokens that they may generate; those of interactive clients stand under "ID:tokens".
    """
    behind: dict[str, int] = {}
    # Each kind that yields has a virtual time of its own, behind all others'.
    for first, last, time, least in (
        (-math.inf, CONTINUED_TIME, "", 0.0),
        (CONTINUED_TIME, BULK_TIME, CONTINUED, CONTINUED_TIME),
        (BULK_TIME, math.inf, BULK, BULK_TIME),
    ):
        now = max(least, float(await redis.zscore(keys.virtual_time, time) or 0))
        starts: Any = await redis.zrevrangebyscore(
            keys.virtual_time, last, first, start=0, num=_MAX_CLIENTS, withscores=True
        )
        prefix = keys.reply("").decode()
        counts = {name.decode("utf-8", "replace").removeprefix(prefix): int(start - now) for name, start in starts}
        behind |= {name: count for name, count in counts.items() if count > 0 and not name.startswith("owed")}
    return behind


async def _doubt(discovery: Discovery, model: str) -> str:
    """What to add of a queue that is empty: a name that is mistyped must not look like good news."""
    try:
        await discovery.info(model)
    except UnknownModel as error:
        return str(error)
    return ""


def _joined(doubt: str) -> str:
    return f"; {doubt}" if doubt else ""
