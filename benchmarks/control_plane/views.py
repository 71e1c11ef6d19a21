"""What the views of a pool cost the server: `lmpool status`, `lmpool top`, the page, and Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from tests.support.fleet import INFO, write_fleet

from lmpool.admin.survey import pause_s, read_survey
from lmpool.broker.scripts import read_queue
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_memory
from lmpool.protocol.keys import Keys
from lmpool.web.app import read_demand
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import MEASURES_PER_S

_KEYS = Keys()
_INTERVAL_S = 1.0  # Seconds between two surveys of `lmpool top` and the page, with few workers.
_POLL_S = 5.0  # Seconds between two polls of an autoscaler: `pollingInterval` in docker/kubernetes/keda.
_REPEATS = 20


async def measure_views(url: str, count: int) -> str:
    """The row of the table for a pool of `count` workers; the server must be empty."""
    client = Server(url).client()
    try:
        await write_fleet(client, _KEYS, count)
        survey_s, calls, size = await _cost(client, lambda: read_survey(client, _KEYS))
        pause = pause_s(await read_survey(client, _KEYS), _INTERVAL_S)
        memory_s, *_ = await _cost(client, lambda: read_memory(client))
        demand_s, demand_calls, _ = await _cost(client, lambda: read_demand(client, _KEYS, INFO.name))
        metrics_s, *_ = await _cost(client, lambda: _read_metrics(client))
        await client.flushall()
    finally:
        await client.aclose()
    cells = (
        f"{count:,}",
        f"{1000 * survey_s:.2f}",
        f"{calls:,.0f}",
        f"{size / 1000:,.0f}",
        f"{pause:g}",
        f"{100 * survey_s / pause:.2f}",
        f"{100 * (survey_s + memory_s) / pause:.2f}",
        f"{demand_calls:.0f}",
        f"{100 * demand_s / _POLL_S:.3f}",
        f"{100 * metrics_s * min(count / WorkerSettings().heartbeat_s, MEASURES_PER_S):.2f}",
    )
    return f"| {' | '.join(cells)} |"


async def _read_metrics(client: Redis) -> None:
    """The commands with which a worker with `--metrics-port` reads the state of the queue and the server's memory."""
    await read_queue(client, _KEYS.model(INFO.name))
    await read_memory(client)


async def _cost(client: Redis, work: Callable[[], Awaitable[object]]) -> tuple[float, float, float]:
    """The server's processor time in seconds, its commands (those in scripts included) and reply bytes of a call."""
    await work()
    before = await _spent(client)
    for _ in range(_REPEATS):
        await work()
    after = await _spent(client)
    cpu_s, calls, size = ((now - then) / _REPEATS for now, then in zip(after, before, strict=True))
    return cpu_s, calls, size


async def _spent(client: Redis) -> tuple[float, float, float]:
    commands: Any = await client.info("commandstats")
    stats: Any = await client.info("stats")
    cpu: Any = await client.info("cpu")
    calls = sum(entry["calls"] for name, entry in commands.items() if name != "cmdstat_info")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]), calls, stats["total_net_output_bytes"]


TITLE = """\
## Views

The cost of the views of a pool. *Survey*: the server's processor time, commands (those in scripts included) and reply
bytes for one survey. `lmpool top` and the page make one survey per *pause*; all open pages share these surveys.
*Demand*: one request for `/api/demand/MODEL`, which an autoscaler sends every 5 s. *Metrics*: the reads of workers with
`--metrics-port`, which report the state of the queue and of the server's memory. *%* is the share of a core.

| workers | survey, ms | commands | KB | pause, s | `top`, % | page, % | commands of a demand | demand, % | metrics, % |
|---|---|---|---|---|---|---|---|---|---|
"""
