"""The commands `lmpool queue` and `lmpool dead`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from lmpool.admin.queue import Cleared, DeadLetter, DeadLetters, clear_queue, contents, count_queue, summary
from lmpool.admin.survey import why_unknown
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import LMPoolError, SettingsError, UnknownModel
from lmpool.producer.cli.options import AsJson, ModelName, ServerOptions, run, with_options
from lmpool.producer.cli.status import UNFOLDED, Column, FittingTable, seconds
from lmpool.producer.client.discovery import Discovery
from lmpool.settings import check_name

queue_app = typer.Typer(name="queue", help="A model's queue: its depth and clients; clear it.", no_args_is_help=True)
dead_app = typer.Typer(name="dead", help="Dead letters: prompts that were given up, and why.", no_args_is_help=True)

_WAYS = "as `lmpool dead list` shows them, or an unambiguous prefix."
Id = Annotated[str, typer.Argument(help=f"Id or digest, {_WAYS}")]
Ids = Annotated[list[str] | None, typer.Argument(help=f"Ids or digests, {_WAYS}")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the model.")]

_MAX_IDS = 64  # Max token ids printed for one dead letter.
_MAX_REASONS = 5  # Max reasons listed in the error of `lmpool dead retry`.
_MIN_REASON_WIDTH = 20  # Min width of the column of reasons, in characters.


@queue_app.command("show")
@with_options
async def show_queue(
    at: ServerOptions,
    model: Annotated[str | None, typer.Argument(help="A model, served or not (default: all served ones).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the numbers of prompts that wait, are held by workers and are in lanes, and the clients of the backlog."""
    async with at.connected(model) as (client, discovery):
        names = sorted(await discovery.served()) if model is None else [model]
        counted = {name: await count_queue(client, await discovery.partitions(name)) for name in names}
        doubts = {name: await why_unknown(discovery, name) for name, counts in counted.items() if not counts["queued"]}
    if as_json:
        say_json(counted if model is None else counted[model])
        return
    if not counted:
        say("no model is served")
    for name, counts in counted.items():
        queued, held, backlog, lanes = counts["queued"], counts["held"], counts["backlog"], counts["lanes"].values()
        head = "" if model is not None else f"{name}: "
        oldest = f", the oldest of {seconds(counts['age_s'])}" if queued else ""
        of_bulk = f", {counts['bulk']} of them of bulk clients" if counts["bulk"] else ""
        in_lanes = f"; {sum(lanes)} are in lanes, {max(lanes)} of them in the longest" if any(lanes) else ""
        text = f"{head}{queued} prompts{oldest}: workers hold {held}, {queued - held - backlog} are next, {backlog} "
        _say_result(f"{text}wait behind them{of_bulk}{in_lanes}", doubts.get(name, ""))
        if counts["clients"]:
            rows = [{"client": client, "behind": count} for client, count in counts["clients"].items()]
            Terminal().print(FittingTable(None, (Column("client", 0), Column("behind", 1)), rows))


@queue_app.command()
@with_options
def clear(
    at: ServerOptions,
    model: Annotated[str, typer.Argument(help="Name of the model, served or not.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
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

    async def remove() -> tuple[Cleared, str]:
        async with at.connected() as (client, discovery):
            info = await discovery.find(model)
            partitions = await discovery.partitions(model)
            cleared = await clear_queue(client, partitions, model, lease_s=info.lease_s if info else 0.0)
            return cleared, "" if cleared.removed else await why_unknown(discovery, model)

    cleared, doubt = run(remove())
    if as_json:
        say_json(cleared._asdict())
        return
    rest = f"; workers hold {cleared.held} more and will compute them" if cleared.held else ""
    _say_result(f"removed {cleared.removed} prompts from the queue of {model!r}{rest}", doubt)
    if cleared.queued:
        say(f"clients submitted {cleared.queued} more during this: stop the clients, or clear again", err=True)


@dead_app.command("list")
@with_options
async def list_letters(
    at: ServerOptions,
    limit: Annotated[int, typer.Option(min=1, help="Max letters to show, the newest first.")] = 50,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Show the prompts that were given up, of one model or of all served models."""
    count, newest = 0, list[dict[str, Any]]()
    async with at.connected(model) as (client, discovery):
        names = sorted(await discovery.served()) if model is None else [model]
        doubt = "" if names else "no model is served: pass --model for a model that is not served"
        for name in names:
            letters = DeadLetters(client, *await discovery.partitions(name))
            newest += [{"model": name, **summary(letter)} for letter in await letters.newest(limit)]
            count += await letters.count()
        if model is not None and not newest:
            doubt = await why_unknown(discovery, model)
    # An id begins with the time at which the prompt was given up.
    rows = sorted(newest, key=lambda row: int(row["id"].partition("-")[0]), reverse=True)[:limit]
    if as_json or not rows:
        _say_result("no prompt was given up", doubt, rows if as_json else None)
        return
    Terminal().print(letters_table(rows, has_models=model is None))
    if count > len(rows):
        say(f"and {count - len(rows)} older ones: see --limit")


def letters_table(rows: Sequence[Mapping[str, Any]], *, has_models: bool) -> FittingTable:
    """Return a table of dead letters. The table never cuts ids, because users pass ids to commands."""
    columns = (
        Column("id", 0, min_width=UNFOLDED),
        *([Column("model", 0)] if has_models else []),
        Column("given up", 3, "given_up"),
        Column("error", 1),
        Column("reason", 0, min_width=_MIN_REASON_WIDTH),
        Column("tokens", 2),
        Column("adapter", 5),
        Column("request", 4, "asked"),
        Column("digest", 6),
    )
    return FittingTable(None, columns, rows)


@asynccontextmanager
async def _letters_of(model: str | None, at: ServerOptions) -> AsyncIterator[tuple[DeadLetters, Discovery, str]]:
    """Connect to the dead letters of a model. A model that is given by name need not be served."""
    async with at.connected(model) as (client, discovery):
        try:
            name = (await discovery.info(None)).name if model is None else model
        except UnknownModel as error:
            raise UnknownModel(f"{error}; pass --model for a model that is not served") from error
        yield DeadLetters(client, *await discovery.partitions(name)), discovery, name


@dead_app.command("show")
@with_options
async def show_letter(at: ServerOptions, entry: Id, model: ModelName = None, as_json: AsJson = False) -> None:
    """Show one prompt that was given up, with its token ids."""
    async with _letters_of(model, at) as (letters, _, _):
        (letter,) = await letters.find([entry])
    if as_json:
        say_json({**summary(letter), **contents(letter, max_ids=None)})
        return
    for name, value in {**summary(letter), **contents(letter, max_ids=_MAX_IDS)}.items():
        if value not in (None, ""):
            say(f"{name:<12} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if letter.job is not None and len(letter.job.ids) > 4 * _MAX_IDS:
        say(f"these are the first {_MAX_IDS} ids: --json prints all of them")


@dead_app.command()
@with_options
async def retry(
    at: ServerOptions, entries: Ids = None, every: All = False, model: ModelName = None, as_json: AsJson = False
) -> None:
    """Queue prompts again that were given up. Workers then cache their rows."""
    _check_choice(entries, every)
    queued, in_flight, refused = list[str](), list[str](), dict[str, str]()

    async with _letters_of(model, at) as (letters, discovery, name):
        info = await discovery.info(name)
        adapters = await letters.served_adapters(at.keys, info)

        async def queue_again(letter: DeadLetter) -> None:
            try:
                is_queued = await letters.retry(letter, info, adapters)
                (queued if is_queued else in_flight).append(letter.entry)
            except LMPoolError as error:
                refused[letter.entry] = str(error)

        for letter in await letters.find(entries or []):
            await queue_again(letter)
        if every:
            async for letter in letters.oldest_first():
                await queue_again(letter)
    if as_json:
        say_json({"queued": queued, "under_way": in_flight, "refused": refused})
    elif queued or in_flight or not refused:
        say(f"queued {len(queued)} prompts again; {len(in_flight)} more were already in flight")
    if refused:
        reasons = [*list(refused.values())[:_MAX_REASONS], *(["…"] if len(refused) > _MAX_REASONS else [])]
        raise LMPoolError(f"{len(refused)} prompts were not queued again: {'; '.join(reasons)}")


@dead_app.command()
@with_options
async def drop(
    at: ServerOptions, entries: Ids = None, every: All = False, model: ModelName = None, as_json: AsJson = False
) -> None:
    """Delete prompts that were given up."""
    _check_choice(entries, every)
    async with _letters_of(model, at) as (letters, discovery, name):
        if entries:
            # Find all dead letters first: an unknown id raises before any dead letter is dropped.
            dropped = await letters.drop(await letters.find(entries))
        else:
            dropped = await letters.drop_all()
        doubt = "" if dropped or entries else await why_unknown(discovery, name)
    _say_result(f"dropped {dropped} prompts", doubt, {"dropped": dropped} if as_json else None)


def _say_result(text: str, doubt: str, as_json: Any = None) -> None:
    """Print a result and a warning (`doubt`). When the result is JSON, print the warning on standard error."""
    if as_json is None:
        say(f"{text}; {doubt}" if doubt else text)
        return
    say_json(as_json)
    if doubt:
        say(doubt, err=True)


def _check_choice(entries: list[str] | None, every: bool) -> None:
    if bool(entries) == every:
        raise SettingsError("ids: pass ids (see `lmpool dead list`) or --all")
