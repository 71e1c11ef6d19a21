"""A survey of what a pool serves, for `lmpool status` and `lmpool top`: its models, queues and workers, in tables.

A table shows as many columns as its terminal has room for; the other commands use that, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmpool.broker.scripts import QueueState, read_lanes
from lmpool.broker.server import Server
from lmpool.cli import Terminal, say_json
from lmpool.errors import LMPoolError, SettingsError, printable
from lmpool.metrics import SECONDS, add_packed, quantile
from lmpool.producer.cli.options import AsJson, Prefix, RedisUrl, key_names, run
from lmpool.producer.client.discovery import Discovery, WorkerInfo
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE

Survey = list[dict[str, Any]]
"""One entry a model, as `lmpool status --json` prints it."""

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")]
Once = Annotated[bool, typer.Option("--once", help="Look once and end.")]

WHOLE = 1_000_000
"""`Column.least` of names that stay in one line as long as there is room for them."""

SILENT = "silent"
"""State of a worker whose last two heartbeats are missing: it may have been killed."""

# Of a lease: two heartbeats, of which a worker sends five in a lease.
_SILENT_SHARE = 2 / 5
# Fields of a heartbeat about the interval before it, which say nothing of a silent worker.
_INTERVAL_FIELDS = ("rows_per_s", "batch", "p50_s", "p99_s")
_FRAME, _PADDING = 1, 3
_PATIENCE_S = 5.0
_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d{1,2})?")
# Texts that may look like numbers.
_TEXT_FIELDS = ("model", "backend", "fingerprint", "state")


def top(
    interval: Interval = 1.0,
    once: Once = False,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    as_json: AsJson = False,
) -> None:
    """Watch models and workers: queues, rates, and seconds from queueing to the row (p50, p99). Ctrl-C ends it.

    Rates and times are those of the interval between the workers' last two heartbeats.
    """
    if as_json and not once:
        raise SettingsError("json: a live view is for people; print one look as JSON with --once --json")
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
    """Look until cancelled. A server that is away is waited for, and said to be."""
    console, models, seen_at = Terminal(), None, time.monotonic()
    # A server that hangs must not leave an old view standing for long.
    redis = server.client(reply_timeout_s=max(_PATIENCE_S, interval))
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                trouble = ""
                try:
                    models, seen_at = await look(redis, keys), time.monotonic()
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


async def survey(server: Server, keys: Keys) -> Survey:
    """Look at a pool with a connection of its own.

    Raises:
        ServerError: the server cannot be used.
    """
    redis = server.client()
    try:
        return await look(redis, keys)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()


async def look(redis: Redis, keys: Keys) -> Survey:
    """Look at a pool.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    discovery = Discovery(redis, keys)
    infos, loading = await discovery.infos(), await discovery.loading()
    # A model whose first worker still loads has no info.
    names = [*infos, *sorted({worker.fields["model"] for worker in loading} - set(infos))]
    models = []
    for name in names:
        queue, trouble = await _queue(discovery, name)
        serving = [*await discovery.workers(name), *loading]
        workers = [worker for worker in serving if worker.fields.get("model") == name]
        silences, lanes = await discovery.silences(workers), await read_lanes(redis, keys.model(name))
        shown = [_shown(worker, silences.get(worker.worker_id), lanes.get(worker.worker_id)) for worker in workers]
        speaking = [worker for worker, told in zip(workers, shown, strict=True) if told["state"] != SILENT]
        models.append(
            {
                "name": name,
                "info": {**asdict(infos[name]), "fingerprint": infos[name].fingerprint} if name in infos else None,
                "queued": queue.depth,
                "age_s": queue.age_s,
                "dead": queue.dead,
                "trouble": trouble,
                **_totals(speaking),
                "workers": shown,
            }
        )
    return models


async def _queue(discovery: Discovery, model: str) -> tuple[QueueState, str]:
    """The state of a model's queue, and why it cannot be read, or "": one model's junk must not hide other models."""
    try:
        return await discovery.queue(model), ""
    except ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return QueueState(0, 0.0, 0, 0.0), "the queue cannot be read: another type of value is in its place"


def _shown(worker: WorkerInfo, silent_s: float | None, lane: int | None) -> dict[str, Any]:
    """What is shown of a worker; one that is silent has a state of its own and no rates."""
    told = {"id": worker.worker_id, "state": None, **_typed(worker.fields), "lane": lane, "silent_s": silent_s}
    lease_s = number(worker.fields, "lease_s")
    if silent_s is not None and lease_s is not None and silent_s > _SILENT_SHARE * lease_s:
        told |= {"state": SILENT, **dict.fromkeys(_INTERVAL_FIELDS)}
    return told


def _totals(workers: Iterable[WorkerInfo]) -> dict[str, float | None]:
    """The rate and the latencies of all workers of a model, in the intervals of their last heartbeats."""
    counts = [0] * (len(SECONDS) + 1)
    rate = 0.0
    for worker in workers:
        add_packed(counts, worker.fields.get("job_counts", ""))
        rate += number(worker.fields, "rows_per_s") or 0.0
    return {"rows_per_s": rate, "p50_s": quantile(counts, 0.5), "p99_s": quantile(counts, 0.99)}


def _typed(fields: Mapping[str, str]) -> dict[str, str | int | float | None]:
    """The fields of a heartbeat, with numbers as such."""
    typed: dict[str, str | int | float | None] = dict(fields)
    for name, text in fields.items():
        if name not in _TEXT_FIELDS and _NUMBER.fullmatch(text):
            typed[name] = int(text) if text.lstrip("-").isdecimal() else float(text)
        elif not text:
            typed[name] = None  # A time of an interval in which nothing was computed, say.
    return typed


def number(fields: Any, name: str) -> float | None:
    """A number among the fields of a heartbeat; None when it is none."""
    try:
        return float(fields.get(name, ""))
    except (TypeError, ValueError):
        return None


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its header.
        cells: its texts.
        rank: columns of the highest rank are left out first; 0 for names, which are folded instead.
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


def status_models(models: Survey, width: int) -> Table:
    """The models, for `lmpool status`."""
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
    # Trie workers answer for any vocabulary, so the number in their info has no meaning.
    return "" if info.get("name") == TRIE_SERVICE else _text(info.get("vocab_size"))


def status_workers(models: Survey, width: int) -> Table:
    """The workers, for `lmpool status`."""
    return fitting("Workers", [*_workers(models), _heard(models)], width)


def file_notices(models: Survey) -> list[str]:
    """A sentence for each worker under which files of its model have changed, for `lmpool status`."""
    return [
        f"worker {worker['id']}: files of its model have changed since it loaded them ({files}). It goes on with the "
        "weights that it has loaded"
        for worker in _each_worker(models)
        if (files := worker.get("changed_files"))
    ]


def top_models(models: Survey, width: int) -> Table:
    """The models, for `lmpool top`."""
    names = Column("model", [model["name"] for model in models], 0)
    latencies = [
        Column("p50", [seconds(model["p50_s"]) for model in models], 6),
        Column("p99", [seconds(model["p99_s"]) for model in models], 5),
    ]
    return fitting("Models", [names, *_queues(models), *latencies], width)


def top_workers(models: Survey, width: int) -> Table:
    """The workers, for `lmpool top`."""
    workers = _each_worker(models)
    more = [
        Column("batch", [_text(worker.get("batch")) for worker in workers], 6),
        Column("p50", [seconds(number(worker, "p50_s")) for worker in workers], 5),
        Column("p99", [seconds(number(worker, "p99_s")) for worker in workers], 4),
        _heard(models),
    ]
    return fitting("Workers", [*_workers(models), *more], width)


def _queues(models: Survey) -> list[Column]:
    """The state of the queue and the rate of rows, a row a model."""
    return [
        Column("workers", [str(len(model["workers"])) for model in models], 2),
        Column("queued", [str(model["queued"]) for model in models], 1),
        Column("oldest", [seconds(model["age_s"]) if model["queued"] else "" for model in models], 3),
        Column("dead", [str(model["dead"]) for model in models], 4),
        Column("rows/s", [_rate(model["rows_per_s"]) for model in models], 2),
    ]


def _workers(models: Survey) -> list[Column]:
    """The columns of every table of workers."""
    workers = _each_worker(models)
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
    """The time since the last heartbeat of each worker."""
    return Column("heard", [seconds(worker.get("silent_s")) for worker in _each_worker(models)], 9)


def _each_worker(models: Survey) -> list[dict[str, Any]]:
    return [worker for model in models for worker in model["workers"]]


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
