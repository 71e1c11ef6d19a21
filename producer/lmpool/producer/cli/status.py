"""Tables of models and workers for `lmpool status`, and the command `lmpool top`.

A table shows as many columns as fit into the width of the terminal. Other commands use these tables too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from redis.exceptions import RedisError
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmpool.admin.fleet import KINDS, by_name, by_need, number
from lmpool.admin.survey import Survey, pause_s, read_survey, survey
from lmpool.broker.server import Server
from lmpool.cli import Terminal, say_json
from lmpool.errors import LMPoolError, SettingsError, printable
from lmpool.producer.cli.options import AsJson, ServerOptions, with_options
from lmpool.protocol.model_info import TRIE_SERVICE

Interval = Annotated[
    float | None,
    typer.Option(min=0.1, max=3600, help="Seconds between two polls (default: 1 s, or 3 ms per worker if longer)."),
]
MaxWorkers = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Max workers listed, the most urgent first (default: 20; --json: all)."),
]
AllWorkers = Annotated[bool, typer.Option("--all", help="List all workers.")]
Once = Annotated[bool, typer.Option("--once", help="Poll once and exit.")]

DEFAULT_WORKERS = 20
"""Max workers listed without `--workers`: they fit a screen together with the other tables."""

UNFOLDED = 1_000_000
"""Value of `Column.min_width` for a column whose names stay on one line while the table fits the terminal."""

_FRAME, _PADDING = 1, 3  # Characters that rich adds to each line, and to each column.
_INTERVAL_S = 1.0  # Seconds between two polls of a pool with few workers.
_MIN_WORKERS = 5  # Workers that the live view lists even if the terminal is too low for them.
_MAX_NAMED = 2  # Max workers that the table of outliers names per kind: names are long, and the next table has more.
_TABLE_LINES = 6  # Lines of a table without its rows: title, frame, header and caption.
_REPLY_TIMEOUT_S = 5.0  # Max seconds to wait for the server. Until the server replies, the view shows old values.


@with_options
async def top(
    at: ServerOptions,
    interval: Interval = None,
    once: Once = False,
    workers: MaxWorkers = None,
    every: AllWorkers = False,
    as_json: AsJson = False,
) -> None:
    """Watch models and workers: queues, rates, and seconds from submission to row (p50, p99). Ctrl-C exits.

    Rates and times describe the interval between a worker's last two heartbeats.
    """
    if as_json and not once:
        raise SettingsError("json: the live view has no JSON form; use --once --json")
    server, keys, console, most = Server(at.redis), at.keys, Terminal(), max_listed(workers, every)
    if once:
        models = await survey(server, keys)
        if as_json:
            say_json(limited(models, most))
        else:
            console.print(_view(models, DEFAULT_WORKERS if most is None else most))
        return
    # Poll until cancelled; while the server is unreachable, show the reason and the last view.
    models, seen_at = Survey(), 0.0
    async with server.connected(reply_timeout_s=max(_REPLY_TIMEOUT_S, interval or 0)) as redis:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                trouble = ""
                try:
                    models, seen_at = await read_survey(redis, keys), time.monotonic()
                except (RedisError, OSError, LMPoolError) as error:
                    trouble = str(server.explain(error))
                    if seen_at:
                        trouble += f" (below: {time.monotonic() - seen_at:.0f} s ago)"
                fitting = _fitting(models, console.height) if console.is_terminal else DEFAULT_WORKERS
                view = _view(models, fitting if most is None else most, trouble)
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                await asyncio.sleep(interval or pause_s(models, _INTERVAL_S))


def _view(models: Survey, most: int, trouble: str = "") -> Group:
    head = [Text(printable(trouble), style="bold red")] if trouble else []
    if not models:
        return Group(*(head or [Text("no model is served")]))
    return Group(*head, *survey_tables(models, TOP, most))


def _fitting(models: Survey, height: int) -> int:
    """Return the number of workers that a terminal of `height` lines can list below the other tables."""
    outliers = sum(len(model["summary"]["outliers"]) for model in models)
    return max(_MIN_WORKERS, height - 3 * _TABLE_LINES - len(models) - outliers)


def max_listed(workers: int | None, every: bool) -> int | None:
    """Return the value of `--workers`, the largest number for `--all`, or None for the default."""
    if every and workers is not None:
        raise SettingsError("workers: --all lists all workers; use one of the two options")
    return sys.maxsize if every else workers


def limited(models: Survey, most: int | None) -> Survey:
    """Return the survey with the `most` workers that are the most urgent; None keeps all workers."""
    if most is None:
        return models
    kept = {(worker["model"], worker["id"]) for worker in by_need(models)[:most]}
    return [
        {**model, "workers": [worker for worker in model["workers"] if (model["name"], worker["id"]) in kept]}
        for model in models
    ]


class Column(NamedTuple):
    """A column of a table, which shows one field of each row, or nothing for a row without the field.

    Attributes:
        title: header of the column.
        rank: in a narrow terminal, columns of the highest rank are left out first; columns of rank 0 fold their names.
        name: name of the field; "" if the title is the field's name.
        form: formats the field as a number; None to show the field as text.
        min_width: names up to this many characters stay on one line.
    """

    title: str
    rank: int
    name: str = ""
    form: Callable[[float], str] | None = None
    min_width: int = 12

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of this column for a row."""
        if self.form is None:
            return "" if (value := row.get(self.name or self.title)) is None else str(value)
        return "" if (value := number(row, self.name)) is None else self.form(value)


class FittingTable(NamedTuple):
    """A table for rich that shows the columns which fit into a line; the caption names the columns left out."""

    title: str | None
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        width, kept = options.max_width, list(self.columns)
        texts = {column: [column.cell(row) for row in self.rows] for column in kept}
        widths = {column: max(map(cell_len, map(printable, (column.title, *texts[column])))) for column in kept}

        def needed() -> int:
            """Return the characters of a line whose names are folded as far as `min_width` allows."""
            least = (widths[column] if column.rank else min(widths[column], column.min_width) for column in kept)
            return _FRAME + sum(least) + _PADDING * len(kept)

        while needed() > width and any(column.rank for column in kept):
            kept.remove(max(kept, key=lambda column: column.rank))
        left_out = ", ".join(column.title for column in self.columns if column not in kept)
        table = Table(title=self.title, caption=f"too narrow for {left_out}" if left_out else None)
        for column in kept:
            if column.rank:
                table.add_column(column.title, no_wrap=True, justify="right")
            else:
                is_whole = widths[column] <= min(column.min_width, width - needed() + widths[column])
                table.add_column(column.title, overflow="fold", no_wrap=is_whole)
        for cells in zip(*(texts[column] for column in kept), strict=True):
            table.add_row(*cells)
        yield table


def seconds(value: float) -> str:
    """Format a duration: 850 µs, 3.4 ms, 12 ms, 3.4 s, 5 min."""
    if value >= 1000:
        return f"{value / 60:.0f} min"
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "µs")
    return f"{scaled:.{int(scaled < 10 and unit != 'µs')}f} {unit}"


_RATE = Column("rows/s", 2, "rows_per_s", "{:.1f}".format)
_BUSY = Column("busy", 8, "occupancy", "{:.0%}".format)
_MODEL = Column("model", 0, "name")
_SERVED = Column("model", 0)
_NOT_READY = Column("not ready", 2)
_VERSIONS = Column("versions", 10)
_QUEUE = (
    Column("workers", 2),
    _NOT_READY,
    Column("queued", 1),
    Column("oldest", 3, "age_s", seconds),
    Column("dead", 4),
    _RATE,
    _BUSY,
    _VERSIONS,
)
_WORKER = (
    Column("worker", 0, "id"),
    _SERVED,
    Column("state", 1),
    Column("rows", 11),
    _RATE,
    Column("lane", 7),
    Column("in-flight", 10, "in_flight"),
    Column("failed", 3, "failures"),
    Column("reuse", 8, "reuse", "{:.0%}".format),
    Column("homed", 12),
    Column("stolen", 13),
    Column("shared", 14),
)
_SPREAD = (Column("ranks", 15), Column("devices", 16))  # A model that is spread over several devices has these values.
_HEARTBEAT = Column("heartbeat", 9, "silent_s", seconds)
_IF_ANY = {_NOT_READY, _BUSY, _VERSIONS, *_SPREAD}  # Columns that are shown only if a row has a value.

_INFO = (Column("backend", 6), Column("V", 7, "vocab_size"), Column("dtype", 9), Column("rows as", 8, "encoding"))

STATUS = ((_MODEL, *_INFO, *_QUEUE), (*_WORKER, _HEARTBEAT, *_SPREAD))
"""The columns of two tables of `lmpool status`: models and workers."""

TOP = (
    (_MODEL, *_QUEUE, Column("p50", 6, "p50_s", seconds), Column("p99", 5, "p99_s", seconds)),
    (
        *_WORKER,
        Column("batch", 6),
        Column("p50", 5, "p50_s", seconds),
        Column("p99", 4, "p99_s", seconds),
        _HEARTBEAT,
        *_SPREAD,
    ),
)
"""The columns of two tables of `lmpool top`: models and workers."""

_OUTLIERS = (Column("outliers", 0, "kind"), _SERVED, Column("workers", 1, "count"), Column("such as", 0))
# Field that shows how much an outlier is affected -> its format.
_FORMS: dict[str, Callable[[float], str]] = {
    "failures": "{:.0f} failed".format,
    "silent_s": lambda value: f"last heartbeat {seconds(value)} ago",
    "p99_s": lambda value: f"p99 {seconds(value)}",
}


def survey_tables(
    models: Survey, columns: tuple[Sequence[Column], Sequence[Column]], most: int = DEFAULT_WORKERS
) -> list[FittingTable]:
    """Return the tables of models and of at most `most` workers with the columns `STATUS` or `TOP`.

    If there are more workers, a table of outliers precedes the workers, and the most urgent workers are listed.
    """
    tables = [_table("Models", columns[0], [_model_row(model) for model in models])]
    count = sum(len(model["workers"]) for model in models)
    outliers = [_outlier_row(model, found) for model in models for found in model["summary"]["outliers"]]
    # With one model, the column `model` would repeat its name in each row.
    left_out = () if len(models) > 1 else (_SERVED,)
    outlier_columns = [column for column in _OUTLIERS if column not in left_out]
    worker_columns = [column for column in columns[1] if column not in left_out]
    if count > most:
        # Rather leave out more columns than fold the names of many workers.
        worker_columns[0] = worker_columns[0]._replace(min_width=UNFOLDED)
        if outliers:
            tables.append(_table("Outliers", outlier_columns, outliers))
    if most:
        title = f"{most:,} of {count:,} workers, the most urgent first (--workers N, --all)"
        title = "Workers" if count <= most else title
        listed = by_name(models) if count <= most else by_need(models)[:most]
        tables.append(_table(title, worker_columns, [_worker_row(worker) for worker in listed]))
    return tables


def _table(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> FittingTable:
    shown = [column for column in columns if column not in _IF_ANY or any(map(column.cell, rows))]
    return FittingTable(title, shown, rows)


def _model_row(model: dict[str, Any]) -> dict[str, Any]:
    summary = model["summary"]
    row = {**(model["info"] or {}), **model, "workers": summary["workers"], "occupancy": summary["occupancy"]}
    if row["name"] == TRIE_SERVICE:
        row["vocab_size"] = None  # Trie workers serve vocabularies of any size.
    row["age_s"] = row["age_s"] if row["queued"] else None
    states, versions = summary["states"], summary["versions"]
    row["not ready"] = ", ".join(f"{count:,} {state}" for state, count in states.items() if state != "ready")
    if len(versions) > 1:  # Releases are worth a column while a pool is being upgraded.
        row["versions"] = ", ".join(f"{version} ({count:,})" for version, count in versions.items())
    return row


def _worker_row(worker: dict[str, Any]) -> dict[str, Any]:
    # Show the share of prompt tokens that the worker's prefix cache contained, since the worker's start.
    tokens, reused = number(worker, "tokens"), number(worker, "reused")
    return {**worker, "reuse": reused / tokens if tokens and reused is not None else None}


def _outlier_row(model: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    form = _FORMS.get(next(kind.field for kind in KINDS if kind.name == found["kind"]))
    most = found["most"][:_MAX_NAMED]
    named = [f"{worker} ({form(value)})" if form and value is not None else worker for worker, value in most]
    more = [f"{rest:,} more"] if (rest := found["count"] - len(named)) else []
    return {**found, "model": model["name"], "such as": ", ".join(named + more)}
