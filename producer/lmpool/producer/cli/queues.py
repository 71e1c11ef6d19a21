"""The commands `lmpool queue` and `lmpool dead`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, NamedTuple

import typer
from redis.exceptions import NoPermissionError
from rich.table import Table

from lmpool.admin.dead_letters import DeadLetter, DeadLetters, contents, summary
from lmpool.admin.queue import Cleared, clear_queue, count_queue
from lmpool.admin.survey import why_unknown
from lmpool.broker.server import Server
from lmpool.cli import Terminal, say, say_json
from lmpool.errors import AuthenticationFailed, LMPoolError, SettingsError, UnknownModel
from lmpool.producer.cli.options import AsJson, ModelName, ServerOptions, run, with_options
from lmpool.producer.cli.status import UNFOLDED, fitting, print_table, seconds, text_column
from lmpool.producer.client.discovery import Discovery
from lmpool.settings import check_name

queue_app = typer.Typer(
    name="queue", help="The queue of a model: its depth and its clients; clear it.", no_args_is_help=True
)
dead_app = typer.Typer(
    name="dead", help="Dead letters: prompts that were given up, with the reason.", no_args_is_help=True
)

_WAYS = "as `lmpool dead list` shows them, or an unambiguous prefix."
Id = Annotated[str, typer.Argument(help=f"Id or digest, {_WAYS}")]
Ids = Annotated[list[str] | None, typer.Argument(help=f"Ids or digests, {_WAYS}")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the model.")]

_MAX_IDS = 64  # Max token ids printed for one letter.
_MAX_REASONS = 5  # Max reasons in the error of `retry`.
_MIN_REASON_WIDTH = 20  # Characters that the reason keeps on one line.


@queue_app.command("show")
@with_options
def show_queue(
    model: Annotated[
        str | None, typer.Argument(help="Name of the model, served or not (default: all served models).")
    ] = None,
    as_json: AsJson = False,
    *,
    at: ServerOptions,
) -> None:
    """Show how many prompts wait, how many workers hold, how many are in lanes, and whose are in the backlog."""

    async def count() -> dict[str, tuple[dict[str, Any], str]]:
        async with Server(at.redis).connected() as client:
            discovery, counted = Discovery(client, at.keys), {}
            for name in sorted(await discovery.infos()) if model is None else [model]:
                counts = await count_queue(client, discovery, at.keys.model(name), name)
                counted[name] = counts, "" if counts["queued"] else await why_unknown(discovery, name)
            return counted

    _check_model(model)
    counted = run(count())
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
    _say_result(
        f"{head}{counts['queued']} prompts{oldest}: workers hold {held}, "
        f"{counts['queued'] - held - backlog} are next, {backlog} wait behind them{of_bulk}{in_lanes}",
        doubt,
    )
    if counts["clients"]:
        rows = [{"client": client, "behind": count} for client, count in counts["clients"].items()]
        print_table([text_column("client", 0), text_column("behind", 1)], rows)


@queue_app.command()
@with_options
def clear(
    model: Annotated[str, typer.Argument(help="Name of the model, served or not.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    *,
    at: ServerOptions,
) -> None:
    """Remove all prompts that wait for workers. Their clients' requests end at once, with QueueCleared.

    Workers still compute and deliver the prompts that they hold.
    """
    _check_model(model)
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError("yes: this ends the requests of all clients of this queue: confirm with --yes")
        typer.confirm(f"End all requests that wait in the queue of {model!r}?", abort=True)

    async def remove() -> tuple[Cleared, str]:
        async with Server(at.redis).connected() as client:
            discovery = Discovery(client, at.keys)
            info = await discovery.find(model)
            cleared = await clear_queue(client, at.keys.model(model), model, lease_s=info.lease_s if info else 0.0)
            return cleared, "" if cleared.removed else await why_unknown(discovery, model)

    try:
        cleared, doubt = run(remove())
    except AuthenticationFailed as error:
        if not isinstance(error.__cause__, NoPermissionError):
            raise
        raise AuthenticationFailed(f"{error}: only operators may clear a queue") from error
    if as_json:
        say_json(cleared._asdict())
        return
    rest = f"; workers hold {cleared.held} more and will compute them" if cleared.held else ""
    _say_result(f"removed {cleared.removed} prompts from the queue of {model!r}{rest}", doubt)
    if cleared.queued:
        say(f"clients submitted {cleared.queued} more during this: stop the clients, or clear again", err=True)


@dead_app.command("list")
@with_options
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="Max letters to show, the newest first.")] = 50,
    model: ModelName = None,
    as_json: AsJson = False,
    *,
    at: ServerOptions,
) -> None:
    """Show the prompts that were given up, of one model or of all served models."""

    async def read() -> tuple[list[tuple[str, DeadLetter]], int, str]:
        newest: list[tuple[str, DeadLetter]] = []
        async with Server(at.redis).connected() as client:
            discovery = Discovery(client, at.keys)
            names, count = [model] if model is not None else sorted(await discovery.infos()), 0
            if not names:
                return [], 0, "no model is served: pass --model for a model that is not served"
            for name in names:
                letters = DeadLetters(client, at.keys.model(name))
                newest += [(name, letter) for letter in await letters.newest(limit)]
                count += await letters.count()
            newest.sort(key=lambda pair: pair[1].given_up, reverse=True)
            is_doubtful = model is not None and not newest
            return newest[:limit], count, await why_unknown(discovery, names[0]) if is_doubtful else ""

    _check_model(model)
    newest, count, doubt = run(read())
    if as_json or not newest:
        shown = [{"model": name, **summary(letter)} for name, letter in newest]
        _say_result("no prompt was given up", doubt, shown if as_json else None)
        return
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
    rows: list[Mapping[str, Any]] = [summary(letter) for letter in letters]
    if models is not None:
        rows = [{"model": name, **row} for name, row in zip(models, rows, strict=True)]
    columns = [
        text_column("id", 0, min_width=UNFOLDED),
        *([text_column("model", 0)] if models is not None else []),
        text_column("given up", 3, "given_up"),
        text_column("error", 1),
        text_column("reason", 0, min_width=_MIN_REASON_WIDTH),
        text_column("tokens", 2),
        text_column("adapter", 5),
        text_column("asked for", 4, "asked"),
        text_column("digest", 6),
    ]
    return fitting(None, columns, rows, width)


class _ModelLetters(NamedTuple):
    """The dead letters of a model, its name, and the discovery of its pool."""

    letters: DeadLetters
    model: str
    discovery: Discovery

    async def chosen(self, entries: list[str] | None) -> AsyncGenerator[DeadLetter, None]:
        """Iterate over the letters with these names, or over all."""
        if not entries:
            async for letter in self.letters.oldest_first():
                yield letter
            return
        for letter in await self.letters.find(entries):
            yield letter


@asynccontextmanager
async def _letters_of(model: str | None, at: ServerOptions) -> AsyncIterator[_ModelLetters]:
    """Connect to the dead letters of a model; a model that is named need not be served."""
    _check_model(model)
    async with Server(at.redis).connected() as client:
        discovery = Discovery(client, at.keys)
        try:
            name = (await discovery.info(None)).name if model is None else model
        except UnknownModel as error:
            raise UnknownModel(f"{error}; pass --model for a model that is not served") from error
        yield _ModelLetters(DeadLetters(client, at.keys.model(name)), name, discovery)


@dead_app.command("show")
@with_options
def show_letter(entry: Id, model: ModelName = None, as_json: AsJson = False, *, at: ServerOptions) -> None:
    """Show one prompt that was given up, with its token ids."""

    async def find() -> DeadLetter:
        async with _letters_of(model, at) as found:
            return (await found.letters.find([entry]))[0]

    letter = run(find())
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
def retry(
    entries: Ids = None, every: All = False, model: ModelName = None, as_json: AsJson = False, *, at: ServerOptions
) -> None:
    """Queue prompts again that were given up. Workers then cache their rows."""
    _check_choice(entries, every)
    queued: list[str] = []
    in_flight: list[str] = []
    refused: dict[str, str] = {}

    async def queue_again() -> None:
        async with _letters_of(model, at) as found:
            info = await found.discovery.info(found.model)
            adapters = await found.letters.served_adapters(info)
            async with aclosing(found.chosen(entries)) as chosen:
                async for letter in chosen:
                    try:
                        is_queued = await found.letters.retry(letter, info, adapters)
                        (queued if is_queued else in_flight).append(letter.entry)
                    except LMPoolError as error:
                        refused[letter.entry] = str(error)

    run(queue_again())
    if as_json:
        say_json({"queued": queued, "under_way": in_flight, "refused": refused})
    elif queued or in_flight or not refused:
        say(f"queued {len(queued)} prompts again; {len(in_flight)} more were already in flight")
    if refused:
        reasons = [*list(refused.values())[:_MAX_REASONS], *(["…"] if len(refused) > _MAX_REASONS else [])]
        raise LMPoolError(f"{len(refused)} prompts were not queued again: {'; '.join(reasons)}")


@dead_app.command()
@with_options
def drop(
    entries: Ids = None, every: All = False, model: ModelName = None, as_json: AsJson = False, *, at: ServerOptions
) -> None:
    """Delete prompts that were given up."""
    _check_choice(entries, every)

    async def delete() -> tuple[int, str]:
        async with _letters_of(model, at) as found:
            if entries:
                # If one name is unknown, drop no letter.
                return await found.letters.drop([letter.entry for letter in await found.letters.find(entries)]), ""
            count = await found.letters.drop_all()
            return count, "" if count else await why_unknown(found.discovery, found.model)

    dropped, doubt = run(delete())
    _say_result(f"dropped {dropped} prompts", doubt, {"dropped": dropped} if as_json else None)


def _say_result(text: str, doubt: str, as_json: Any = None) -> None:
    """Print a result and a doubt about it; next to JSON, print the doubt on standard error."""
    if as_json is None:
        say(f"{text}; {doubt}" if doubt else text)
        return
    say_json(as_json)
    if doubt:
        say(doubt, err=True)


def _check_model(model: str | None) -> None:
    if model is not None:
        check_name("model", model)


def _check_choice(entries: list[str] | None, every: bool) -> None:
    if bool(entries) == every:
        raise SettingsError("ids: pass ids (see `lmpool dead list`) or --all")
