"""The commands `lmpool queue` and `lmpool dead`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from rich.table import Table

from lmpool.admin.dead_letters import DeadLetter, DeadLetters, contents, summary
from lmpool.admin.queue import Cleared, clear_queue, count_queue
from lmpool.admin.survey import why_unknown
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import LMPoolError, SettingsError, UnknownModel
from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, run, with_server
from lmpool.producer.cli.status import UNFOLDED, Column, fitting, seconds
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name

T = TypeVar("T")

queue_app = typer.Typer(
    name="queue", help="The queue of a model: its depth and its clients; clear it.", no_args_is_help=True
)
dead_app = typer.Typer(
    name="dead", help="Dead letters: prompts that were given up, with the reason.", no_args_is_help=True
)

QueueModel = Annotated[str, typer.Argument(help="Name of the model, served or not.")]
_WAYS = "as `lmpool dead list` shows them, or an unambiguous prefix."
Id = Annotated[str, typer.Argument(help=f"Id or digest, {_WAYS}")]
Ids = Annotated[list[str] | None, typer.Argument(help=f"Ids or digests, {_WAYS}")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the model.")]

_MAX_IDS = 64  # Max token ids printed for one letter.
_MAX_REASONS = 5  # Max reasons in the error of `retry`.
_MIN_REASON_WIDTH = 20  # Characters that the reason keeps on one line.


# lmpool queue


@queue_app.command("show")
def show_queue(
    model: Annotated[
        str | None, typer.Argument(help="Name of the model, served or not (default: all served models).")
    ] = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Show how many prompts wait, how many workers hold, how many are in lanes, and whose are in the backlog."""

    async def work(client: Redis, discovery: Discovery, names: Keys) -> dict[str, tuple[dict[str, Any], str]]:
        counted = {}
        for name in sorted(await discovery.infos()) if model is None else [model]:
            counts = await count_queue(client, discovery, names.model(name), name)
            counted[name] = counts, "" if counts["queued"] else await why_unknown(discovery, name)
        return counted

    if model is not None:
        check_name("model", model)
    counted = run(with_server(redis, prefix, work))
    if as_json:
        by_model = {name: counts for name, (counts, _) in counted.items()}
        say_json(by_model if model is None else by_model[model])
    elif not counted:
        say("no model is served")
    else:
        for name, (counts, doubt) in counted.items():
            _say_counts("" if model is not None else f"{name}: ", counts, doubt)


def _say_counts(head: str, counts: dict[str, Any], doubt: str) -> None:
    held, backlog, lanes = counts["held"], counts["backlog"], counts["lanes"].values()
    of_bulk = f", {counts['bulk']} of them of bulk clients" if counts["bulk"] else ""
    in_lanes = f"; {sum(lanes)} are in lanes, {max(lanes)} of them in the longest" if any(lanes) else ""
    oldest = f", the oldest of {seconds(counts['age_s']) or '0 s'}" if counts["queued"] else ""
    say(
        f"{head}{counts['queued']} prompts{oldest}: workers hold {held}, "
        f"{counts['queued'] - held - backlog} are next, {backlog} wait behind them{of_bulk}{in_lanes}{_joined(doubt)}"
    )
    if counts["clients"]:
        console, clients = Terminal(), counts["clients"]
        columns = [Column("client", list(clients), 0), Column("behind", [str(count) for count in clients.values()], 1)]
        console.print(fitting(None, columns, console.width))


@queue_app.command()
def clear(
    model: QueueModel,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Remove all prompts that wait for workers. Their clients' requests end at once, with QueueCleared.

    Workers still compute and deliver the prompts that they hold.
    """
    check_name("model", model)
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError("yes: this ends the requests of all clients of this queue: confirm with --yes")
        typer.confirm(f"End all requests that wait in the queue of {model!r}?", abort=True)

    async def work(client: Redis, discovery: Discovery, names: Keys) -> tuple[Cleared, str]:
        info = await discovery.find(model)
        cleared = await clear_queue(client, names.model(model), model, lease_s=info.lease_s if info else 0.0)
        return cleared, "" if cleared.removed else await why_unknown(discovery, model)

    cleared, doubt = run(with_server(redis, prefix, work, right="only operators may clear a queue"))
    if as_json:
        say_json(cleared._asdict())
        return
    rest = f"; workers hold {cleared.held} more and will compute them" if cleared.held else ""
    say(f"removed {cleared.removed} prompts from the queue of {model!r}{rest}{_joined(doubt)}")
    if cleared.queued:
        say(f"clients submitted {cleared.queued} more during this: stop the clients, or clear again", err=True)


# lmpool dead


@dead_app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="Max letters to show, the newest first.")] = 50,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Show the prompts that were given up, of one model or of all served models."""

    async def work(client: Redis, discovery: Discovery, keys: Keys) -> tuple[list[tuple[str, DeadLetter]], int, str]:
        newest: list[tuple[str, DeadLetter]] = []
        names, count = [model] if model is not None else sorted(await discovery.infos()), 0
        if not names:
            return [], 0, "no model is served: pass --model for a model that is not served"
        for name in names:
            letters = DeadLetters(client, keys.model(name))
            newest += [(name, letter) for letter in await letters.newest(limit)]
            count += await letters.count()
        newest.sort(key=lambda pair: pair[1].given_up, reverse=True)
        return newest[:limit], count, await why_unknown(discovery, model) if model is not None and not newest else ""

    if model is not None:
        check_name("model", model)
    newest, count, doubt = run(with_server(redis, prefix, work))
    if as_json:
        say_json([{"model": name, **summary(letter)} for name, letter in newest])
        _warn(doubt)
    elif not newest:
        say(f"no prompt was given up{_joined(doubt)}")
    else:
        console = Terminal()
        models = [name for name, _ in newest] if model is None else None
        console.print(letters_table([letter for _, letter in newest], console.width, models))
        if count > len(newest):
            say(f"and {count - len(newest)} older ones: see --limit")


def letters_table(letters: Sequence[DeadLetter], width: int, models: Sequence[str] | None = None) -> Table:
    """Return dead letters as a table that never cuts their ids, because commands take ids.

    Args:
        letters: the letters to show.
        width: characters per line.
        models: the model of each letter; None for letters of one model.
    """
    summaries = [summary(letter) for letter in letters]

    def column(title: str, name: str, rank: int, min_width: int = UNFOLDED) -> Column:
        values = [fields[name] for fields in summaries]
        return Column(title, ["" if value is None else str(value) for value in values], rank, min_width)

    return fitting(
        None,
        [
            column("id", "id", 0),
            *([Column("model", list(models), 0)] if models is not None else []),
            column("given up", "given_up", 3),
            column("error", "error", 1),
            column("reason", "reason", 0, _MIN_REASON_WIDTH),
            column("tokens", "tokens", 2),
            column("adapter", "adapter", 5),
            column("asked for", "asked", 4),
            column("digest", "digest", 6),
        ],
        width,
    )


@dead_app.command("show")
def show_letter(
    entry: Id, model: ModelName = None, redis: RedisUrl = None, prefix: Prefix = "lmpool", as_json: AsJson = False
) -> None:
    """Show one prompt that was given up, with its token ids."""

    async def work(letters: DeadLetters, _: Discovery, __: str) -> DeadLetter:
        return (await letters.find([entry]))[0]

    letter = run(_with_letters(model, redis, prefix, work))
    if as_json:
        say_json({**summary(letter), **contents(letter, max_ids=None)})
        return
    for name, value in {**summary(letter), **contents(letter, max_ids=_MAX_IDS)}.items():
        if value not in (None, ""):
            say(f"{name:<12} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if letter.job is not None and len(letter.job.ids) > 4 * _MAX_IDS:
        say(f"these are the first {_MAX_IDS} ids: --json prints all of them")


@dead_app.command()
def retry(
    entries: Ids = None,
    every: All = False,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Queue prompts again that were given up. Workers then cache their rows."""
    _check_choice(entries, every)

    async def work(letters: DeadLetters, discovery: Discovery, name: str) -> dict[str, Any]:
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

    outcome = run(_with_letters(model, redis, prefix, work))
    queued, in_flight, refused = outcome["queued"], outcome["under_way"], outcome["refused"]
    if as_json:
        say_json(outcome)
    elif queued or in_flight or not refused:
        say(f"queued {len(queued)} prompts again; {len(in_flight)} more were already in flight")
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
    """Delete prompts that were given up."""
    _check_choice(entries, every)

    async def work(letters: DeadLetters, discovery: Discovery, name: str) -> tuple[int, str]:
        if entries is None or every:
            count = await letters.drop_all()
            return count, "" if count else await why_unknown(discovery, name)
        # If one name is unknown, drop no letter.
        return await letters.drop([letter.entry for letter in await letters.find(entries)]), ""

    dropped, doubt = run(_with_letters(model, redis, prefix, work))
    if as_json:
        say_json({"dropped": dropped})
        _warn(doubt)
    else:
        say(f"dropped {dropped} prompts{_joined(doubt)}")


def _joined(doubt: str) -> str:
    return f"; {doubt}" if doubt else ""


def _warn(doubt: str) -> None:
    """Print a doubt on standard error: standard output has only JSON."""
    if doubt:
        say(doubt, err=True)


def _check_choice(entries: list[str] | None, every: bool) -> None:
    if bool(entries) == every:
        raise SettingsError("ids: pass ids (see `lmpool dead list`) or --all")


async def _chosen(letters: DeadLetters, entries: list[str] | None) -> AsyncGenerator[DeadLetter, None]:
    if not entries:
        async for letter in letters.oldest_first():
            yield letter
        return
    for letter in await letters.find(entries):
        yield letter


async def _with_letters(
    model: str | None, redis: str | None, prefix: str, work: Callable[[DeadLetters, Discovery, str], Awaitable[T]]
) -> T:
    """Run `work` with the dead letters of a model; a model that is named need not be served."""

    async def work_with_model(client: Redis, discovery: Discovery, keys: Keys) -> T:
        name = model
        if name is None:
            try:
                name = (await discovery.info(None)).name
            except UnknownModel as error:
                raise UnknownModel(f"{error}; pass --model for a model that is not served") from error
        return await work(DeadLetters(client, keys.model(name)), discovery, name)

    if model is not None:
        check_name("model", model)
    return await with_server(redis, prefix, work_with_model)
