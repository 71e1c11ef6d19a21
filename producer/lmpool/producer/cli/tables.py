"""Tables that fit a terminal: what matters least goes first, and names are never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.table import Table

from lmpool.printable import printable
from lmpool.producer.cli.survey import Survey, number

_FRAME, _PADDING = 1, 3

WHOLE = 1_000_000
"""What a column keeps in a line that is not folded as long as there is room for it."""


class Column(NamedTuple):
    """A column.

    Attributes:
        title: its header.
        cells: its texts.
        rank: how much it matters; the highest are left out first. 0 for names, which are folded instead.
        least: characters that names keep in a line, if they have so many.
    """

    title: str
    cells: list[str]
    rank: int
    least: int = 12

    @property
    def width(self) -> int:
        """Characters that its widest text takes."""
        return max(map(cell_len, map(printable, (self.title, *self.cells))))


def fitting(title: str | None, columns: Sequence[Column], width: int) -> Table:
    """A table for a `Terminal`, of those columns that there is room for; it names the others.

    Args:
        title: stands above it, if anything does.
        columns: all that there may be, of equal length.
        width: characters of a line.
    """
    kept = list(columns)
    while _needed(kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    left_out = ", ".join(column.title for column in columns if column not in kept)
    table = Table(title=title, caption=f"no room for {left_out}" if left_out else None)
    for column in kept:
        if column.rank:
            table.add_column(column.title, no_wrap=True, justify="right")
        else:
            is_whole = column.width <= min(column.least, width - _needed(kept) + column.width)
            table.add_column(column.title, overflow="fold", no_wrap=is_whole)
    for cells in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*cells)
    return table


def _needed(columns: Sequence[Column]) -> int:
    """Characters of a line, when names are folded as far as they may be."""
    least = [column.width if column.rank else min(column.width, column.least) for column in columns]
    return _FRAME + sum(least) + _PADDING * len(columns)


def status_models(found: Survey, width: int) -> Table:
    """The models, for `lmpool status`."""
    cards: list[Mapping[str, Any]] = [model["card"] or {} for model in found]
    return fitting(
        "Models",
        [
            Column("model", [model["name"] for model in found], 0),
            Column("backend", [str(card.get("backend", "")) for card in cards], 6),
            Column("V", [str(card.get("vocab_size", "")) for card in cards], 7),
            Column("dtype", [str(card.get("dtype", "")) for card in cards], 9),
            Column("rows as", [str(card.get("encoding", "")) for card in cards], 8),
            *_load(found),
        ],
        width,
    )


def status_workers(found: Survey, width: int) -> Table:
    """The workers, for `lmpool status`."""
    return fitting("Workers", [*_workers(found), _heard(found)], width)


def top_models(found: Survey, width: int) -> Table:
    """The models, for `lmpool top`."""
    names = Column("model", [model["name"] for model in found], 0)
    latencies = [
        Column("p50", [seconds(model["p50_s"]) for model in found], 6),
        Column("p99", [seconds(model["p99_s"]) for model in found], 5),
    ]
    return fitting("Models", [names, *_load(found), *latencies], width)


def top_workers(found: Survey, width: int) -> Table:
    """The workers, for `lmpool top`."""
    workers = _each_worker(found)
    more = [
        Column("batch", [_text(worker.get("batch")) for worker in workers], 6),
        Column("p50", [seconds(number(worker, "p50_s")) for worker in workers], 5),
        Column("p99", [seconds(number(worker, "p99_s")) for worker in workers], 4),
        _heard(found),
    ]
    return fitting("Workers", [*_workers(found), *more], width)


def _load(found: Survey) -> list[Column]:
    """What is to be done and what is done, a row a model."""
    return [
        Column("workers", [str(len(model["workers"])) for model in found], 2),
        Column("queued", [str(model["queued"]) for model in found], 1),
        Column("oldest", [seconds(model["age_s"]) if model["queued"] else "" for model in found], 3),
        Column("dead", [str(model["dead"]) for model in found], 4),
        Column("rows/s", [_rate(model["rows_per_s"]) for model in found], 2),
    ]


def _workers(found: Survey) -> list[Column]:
    """What every table of workers has."""
    workers = _each_worker(found)
    return [
        Column("worker", [_text(worker["id"]) for worker in workers], 0),
        Column("model", [_text(worker.get("model")) for worker in workers], 0),
        Column("state", [_text(worker.get("state")) for worker in workers], 1),
        Column("rows", [_text(worker.get("rows")) for worker in workers], 10),
        Column("rows/s", [_rate(number(worker, "rows_per_s")) for worker in workers], 2),
        Column("held", [_text(worker.get("held")) for worker in workers], 8),
        Column("failed", [_text(worker.get("failures")) for worker in workers], 3),
        Column("reuse", [_reuse(worker) for worker in workers], 9),
    ]


def _heard(found: Survey) -> Column:
    """How long ago each worker has given its last sign of life."""
    return Column("heard", [seconds(worker.get("silent_s")) for worker in _each_worker(found)], 7)


def _each_worker(found: Survey) -> list[dict[str, Any]]:
    return [worker for model in found for worker in model["workers"]]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _reuse(worker: Mapping[str, Any]) -> str:
    """The share of tokens that a prefix cache held, since the worker's start."""
    tokens, reused = number(worker, "tokens"), number(worker, "reused")
    return f"{reused / tokens:.0%}" if tokens and reused is not None else ""


def seconds(value: float | None) -> str:
    """A time for people: 850 µs, 3.4 ms, 12 ms, 3.4 s, 5 min."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 60:.0f} min"
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "µs")
    return f"{scaled:.{int(scaled < 10 and unit != 'µs')}f} {unit}"
