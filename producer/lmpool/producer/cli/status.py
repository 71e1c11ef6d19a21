"""Tables of models and workers for `lmpool status`, and the command `lmpool top`.

A table shows as many columns as fit into the width of the terminal. Other commands use these tables too.
"""

from __future__ import annotations

import asyncio
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

from lmpool.admin.survey import Survey, number, read_survey, survey, workers_of
from lmpool.broker.server import Server
from lmpool.cli import Terminal, say_json
from lmpool.errors import LMPoolError, SettingsError, printable
from lmpool.producer.cli.options import AsJson, ServerOptions, with_options
from lmpool.protocol.model_info import TRIE_SERVICE

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two polls.")]
Once = Annotated[bool, typer.Option("--once", help="Poll once and exit.")]

UNFOLDED = 1_000_000
"""Value of `Column.min_width` for a column whose names stay on one line while the table fits the terminal."""

_FRAME, _PADDING = 1, 3  # Characters that rich adds to each line, and to each column.
_REPLY_TIMEOUT_S = 5.0  # Max seconds to wait for the server. Until the server replies, the view shows old values.


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
            console.print(_view(models))
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
                view = _view(models, trouble)
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                await asyncio.sleep(interval)


def _view(models: Survey, trouble: str = "") -> Group:
    head = [Text(printable(trouble), style="bold red")] if trouble else []
    if not models:
        return Group(*(head or [Text("no model is served")]))
    return Group(*head, *survey_tables(models, TOP))


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
_MODEL = Column("model", 0, "name")
_QUEUE = (Column("workers", 2), Column("queued", 1), Column("oldest", 3, "age_s", seconds), Column("dead", 4), _RATE)
_WORKER = (
    Column("worker", 0, "id"),
    Column("model", 0),
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
_SPREAD = (Column("ranks", 15), Column("devices", 16))  # Shown only if a model is spread over several devices.
_HEARD = Column("heard", 9, "silent_s", seconds)

_INFO = (Column("backend", 6), Column("V", 7, "vocab_size"), Column("dtype", 9), Column("rows as", 8, "encoding"))

STATUS = ((_MODEL, *_INFO, *_QUEUE), (*_WORKER, _HEARD, *_SPREAD))
"""The columns of the two tables of `lmpool status`: models and workers."""

TOP = (
    (_MODEL, *_QUEUE, Column("p50", 6, "p50_s", seconds), Column("p99", 5, "p99_s", seconds)),
    (
        *_WORKER,
        Column("batch", 6),
        Column("p50", 5, "p50_s", seconds),
        Column("p99", 4, "p99_s", seconds),
        _HEARD,
        *_SPREAD,
    ),
)
"""The columns of the two tables of `lmpool top`: models and workers."""


def survey_tables(models: Survey, columns: tuple[Sequence[Column], Sequence[Column]]) -> list[FittingTable]:
    """Return the tables of models and workers with the columns `STATUS` or `TOP`."""
    of_models = [{**(model["info"] or {}), **model, "workers": len(model["workers"])} for model in models]
    for row in of_models:
        if row["name"] == TRIE_SERVICE:
            row["vocab_size"] = None  # Trie workers serve vocabularies of any size.
        row["age_s"] = row["age_s"] if row["queued"] else None
    of_workers = [dict(worker) for worker in workers_of(models)]
    for row in of_workers:
        # Show the share of prompt tokens that the worker's prefix cache contained, since the worker's start.
        tokens, reused = number(row, "tokens"), number(row, "reused")
        row["reuse"] = reused / tokens if tokens and reused is not None else None
    shown = [column for column in columns[1] if column not in _SPREAD or any(map(column.cell, of_workers))]
    return [FittingTable("Models", columns[0], of_models), FittingTable("Workers", shown, of_workers)]
