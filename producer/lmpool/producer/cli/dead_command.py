"""The commands `lmpool dead list`, `show`, `retry` and `drop`: prompts that were given up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from redis.exceptions import RedisError
from rich.table import Table

from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError, UnknownModel
from lmpool.producer.cli.dead_letters import DeadLetter, DeadLetters, shortened
from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, run
from lmpool.producer.cli.tables import WHOLE, Column, fitting
from lmpool.producer.client.discovery import Lobby
from lmpool.protocol.keys import Keys
from lmpool.protocol.prompt import decode_ids
from lmpool.protocol.query import Ask, FreshAsk, SampleAsk, ScoreAsk, TopAsk
from lmpool.settings import check_name
from lmpool.terminal import Terminal, say, say_json

T = TypeVar("T")

_MOST_IDS = 64
_MOST_BYTES = 256
_MOST_REASONS = 5
_LEAST_REASON = 20

dead_app = typer.Typer(name="dead", help="Prompts that were given up, with the reason.", no_args_is_help=True)

_WAYS = "as `lmpool dead list` shows them; so much of one as tells which is meant."
Id = Annotated[str, typer.Argument(help=f"Id or digest, {_WAYS}")]
Ids = Annotated[list[str] | None, typer.Argument(help=f"Ids or digests, {_WAYS}")]
All = Annotated[bool, typer.Option("--all", help="All that there are.")]


@dead_app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="How many to show, the newest first.")] = 50,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Show the prompts that were given up."""

    async def look(letters: DeadLetters, lobby: Lobby, name: str) -> tuple[list[DeadLetter], int, str]:
        found = await letters.newest(limit)
        return found, await letters.count(), "" if found else await _doubt(lobby, name)

    found, count, doubt = run(_with_letters(model, redis, prefix, look))
    if as_json:
        say_json([_summary(letter) for letter in found])
        _tell(doubt)
        return
    if not found:
        say(_joined("nothing was given up", doubt))
        return
    console = Terminal()
    console.print(letters_table(found, console.width))
    if count > len(found):
        say(f"and {count - len(found)} older ones: see --limit")


def letters_table(letters: Sequence[DeadLetter], width: int) -> Table:
    """Dead letters as a table with their ids whole: what they are called by.

    Args:
        letters: what to show.
        width: characters of a line.
    """
    summaries = [_summary(letter) for letter in letters]

    def column(title: str, name: str, rank: int, least: int = WHOLE) -> Column:
        return Column(title, [str(one[name]) if one[name] is not None else "" for one in summaries], rank, least)

    return fitting(
        None,
        [
            column("id", "id", 0),
            column("given up", "given_up", 3),
            column("error", "error", 1),
            column("reason", "reason", 0, _LEAST_REASON),
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

    async def look(letters: DeadLetters, _: Lobby, __: str) -> DeadLetter:
        return (await letters.find([entry]))[0]

    letter = run(_with_letters(model, redis, prefix, look))
    if as_json:
        say_json({**_summary(letter), **_contents(letter, most_ids=None)})
        return
    for name, value in {**_summary(letter), **_contents(letter, most_ids=_MOST_IDS)}.items():
        if value not in (None, ""):
            say(f"{name:<12} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if letter.job is not None and len(letter.job.ids) > 4 * _MOST_IDS:
        say(f"these are the first {_MOST_IDS} ids: see --json for all of them")


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

    async def change(letters: DeadLetters, lobby: Lobby, name: str) -> dict[str, Any]:
        card = await lobby.card(name)
        adapters = await letters.served_adapters(card)
        outcome: dict[str, Any] = {"queued": [], "under_way": [], "refused": {}}
        async with aclosing(_chosen(letters, entries)) as chosen:
            async for letter in chosen:
                try:
                    is_queued = await letters.retry(letter, card, adapters)
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
        reasons = [*list(refused.values())[:_MOST_REASONS], *(["…"] if len(refused) > _MOST_REASONS else [])]
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

    async def change(letters: DeadLetters, lobby: Lobby, name: str) -> tuple[int, str]:
        if entries is None or every:
            count = await letters.drop_all()
            return count, "" if count else await _doubt(lobby, name)
        # With one that is unknown nothing is dropped.
        return await letters.drop([letter.entry for letter in await letters.find(entries)]), ""

    dropped, doubt = run(_with_letters(model, redis, prefix, change))
    if as_json:
        say_json({"dropped": dropped})
        _tell(doubt)
    else:
        say(_joined(f"dropped {dropped} prompts", doubt))


async def _doubt(lobby: Lobby, name: str) -> str:
    """What to add when a model has no dead letters: a name that is mistyped must not look like good news."""
    try:
        await lobby.card(name)
    except UnknownModel as error:
        return str(error)
    return ""


def _joined(text: str, doubt: str) -> str:
    return f"{text}; {doubt}" if doubt else text


def _tell(doubt: str) -> None:
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
    model: str | None, redis: str | None, prefix: str, work: Callable[[DeadLetters, Lobby, str], Awaitable[T]]
) -> T:
    """Do something with the dead letters of a model, which need not be served if it is named."""
    check_name("prefix", prefix)
    server, keys = Server(redis), Keys(prefix)
    client = server.client()
    try:
        lobby = Lobby(client, keys)
        if model is None:
            try:
                model = (await lobby.card(None)).name
            except UnknownModel as error:
                raise UnknownModel(f"{error}; name a model that is not served with --model") from error
        check_name("model", model)
        return await work(DeadLetters(client, keys.model(model)), lobby, model)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await client.aclose()


def _summary(letter: DeadLetter) -> dict[str, Any]:
    """What a letter is about, fit to be printed."""
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
        "asked": "" if job is None or letter.fault else _asked(letter.ask),
        "fingerprint": "" if job is None else shortened(job.fingerprint, 60),
    }


def _contents(letter: DeadLetter, most_ids: int | None) -> dict[str, Any]:
    """The ids of a letter; of what cannot be read, how it begins."""
    if letter.job is None or len(letter.job.ids) % 4:
        begin, dots = letter.data[:_MOST_BYTES].hex(), "…" if len(letter.data) > _MOST_BYTES else ""
        return {"bytes": len(letter.data), "job": begin + dots}
    return {"ids": decode_ids(letter.job.ids)[:most_ids].tolist()}


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # Who adds an entry may choose its id.
        return "at no possible time"


def _asked(ask: Ask | None) -> str:
    """What was wanted, in words."""
    match ask:
        case None:
            return "row"
        case TopAsk():
            return f"{ask.k} likeliest tokens"
        case SampleAsk():
            return f"sample (temperature {ask.temperature:g}, top_p {ask.top_p:g}, seed {ask.seed})"
        case ScoreAsk():
            return f"scores from position {ask.start} on"
        case FreshAsk():
            return "fresh row"
        case _:
            return f"{ask.op} over a trie ({ask.select})"
