"""Tables of models and workers for `lmpool status`, and the command `lmpool top`.

A table shows as many columns as fit into the width of the terminal. Other commands use these tables too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
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
from lmpool.producer.cli.options import AsJson, Prefix, RedisUrl, key_names, run
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two polls.")]
Once = Annotated[bool, typer.Option("--once", help="Poll once and exit.")]

UNFOLDED = 1_000_000
"""`Column.min_width` of names that stay on one line while the table fits."""

_FRAME, _PADDING = 1, 3  # Characters that rich adds to a line, and to each column.
_REPLY_TIMEOUT_S = 5.0  # Seconds to wait for the server: longer, and the view would show old values without a notice.


def top(
    interval: Interval = 1.0,
    once: Once = False,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Watch models and workers: queues, rates, and seconds from submission to row (p50, p99). Ctrl-C exits.

    Rates and times are those between the workers' last two heartbeats.
    """
    if as_json and not once:
        raise SettingsError("json: the live view has no JSON form; use --once --json")
    server, keys = Server(redis), key_names(prefix)
    if not once:
        run(_watch(server, keys, interval))
        return
    models = run(survey(server, keys))
    if as_json:
        say_json(models)
        return
    console = Terminal()
    console.print(_view(models, console.width, ""))


async def _watch(server: Server, keys: Keys, interval: float) -> None:
    """Poll until cancelled; while the server is unreachable, show the reason and the last view."""
    console, models, seen_at = Terminal(), None, time.monotonic()
    redis = server.client(reply_timeout_s=max(_REPLY_TIMEOUT_S, interval))
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                trouble = ""
                try:
                    models, seen_at = await read_survey(redis, keys), time.monotonic()
                except (RedisError, OSError, LMPoolError) as error:
                    trouble = str(server.explain(error))
                    if models is not None:
                        trouble += f" (below: {time.monotonic() - seen_at:.0f} s ago)"
                view = _view(models or [], console.width, trouble)
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                await asyncio.sleep(interval)
    finally:
        await redis.aclose()


def _view(models: Survey, width: int, trouble: str) -> Group:
    head = [Text(printable(trouble), style="bold red")] if trouble else []
    if not models:
        return Group(*head) if trouble else Group(Text("no model is served"))
    return Group(*head, top_models(models, width), top_workers(models, width))


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its header.
        cells: its texts.
        rank: columns of the highest rank are left out first; 0 for names, which are folded instead.
        min_width: names up to this many characters stay on one line.
    """

    title: str
    cells: list[str]
    rank: int
    min_width: int = 12

    @property
    def width(self) -> int:
        """Characters of its widest text."""
        return max(map(cell_len, map(printable, (self.title, *self.cells))))


def fitting(title: str | None, columns: Sequence[Column], width: int) -> Table:
    """Return a table with the columns that fit; its caption names the others.

    Args:
        title: the title, or None.
        columns: all columns, of equal length.
        width: characters per line.
    """
    kept = list(columns)
    while _needed(kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    left_out = ", ".join(column.title for column in columns if column not in kept)
    table = Table(title=title, caption=f"too narrow for {left_out}" if left_out else None)
    for column in kept:
        if column.rank:
            table.add_column(column.title, no_wrap=True, justify="right")
        else:
            is_whole = column.width <= min(column.min_width, width - _needed(kept) + column.width)
            table.add_column(column.title, overflow="fold", no_wrap=is_whole)
    for cells in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*cells)
    return table


def _needed(columns: Sequence[Column]) -> int:
    """Return the characters of a line when names are folded as far as allowed."""
    widths = [column.width if column.rank else min(column.width, column.min_width) for column in columns]
    return _FRAME + sum(widths) + _PADDING * len(columns)


def status_models(models: Survey, width: int) -> Table:
    """Return the table of models for `lmpool status`."""
    infos: list[Mapping[str, Any]] = [model["info"] or {} for model in models]
    return fitting(
        "Models",
        [
            Column("model", [model["name"] for model in models], 0),
            Column("backend", [str(info.get("backend", "")) for info in infos], 6),
            Column("V", [_vocab_size(info) for info in infos], 7),
            Column("dtype", [str(info.get("dtype", "")) for info in infos], 9),
            Column("rows as", [str(info.get("encoding", "")) for info in infos], 8),
            *_queues(models),
        ],
        width,
    )


def _vocab_size(info: Mapping[str, Any]) -> str:
    # Trie workers serve any vocabulary, so V in their info has no meaning.
    return "" if info.get("name") == TRIE_SERVICE else _text(info.get("vocab_size"))


def status_workers(models: Survey, width: int) -> Table:
    """Return the table of workers for `lmpool status`."""
    return fitting("Workers", [*_workers(models), _heard(models)], width)


def top_models(models: Survey, width: int) -> Table:
    """Return the table of models for `lmpool top`."""
    names = Column("model", [model["name"] for model in models], 0)
    latencies = [
        Column("p50", [seconds(model["p50_s"]) for model in models], 6),
        Column("p99", [seconds(model["p99_s"]) for model in models], 5),
    ]
    return fitting("Models", [names, *_queues(models), *latencies], width)


def top_workers(models: Survey, width: int) -> Table:
    """Return the table of workers for `lmpool top`."""
    workers = workers_of(models)
    more = [
        Column("batch", [_text(worker.get("batch")) for worker in workers], 6),
        Column("p50", [seconds(number(worker, "p50_s")) for worker in workers], 5),
        Column("p99", [seconds(number(worker, "p99_s")) for worker in workers], 4),
        _heard(models),
    ]
    return fitting("Workers", [*_workers(models), *more], width)


def _queues(models: Survey) -> list[Column]:
    return [
        Column("workers", [str(len(model["workers"])) for model in models], 2),
        Column("queued", [str(model["queued"]) for model in models], 1),
        Column("oldest", [seconds(model["age_s"]) if model["queued"] else "" for model in models], 3),
        Column("dead", [str(model["dead"]) for model in models], 4),
        Column("rows/s", [_rate(model["rows_per_s"]) for model in models], 2),
    ]


def _workers(models: Survey) -> list[Column]:
    workers = workers_of(models)
    return [
        Column("worker", [_text(worker["id"]) for worker in workers], 0),
        Column("model", [_text(worker.get("model")) for worker in workers], 0),
        Column("state", [_text(worker.get("state")) for worker in workers], 1),
        Column("rows", [_text(worker.get("rows")) for worker in workers], 11),
        Column("rows/s", [_rate(number(worker, "rows_per_s")) for worker in workers], 2),
        Column("lane", [_text(worker.get("lane")) for worker in workers], 7),
        Column("in-flight", [_text(worker.get("in_flight")) for worker in workers], 10),
        Column("failed", [_text(worker.get("failures")) for worker in workers], 3),
        Column("reuse", [_reuse(worker) for worker in workers], 8),
        Column("homed", [_text(worker.get("homed")) for worker in workers], 12),
        Column("stolen", [_text(worker.get("stolen")) for worker in workers], 13),
        Column("shared", [_text(worker.get("shared")) for worker in workers], 14),
    ]


def _heard(models: Survey) -> Column:
    return Column("heard", [seconds(worker.get("silent_s")) for worker in workers_of(models)], 9)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _reuse(worker: Mapping[str, Any]) -> str:
    """Return the share of tokens found in a prefix cache since the worker's start."""
    tokens, reused = number(worker, "tokens"), number(worker, "reused")
    return f"{reused / tokens:.0%}" if tokens and reused is not None else ""


def seconds(value: float | None) -> str:
    """Format a duration: 850 µs, 3.4 ms, 12 ms, 3.4 s, 5 min."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 60:.0f} min"
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "µs")
    return f"{scaled:.{int(scaled < 10 and unit != 'µs')}f} {unit}"
