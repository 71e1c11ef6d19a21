"""Tables of models and workers for `lmpool status`, and the command `lmpool top`.

A table shows as many columns as fit into the width of the terminal. Other commands use these tables too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from redis.exceptions import RedisError
from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmpool.admin.survey import Survey, number, read_survey, survey, workers_of
from lmpool.broker.server import Server
from lmpool.cli import Terminal, say_json
from lmpool.errors import LMPoolError, SettingsError, printable
from lmpool.producer.cli.options import AsJson, ServerOptions, with_options
from lmpool.protocol.model_info import TRIE_SERVICE

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two polls.")]
Once = Annotated[bool, typer.Option("--once", help="Poll once and exit.")]

UNFOLDED = 1_000_000
"""`Column.min_width` of a column whose names stay on one line while the table fits the terminal."""

_FRAME, _PADDING = 1, 3  # Characters that rich adds to each line, and to each column.
_REPLY_TIMEOUT_S = 5.0  # Max seconds to wait for the server. Until it replies, the view shows old values.


@with_options
async def top(at: ServerOptions, interval: Interval = 1.0, once: Once = False, as_json: AsJson = False) -> None:
    """Watch models and workers: queues, rates, and seconds from submission to row (p50, p99). Ctrl-C exits.

    Rates and times describe the interval between a worker's last two heartbeats.
    """
    if as_json and not once:
        raise SettingsError("json: the live view has no JSON form; use --once --json")
    server, keys, console = Server(at.redis), at.keys, Terminal()
    if once:
        models = await survey(server, keys)
        if as_json:
            say_json(models)
        else:
            console.print(_view(models, console.width, ""))
        return
    # Poll until cancelled; while the server is unreachable, show the reason and the last view.
    models, seen_at = Survey(), 0.0
    async with server.connected(reply_timeout_s=max(_REPLY_TIMEOUT_S, interval)) as redis:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                trouble = ""
                try:
                    models, seen_at = await read_survey(redis, keys), time.monotonic()
                except (RedisError, OSError, LMPoolError) as error:
                    trouble = str(server.explain(error))
                    if seen_at:
                        trouble += f" (below: {time.monotonic() - seen_at:.0f} s ago)"
                view = _view(models, console.width, trouble)
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                await asyncio.sleep(interval)


def _view(models: Survey, width: int, trouble: str) -> Group:
    head = [Text(printable(trouble), style="bold red")] if trouble else []
    if not models:
        return Group(*(head or [Text("no model is served")]))
    return Group(*head, *top_tables(models, width))


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its header.
        rank: in a narrow terminal, columns of the highest rank are left out first. Rank 0: names, which are folded.
        cell: returns the column's text for a row of the table.
        min_width: names up to this many characters stay on one line.
    """

    title: str
    rank: int
    cell: Callable[[Mapping[str, Any]], str]
    min_width: int = 12


def field_column(
    title: str, rank: int, name: str = "", form: Callable[[float], str] | None = None, min_width: int = 12
) -> Column:
    """Return a column that shows the field `name` (default: `title`) of each row, or nothing if a row lacks the field.

    `form` formats the field as a number. Without `form`, the field is shown as text.
    """

    def cell(row: Mapping[str, Any]) -> str:
        if form is None:
            return str(value) if (value := row.get(name or title)) is not None else ""
        return "" if (value := number(row, name)) is None else form(value)

    return Column(title, rank, cell, min_width)


def fitting(title: str | None, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return a table with the columns that fit into `width` characters per line; its caption names other columns."""
    texts = {column: [column.cell(row) for row in rows] for column in columns}
    widths = {column: max(map(cell_len, map(printable, (column.title, *texts[column])))) for column in columns}
    kept = list(columns)

    def needed() -> int:
        """Characters of a line when names are folded as far as allowed."""
        least = (widths[column] if column.rank else min(widths[column], column.min_width) for column in kept)
        return _FRAME + sum(least) + _PADDING * len(kept)

    while needed() > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    left_out = ", ".join(column.title for column in columns if column not in kept)
    table = Table(title=title, caption=f"too narrow for {left_out}" if left_out else None)
    for column in kept:
        if column.rank:
            table.add_column(column.title, no_wrap=True, justify="right")
        else:
            is_whole = widths[column] <= min(column.min_width, width - needed() + widths[column])
            table.add_column(column.title, overflow="fold", no_wrap=is_whole)
    for cells in zip(*(texts[column] for column in kept), strict=True):
        table.add_row(*cells)
    return table


def print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table without a title."""
    console = Terminal()
    console.print(fitting(None, columns, rows, console.width))


def seconds(value: float | None) -> str:
    """Format a duration: 850 µs, 3.4 ms, 12 ms, 3.4 s, 5 min."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 60:.0f} min"
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "µs")
    return f"{scaled:.{int(scaled < 10 and unit != 'µs')}f} {unit}"


def _reuse(worker: Mapping[str, Any]) -> str:
    """Return the share of tokens found in a prefix cache since the worker's start."""
    tokens, reused = number(worker, "tokens"), number(worker, "reused")
    return f"{reused / tokens:.0%}" if tokens and reused is not None else ""


_RATE = field_column("rows/s", 2, "rows_per_s", "{:.1f}".format)
_MODEL = field_column("model", 0, "name")
_QUEUE = (
    Column("workers", 2, lambda model: str(len(model["workers"]))),
    field_column("queued", 1),
    Column("oldest", 3, lambda model: seconds(model["age_s"]) if model["queued"] else ""),
    field_column("dead", 4),
    _RATE,
)
_STATUS_MODELS = (
    _MODEL,
    field_column("backend", 6),
    # Trie workers serve any vocabulary, so the vocabulary size in their info has no meaning.
    Column("V", 7, lambda model: "" if model["name"] == TRIE_SERVICE else str(model.get("vocab_size", ""))),
    field_column("dtype", 9),
    field_column("rows as", 8, "encoding"),
    *_QUEUE,
)
_TOP_MODELS = (_MODEL, *_QUEUE, field_column("p50", 6, "p50_s", seconds), field_column("p99", 5, "p99_s", seconds))
_WORKER = (
    field_column("worker", 0, "id"),
    field_column("model", 0),
    field_column("state", 1),
    field_column("rows", 11),
    _RATE,
    field_column("lane", 7),
    field_column("in-flight", 10, "in_flight"),
    field_column("failed", 3, "failures"),
    Column("reuse", 8, _reuse),
    field_column("homed", 12),
    field_column("stolen", 13),
    field_column("shared", 14),
)
_HEARD = field_column("heard", 9, "silent_s", seconds)
_TOP_WORKERS = (
    *_WORKER,
    field_column("batch", 6),
    field_column("p50", 5, "p50_s", seconds),
    field_column("p99", 4, "p99_s", seconds),
    _HEARD,
)


def status_tables(models: Survey, width: int) -> tuple[Table, Table]:
    """Return the tables of models and workers for `lmpool status`."""
    rows = [{**(model["info"] or {}), **model} for model in models]
    workers = fitting("Workers", (*_WORKER, _HEARD), workers_of(models), width)
    return fitting("Models", _STATUS_MODELS, rows, width), workers


def top_tables(models: Survey, width: int) -> tuple[Table, Table]:
    """Return the tables of models and workers for `lmpool top`."""
    return fitting("Models", _TOP_MODELS, models, width), fitting("Workers", _TOP_WORKERS, workers_of(models), width)
