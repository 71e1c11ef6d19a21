"""`lmpool dead`: jobs that workers gave up, with the reason; they are read, queued again, or dropped.

Anybody who may write to the queue may have written a job, so nothing here trusts what is in it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from redis.asyncio import Redis
from rich.table import Table

from lmpool.broker import scripts
from lmpool.broker.registries import AdapterRegistry
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import InvalidPrompt, LMPoolError, ProtocolError, SettingsError, UnknownModel, printable
from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, run, with_server
from lmpool.producer.cli.status import WHOLE, Column, fitting
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.adapter import name_of, revision_of
from lmpool.protocol.job import (
    Failure,
    Job,
    check_encoded,
    decode_ids,
    digest_of,
    query_digest,
    unpack_failure,
    unpack_job,
)
from lmpool.protocol.keys import JOB_FIELD, Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import (
    FreshQuery,
    GenerateQuery,
    HeadQuery,
    MassQuery,
    PositionsQuery,
    Query,
    SampleQuery,
    TopQuery,
    unpack_query,
)
from lmpool.settings import check_name

T = TypeVar("T")

dead_app = typer.Typer(
    name="dead", help="Dead letters: prompts that were given up, with the reason.", no_args_is_help=True
)

_WAYS = "as `lmpool dead list` shows them; so much of one as tells which is meant."
Id = Annotated[str, typer.Argument(help=f"Id or digest, {_WAYS}")]
Ids = Annotated[list[str] | None, typer.Argument(help=f"Ids or digests, {_WAYS}")]
All = Annotated[bool, typer.Option("--all", help="All that there are.")]

MAX_TEXT = 500
"""Characters that are shown of a text that somebody else has written."""

_FAILURE_FIELD = b"e"
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_BEGINNING = re.compile(r"[0-9]{1,20}(-[0-9]{0,20})?|[0-9a-fA-F]{1,32}")
_MAX_NAMED = 8
_MAX_IDS = 64
_MAX_BYTES = 256
_MAX_REASONS = 5
_MIN_REASON = 20
# A letter may hold a job of 16 MB.
_AT_ONCE = 8
_DROPPED_AT_ONCE = 500
_KEPT_MS = 3_600_000


class DeadLetter(NamedTuple):
    """One job that was given up.

    Attributes:
        entry: its id in the stream: milliseconds since 1970 when it was given up, "-", a number.
        data: the job as it was queued.
        failure: how it ended.
        job: what `data` says; None when it does not decode.
        query: what was wanted instead of the row; None for the row.
        digest: of what was waited for; b"" when the job does not decode.
        fault: why it cannot be computed whoever computes it; "" when it can be tried again.
    """

    entry: str
    data: bytes
    failure: Failure
    job: Job | None = None
    query: Query | None = None
    digest: bytes = b""
    fault: str = ""

    @property
    def given_up(self) -> float:
        """When, in seconds since 1970."""
        return int(self.entry.partition("-")[0]) / 1000


def read_letter(entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """A letter from its entry in the stream, whatever that holds."""
    data = fields.get(JOB_FIELD, b"")
    letter = DeadLetter(entry.decode("ascii"), data, _read_failure(fields.get(_FAILURE_FIELD, b"")))
    try:
        job = unpack_job(data)
        prompt = digest_of(job.ids, job.adapter)
        letter = letter._replace(job=job, digest=query_digest(prompt, job.query) if job.query else prompt)
        return letter._replace(query=unpack_query(job.query) if job.query else None)
    except ProtocolError as error:
        return letter._replace(fault=shortened(str(error)))


def _read_failure(data: bytes) -> Failure:
    try:
        failure = unpack_failure(data)
    except ProtocolError as error:
        failure = Failure("", f"the reason cannot be read: {error}")
    return Failure(shortened(failure.kind, 60), shortened(failure.text))


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """A text as it is printed, cut to `most` characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


class DeadLetters:
    """The dead letters of one model.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
    """

    def __init__(self, redis: Redis, keys: ModelKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def count(self) -> int:
        """Number of the letters."""
        return int(await self._redis.xlen(self._keys.dead))

    async def newest(self, most: int) -> list[DeadLetter]:
        """The newest letters, at most so many; the last one first."""
        letters: list[DeadLetter] = []
        last = "+"
        while len(letters) < most:
            count = min(_AT_ONCE, most - len(letters))
            page = _letters(await self._redis.xrevrange(self._keys.dead, last, "-", count))
            if not page:
                break
            letters += page
            last = f"({letters[-1].entry}"
        return letters

    async def oldest_first(self) -> AsyncGenerator[DeadLetter, None]:
        """All letters that there are now, a few in memory at a time."""
        first = "-"
        for newest in await self.newest(1):
            while page := _letters(await self._redis.xrange(self._keys.dead, first, newest.entry, _AT_ONCE)):
                for letter in page:
                    yield letter
                first = f"({page[-1].entry}"

    async def find(self, names: Sequence[str]) -> list[DeadLetter]:
        """The letters of these names, each once.

        Args:
            names: ids or digests (in hexadecimal), or beginnings of them that only one letter has.

        Raises:
            SettingsError: no letter has a name, or several have.
        """
        letters: dict[str, DeadLetter] = {}
        matches: dict[str, list[str]] = {}
        for name in names:
            if letter := await self._at(name):
                letters[letter.entry] = letter
            else:
                matches[name] = []
        if any(map(_BEGINNING.fullmatch, matches)):
            async for letter in self.oldest_first():
                for name, entries in matches.items():
                    if name and (letter.entry.startswith(name) or letter.digest.hex().startswith(name.lower())):
                        entries.append(letter.entry)
        for name, entries in matches.items():
            letter = await self._at(_the_only(name, entries))
            if letter is None:
                raise SettingsError(f"id: {entries[0]} is gone: somebody else has taken it meanwhile")
            letters[letter.entry] = letter
        return list(letters.values())

    async def _at(self, entry: str) -> DeadLetter | None:
        """The letter of an id."""
        is_id = _ID.fullmatch(entry) and all(int(number) < 2**64 for number in entry.split("-"))
        letters = _letters(await self._redis.xrange(self._keys.dead, entry, entry, 1)) if is_id else []
        return letters[0] if letters else None

    async def drop(self, entries: Sequence[str]) -> int:
        """Remove the letters of these ids; returns how many there were."""
        dropped = 0
        for at in range(0, len(entries), _DROPPED_AT_ONCE):
            dropped += await self._redis.xdel(self._keys.dead, *entries[at : at + _DROPPED_AT_ONCE])
        return dropped

    async def drop_all(self) -> int:
        """Remove all letters that there are now; returns how many."""
        return int(await self._redis.xtrim(self._keys.dead, maxlen=0, approximate=False))

    async def retry(self, letter: DeadLetter, info: ModelInfo, adapters: Collection[str]) -> bool:
        """Queue a job again, with no deliveries; its row is then in the cache for whoever asks.

        Args:
            letter: the job.
            info: of the model that is served now.
            adapters: those that are in service, as jobs call them; see `served_adapters`.

        Returns:
            False when nothing had to be queued, for the same is being computed already.

        Raises:
            LMPoolError: it cannot be computed, or the queue is full; the letter stays.
        """
        if reason := _refusal(letter, info, adapters):
            raise LMPoolError(f"{letter.entry}: {reason}")
        keys = [self._keys.jobs, self._keys.dead, self._keys.waiting + letter.digest]
        outcome = await scripts.RETRY(self._redis, keys, [letter.entry, letter.data, info.queue_limit, _KEPT_MS])
        if outcome == b"F":
            raise LMPoolError(
                f"{letter.entry}: the queue is at its limit of {info.queue_limit} prompts: try again later"
            )
        if outcome == b"G":
            raise LMPoolError(f"{letter.entry}: somebody else has taken it meanwhile")
        return bool(outcome == b"Q")

    async def served_adapters(self, info: ModelInfo) -> set[str]:
        """The adapters in service, as jobs call them: "name@revision"."""
        known = await AdapterRegistry(self._redis, self._keys, info.fingerprint).read()
        return {f"{name}@{adapter.revision}" for name, adapter in known.adapters.items()}


def _the_only(name: str, entries: Sequence[str]) -> str:
    """The id that a name means, which must be the only one."""
    if len(entries) == 1:
        return entries[0]
    if not entries:
        raise SettingsError(f"id: {shortened(name, 60)!r} is none of the dead letters: see `lmpool dead list`")
    more = f" and {len(entries) - _MAX_NAMED} more" if len(entries) > _MAX_NAMED else ""
    raise SettingsError(f"id: {name!r} may be any of {', '.join(entries[:_MAX_NAMED])}{more}: name one of them")


def _letters(reply: Any) -> list[DeadLetter]:
    return [read_letter(entry, fields) for entry, fields in reply]


def _refusal(letter: DeadLetter, info: ModelInfo, adapters: Collection[str]) -> str:
    """Why a job cannot be queued again; "" when it can."""
    if letter.fault or letter.job is None:
        return f"it cannot be read, so nobody can compute it: {letter.fault}"
    job = letter.job
    if job.fingerprint != info.fingerprint:
        fingerprint = shortened(job.fingerprint, 60)
        return f"it is for another model of this name: its fingerprint is {fingerprint}, not {info.fingerprint}"
    if info.is_trie:
        return ""
    try:
        check_encoded(job.ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
    except InvalidPrompt as error:
        return str(error)
    if job.adapter and job.adapter not in adapters:
        name, revision = shortened(name_of(job.adapter), 60), shortened(revision_of(job.adapter), 60)
        return f"the adapter {name!r} of revision {revision!r} is not in service any more"
    return ""


@dead_app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="How many to show, the newest first.")] = 50,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Show the prompts that were given up, of one model or of all that are served."""

    async def look(client: Redis, discovery: Discovery, keys: Keys) -> tuple[list[tuple[str, DeadLetter]], int, str]:
        newest: list[tuple[str, DeadLetter]] = []
        names, count = [model] if model is not None else sorted(await discovery.infos()), 0
        if not names:
            return [], 0, "no model is served: name a model that is not served with --model"
        for name in names:
            letters = DeadLetters(client, keys.model(name))
            newest += [(name, letter) for letter in await letters.newest(limit)]
            count += await letters.count()
        newest.sort(key=lambda pair: pair[1].given_up, reverse=True)
        return newest[:limit], count, await _doubt(discovery, model) if model is not None and not newest else ""

    if model is not None:
        check_name("model", model)
    newest, count, doubt = run(with_server(redis, prefix, look))
    if as_json:
        say_json([{"model": name, **summary(letter)} for name, letter in newest])
        _warn(doubt)
        return
    if not newest:
        say(_joined("nothing was given up", doubt))
        return
    console = Terminal()
    models = [name for name, _ in newest] if model is None else None
    console.print(letters_table([letter for _, letter in newest], console.width, models))
    if count > len(newest):
        say(f"and {count - len(newest)} older ones: see --limit")


def letters_table(letters: Sequence[DeadLetter], width: int, models: Sequence[str] | None = None) -> Table:
    """Dead letters as a table in which their ids, by which commands name them, are whole.

    Args:
        letters: what to show.
        width: characters of a line.
        models: the name of the model of each letter; None for letters of one model.
    """
    summaries = [summary(letter) for letter in letters]

    def column(title: str, name: str, rank: int, least: int = WHOLE) -> Column:
        values = [told[name] for told in summaries]
        return Column(title, ["" if value is None else str(value) for value in values], rank, least)

    return fitting(
        None,
        [
            column("id", "id", 0),
            *([Column("model", list(models), 0)] if models is not None else []),
            column("given up", "given_up", 3),
            column("error", "error", 1),
            column("reason", "reason", 0, _MIN_REASON),
            column("tokens", "tokens", 2),
            column("adapter", "adapter", 5),
            column("asked for", "asked", 4),
            column("digest", "digest", 6),
        ],
        width,
    )


@dead_app.command()
def show(
    entry: Id, model: ModelName = None, redis: RedisUrl = None, prefix: Prefix = "lmpool", as_json: AsJson = False
) -> None:
    """Show one prompt that was given up, with its token ids."""

    async def look(letters: DeadLetters, _: Discovery, __: str) -> DeadLetter:
        return (await letters.find([entry]))[0]

    letter = run(_with_letters(model, redis, prefix, look))
    if as_json:
        say_json({**summary(letter), **contents(letter, most_ids=None)})
        return
    for name, value in {**summary(letter), **contents(letter, most_ids=_MAX_IDS)}.items():
        if value not in (None, ""):
            say(f"{name:<12} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if letter.job is not None and len(letter.job.ids) > 4 * _MAX_IDS:
        say(f"these are the first {_MAX_IDS} ids: see --json for all of them")


@dead_app.command()
def retry(
    entries: Ids = None,
    every: All = False,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Queue prompts again that were given up. Their rows are then in the cache."""
    _check_choice(entries, every)

    async def change(letters: DeadLetters, discovery: Discovery, name: str) -> dict[str, Any]:
        info = await discovery.info(name)
        adapters = await letters.served_adapters(info)
        outcome: dict[str, Any] = {"queued": [], "under_way": [], "refused": {}}
        async with aclosing(_chosen(letters, entries)) as chosen:
            async for letter in chosen:
                try:
                    is_queued = await letters.retry(letter, info, adapters)
                except LMPoolError as error:
                    outcome["refused"][letter.entry] = str(error)
                    continue
                outcome["queued" if is_queued else "under_way"].append(letter.entry)
        return outcome

    outcome = run(_with_letters(model, redis, prefix, change))
    queued, under_way, refused = (outcome[name] for name in ("queued", "under_way", "refused"))
    if as_json:
        say_json(outcome)
    elif queued or under_way or not refused:
        say(f"queued {len(queued)} prompts again; {len(under_way)} more were under way already")
    if refused:
        reasons = [*list(refused.values())[:_MAX_REASONS], *(["…"] if len(refused) > _MAX_REASONS else [])]
        raise LMPoolError(f"{len(refused)} prompts were not queued again: {'; '.join(reasons)}")


@dead_app.command()
def drop(
    entries: Ids = None,
    every: All = False,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Forget prompts that were given up."""
    _check_choice(entries, every)

    async def change(letters: DeadLetters, discovery: Discovery, name: str) -> tuple[int, str]:
        if entries is None or every:
            count = await letters.drop_all()
            return count, "" if count else await _doubt(discovery, name)
        # With one that is unknown nothing is dropped.
        return await letters.drop([letter.entry for letter in await letters.find(entries)]), ""

    dropped, doubt = run(_with_letters(model, redis, prefix, change))
    if as_json:
        say_json({"dropped": dropped})
        _warn(doubt)
    else:
        say(_joined(f"dropped {dropped} prompts", doubt))


async def _doubt(discovery: Discovery, name: str) -> str:
    """What to add when a model has no dead letters: a name that is mistyped must not look like good news."""
    try:
        await discovery.info(name)
    except UnknownModel as error:
        return str(error)
    return ""


def _joined(text: str, doubt: str) -> str:
    return f"{text}; {doubt}" if doubt else text


def _warn(doubt: str) -> None:
    """Beside JSON, where a script's user sees it."""
    if doubt:
        say(doubt, err=True)


def _check_choice(entries: list[str] | None, every: bool) -> None:
    if bool(entries) == every:
        raise SettingsError("ids: name the ids that are meant (see `lmpool dead list`), or all of them with --all")


async def _chosen(letters: DeadLetters, entries: list[str] | None) -> AsyncGenerator[DeadLetter, None]:
    """The letters that are meant; with an id that is unknown there are none."""
    if not entries:
        async for letter in letters.oldest_first():
            yield letter
        return
    for letter in await letters.find(entries):
        yield letter


async def _with_letters(
    model: str | None, redis: str | None, prefix: str, work: Callable[[DeadLetters, Discovery, str], Awaitable[T]]
) -> T:
    """Run `work` with the dead letters of a model, which need not be served if it is named."""

    async def work_with_model(client: Redis, discovery: Discovery, keys: Keys) -> T:
        name = model
        if name is None:
            try:
                name = (await discovery.info(None)).name
            except UnknownModel as error:
                raise UnknownModel(f"{error}; name a model that is not served with --model") from error
        return await work(DeadLetters(client, keys.model(name)), discovery, name)

    if model is not None:
        check_name("model", model)
    return await with_server(redis, prefix, work_with_model)


def summary(letter: DeadLetter) -> dict[str, Any]:
    """What a letter is about, as JSON and tables show it."""
    job = letter.job
    return {
        "id": letter.entry,
        "given_up": _moment(letter.given_up),
        "error": letter.failure.kind,
        "reason": letter.failure.text,
        "fault": letter.fault,
        "digest": letter.digest.hex(),
        "tokens": None if job is None else len(job.ids) // 4,
        "adapter": "" if job is None else shortened(job.adapter, 170),
        "asked": "" if job is None or letter.fault else _describe(letter.query),
        "fingerprint": "" if job is None else shortened(job.fingerprint, 60),
    }


def contents(letter: DeadLetter, most_ids: int | None) -> dict[str, Any]:
    """The token ids of a letter; the first bytes of a job that cannot be read."""
    if letter.job is None or len(letter.job.ids) % 4:
        begin, dots = letter.data[:_MAX_BYTES].hex(), "…" if len(letter.data) > _MAX_BYTES else ""
        return {"bytes": len(letter.data), "job": begin + dots}
    return {"ids": decode_ids(letter.job.ids)[:most_ids].tolist()}


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # Who adds an entry may choose its id.
        return "at no possible time"


def _describe(query: Query | None) -> str:
    """What was wanted, in words."""
    match query:
        case None:
            return "row"
        case TopQuery():
            return f"{query.k} likeliest tokens"
        case SampleQuery():
            return f"sample (temperature {query.temperature:g}, top_p {query.top_p:g}, seed {query.seed})"
        case PositionsQuery():
            what = f"{query.top} likeliest tokens" if query.top else "targets" if query.targets else "all"
            return f"{what} ({query.values}) at every position from {query.start} on"
        case GenerateQuery():
            how = f"temperature {query.temperature:g}, top_p {query.top_p:g}, seed {query.seed}"
            return f"continuation of {query.most} tokens ({how})"
        case FreshQuery():
            return "fresh row"
        case HeadQuery():
            return f"head of the model ({query.part})"
        case MassQuery():
            return "probability of a set of tokens"
        case _:
            return f"{query.op} over a trie ({query.select})"
