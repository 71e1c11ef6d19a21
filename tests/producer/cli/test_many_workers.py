"""Views of a pool with 1,000 workers: their output and their cost for the server are bounded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from lmpool.admin.fleet import MAX_OUTLIERS, by_need, summarize
from lmpool.admin.survey import file_notices, pause_s, read_survey
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.protocol.keys import Keys
from lmpool.web.tables import PAGE_WORKERS, Tables
from tests.support.fleet import heartbeat_fields, write_fleet
from tests.support.pool import Pool, run_lmpool
from tests.support.servers.cluster import LocalCluster

WORKERS = 1000
MAX_LINES, MAX_BYTES = 60, 16_000  # Of the output of a command: less than a worker a line.
MAX_FRAME_BYTES = 80_000  # Of a frame of the pool page, which lists 100 workers.
Change = dict[str, str | int | float]


def troubled(number: int) -> Change:
    """Changes of the heartbeats of a few of 1,000 workers."""
    files = {"changed_files": "model.safetensors"}
    changes: dict[int, Change] = {
        7: {"failures": 3}, 8: {"failures": 40}, 300: {"state": "draining"}, 400: {"p99_s": 9.0, "job_counts": "15:9"},
        500: {"version": "0.0.9"}, 600: {**files}, 601: {**files},
    }  # fmt: skip
    return changes.get(number, {})


@pytest.fixture
async def redis(pool: Pool) -> AsyncIterator[Redis]:
    client = Server(pool.url).client()
    yield client
    await client.aclose()


@pytest.fixture
async def names(pool: Pool, redis: Redis) -> list[str]:
    """The ids of 1,000 workers without processes, of which some are in trouble and one is silent."""
    written = await write_fleet(redis, pool.keys, WORKERS, troubled)
    await redis.pexpire(pool.keys.worker(written[900]), 60_000)
    return written


async def spent(redis: Redis, work: Callable[[], Awaitable[Any]]) -> dict[str, int]:
    """Number of calls of each Redis command while `work` runs, including calls in scripts."""

    async def counts() -> dict[str, int]:
        reply: Any = await redis.info("commandstats")
        return {name: entry["calls"] for name, entry in reply.items() if name != "cmdstat_info"}

    before = await counts()
    await work()
    return {
        name: calls - before.get(name, 0) for name, calls in (await counts()).items() if calls > before.get(name, 0)
    }


def commands(pool: Pool, *arguments: str) -> str:
    done = run_lmpool(*arguments, "--redis", pool.url, "--prefix", pool.prefix)
    assert not done.returncode, done.stderr
    return done.stdout


async def test_a_survey_runs_two_plain_commands_for_each_worker_and_no_more_scripts(own_server: EmbeddedServer) -> None:
    # On the shared server, the heartbeats of other tests' workers would be counted too.
    redis, keys = Server(own_server.url).client(), Keys()
    await write_fleet(redis, keys, 100)
    await read_survey(redis, keys)  # Load the scripts into the server.
    few = await spent(redis, lambda: read_survey(redis, keys))
    await write_fleet(redis, keys, WORKERS)
    many = await spent(redis, lambda: read_survey(redis, keys))
    await redis.aclose()
    assert {name: calls - few.get(name, 0) for name, calls in many.items() if calls != few.get(name, 0)} == {
        "cmdstat_hgetall": WORKERS - 100,
        "cmdstat_pttl": WORKERS - 100,
    }
    assert many["cmdstat_evalsha"] < 10


async def test_commands_print_totals_outliers_and_the_most_urgent_workers(pool: Pool, names: list[str]) -> None:
    for command in (("status",), ("top", "--once")):
        text = commands(pool, *command)
        assert len(text.splitlines()) <= MAX_LINES
        assert len(text) <= MAX_BYTES
        assert "1 silent, 1 draining" in text or "1 draining, 1 silent" in text
        assert "0.1.0 (999), 0.0.9 (1)" in text
        lines = text.splitlines()
        listed = [line.split()[1] for line in lines[lines.index(next(ln for ln in lines if "20 of 1,000" in ln)) :]
                  if "node-" in line]  # fmt: skip
        assert listed[:7] == [names[number] for number in (900, 600, 601, 8, 7, 400, 300)]
        assert len(listed) == 20
        (outlier,) = [line for line in lines if "failing" in line]
        assert f"{names[8]} (40 failed), {names[7]} (3 failed)" in outlier
        assert sum("node-" in line for line in commands(pool, *command, "--workers", "3").splitlines()) == 3 + 6 - 1
        everything = commands(pool, *command, "--all")
        assert all(name in everything for name in names)
        assert "Outliers" not in everything


async def test_json_has_all_workers_unless_their_number_is_given(pool: Pool, names: list[str]) -> None:
    for command in (("status", "--json"), ("top", "--once", "--json")):
        (model,) = json.loads(commands(pool, *command))
        assert {worker["id"] for worker in model["workers"]} == set(names)
        (model,) = json.loads(text := commands(pool, *command, "--workers", "2"))
        assert [worker["id"] for worker in model["workers"]] == [names[600], names[900]]
        assert (model["summary"]["workers"], model["summary"]["states"]["ready"]) == (WORKERS, WORKERS - 2)
        assert len(text) < MAX_BYTES
    done = run_lmpool("status", "--workers", "2", "--all", "--redis", pool.url)
    assert (done.returncode, done.stderr.count("--all")) == (2, 1)


async def test_the_frame_of_the_page_is_bounded_and_pages_contain_each_worker_once(
    pool: Pool, redis: Redis, names: list[str]
) -> None:
    tables = Tables(await read_survey(redis, pool.keys))
    assert len(json.dumps(frame := tables.frame())) < MAX_FRAME_BYTES
    assert frame["workers"] == tables.workers()
    pages = [tables.workers(offset=begin) for begin in range(0, WORKERS, PAGE_WORKERS)]
    assert sorted(worker["id"] for page in pages for worker in page["listed"]) == sorted(names)
    assert tables.workers(offset=10**9) == pages[-1], "a page behind the last one is the last page"
    assert [worker["id"] for worker in tables.workers("DRAIN")["listed"]] == [names[300]]
    assert tables.workers("no such worker") == {"total": WORKERS, "matching": 0, "offset": 0, "listed": []}


async def test_surveys_are_less_frequent_with_many_workers(pool: Pool, redis: Redis, names: list[str]) -> None:
    models = await read_survey(redis, pool.keys)
    assert pause_s(models, 1.0) == pytest.approx(3.0)
    assert pause_s([], 1.0) == 1.0


async def test_workers_with_the_same_changed_files_are_one_notice(pool: Pool, redis: Redis, names: list[str]) -> None:
    (notice,) = file_notices(await read_survey(redis, pool.keys))
    assert notice.startswith(f"worker {names[600]} and 1 more of its model: files of its model have changed")


def test_a_summary_of_hostile_heartbeats_is_bounded_and_finite() -> None:
    numbers = ("nan", "inf", "-1", "x", None, 1e308, 3)
    workers = [
        {"id": f"w{number}", "state": f"state {number}", "version": f"v{number}", "failures": numbers[number % 7],
         "capacity": numbers[number % 5], "in_flight": numbers[number % 3], "rows": numbers[number % 7]}
        for number in range(1000)
    ]  # fmt: skip
    summary = summarize(workers)
    assert summary["workers"] == sum(summary["states"].values()) == sum(summary["versions"].values()) == 1000
    assert len(summary["states"]) < 12
    assert all(len(found["most"]) <= MAX_OUTLIERS for found in summary["outliers"])
    assert abs(summary["rows"]) < 1e300
    assert len(by_need([{"name": "m", "workers": workers}])) == 1000


async def test_written_heartbeats_have_the_fields_of_real_workers(pool: Pool, redis: Redis, names: list[str]) -> None:
    pool.start()
    (real,) = {key.rpartition("worker:")[2] for key in pool.names("worker:*")} - set(names)
    written, sent = [set(await redis.hkeys(pool.keys.worker(name))) for name in (names[0], real)]
    # `shared` is the counter of a worker with shared memory.
    assert written - {b"shared"} == sent - {b"shared", b"changed_files"}
    assert heartbeat_fields(0)["state"] == "ready"


async def test_heartbeats_are_read_from_all_masters_of_a_cluster(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        client = Server(cluster.url).client()
        names = await write_fleet(client, Keys(), 300)
        await client.set(Keys().worker(names[7]), "junk")
        (model,) = await read_survey(client, Keys())
        await client.aclose()
    assert [worker["id"] for worker in model["workers"]] == [*names[:7], *names[8:]]
    assert model["summary"]["states"] == {"ready": 299}
