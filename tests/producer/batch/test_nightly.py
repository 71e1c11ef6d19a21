"""Nightly runs of a schedule: a worker with the schedule submits each run, and tries again after errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path

import pytest
from arq.constants import in_progress_key_prefix, job_key_prefix

import lmpool.batch
from lmpool.batch.fetch import FILES_VARIABLE
from lmpool.batch.jobs import QUEUE, SCHEDULE_VARIABLE, BatchWorker, read_schedule, worker_options
from lmpool.errors import SettingsError
from tests.producer.batch.runs import batch, draw_texts, write_texts
from tests.support.pool import Pool

SHARDS = 3
DAY = (datetime.now(UTC) - timedelta(days=2)).date()  # arq runs no job before its time, so choose a day in the past.

MakeWorker = Callable[..., BatchWorker]
"""Makes a worker of jobs in this process, with the file of a schedule or without one."""


@pytest.fixture
async def make_worker(jobs_pool: Pool, tmp_path: Path) -> AsyncIterator[MakeWorker]:
    async with AsyncExitStack() as ended:

        def make(schedule: Path | None = None) -> BatchWorker:
            made = BatchWorker(**worker_options(jobs_pool.url, schedule, files=tmp_path), handle_signals=False)
            made.ctx["redis"] = made.pool
            ended.push_async_callback(made.close)
            return made

        yield make


def write_schedule(folder: Path, output: str) -> Path:
    """Write an input of three shards, and a schedule with one run at 02:30; return the path of the schedule."""
    source, path = write_texts(folder / "in.jsonl", draw_texts(10 * SHARDS)), folder / f"{output}.toml"
    path.write_text(
        f'[[run]]\nat = "02:30"\nsource = "{source}"\noutput = "{folder / output}"\nwhat = "topk:3"\nprefix = "jobs"\n'
        "shard_lines = 10\n"
    )
    return path


async def queue_run(worker: BatchWorker) -> str:
    """Let a worker queue its run of `DAY`, 02:30; return the name of the job."""
    before = set(await worker.pool.zrange(QUEUE, 0, -1))
    now = datetime.combine(DAY, time_of_day(2, 29, 59), worker.timezone)
    for seconds in range(2):  # arq plans a run in the first call, and queues the run in the second.
        await worker.run_cron(now + timedelta(seconds=seconds), worker.poll_delay_s)
    (name,) = {*await worker.pool.zrange(QUEUE, 0, -1)} - before
    return str(name.decode())


async def run_nightly(worker: BatchWorker) -> list[str]:
    """Let a worker run the queued nightly jobs that it may run; return their names."""
    names = await worker.pool.zrange(QUEUE, 0, -1)
    await worker.start_jobs([name for name in names if name.startswith(b"nightly-")])
    begun = list(worker.tasks)
    await asyncio.gather(*worker.tasks.values())
    worker.tasks.clear()
    return begun


def queued(pool: Pool, output: Path) -> int:
    """The number of queued jobs of an output folder."""
    return int(json.loads(batch(pool, "status", output, "--json"))["queued"])


async def test_the_output_of_a_nightly_run_has_the_day_in_its_name(
    jobs_pool: Pool, tmp_path: Path, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs_pool.start()
    schedule = write_schedule(tmp_path, "out-{date}")
    with pytest.raises(SettingsError, match=f"{tmp_path / 'in.jsonl'} is not below {tmp_path / 'elsewhere'}"):
        worker_options(jobs_pool.url, schedule, files=tmp_path / "elsewhere")
    worker = make_worker(schedule)
    name = await queue_run(worker)
    assert await run_nightly(worker) == [name]
    assert queued(jobs_pool, tmp_path / f"out-{DAY}") == SHARDS
    # arq's own command reads the schedule from the environment.
    monkeypatch.setenv(SCHEDULE_VARIABLE, str(schedule))
    monkeypatch.setenv("LMPOOL_REDIS_URL", jobs_pool.url)
    monkeypatch.setenv(FILES_VARIABLE, str(tmp_path))
    assert len(lmpool.batch.WorkerSettings.cron_jobs) == 1


async def test_a_nightly_run_is_tried_again_and_keeps_its_day(
    jobs_pool: Pool, tmp_path: Path, make_worker: MakeWorker
) -> None:
    worker = make_worker(write_schedule(tmp_path, "out-{date}"))
    name = await queue_run(worker)
    await run_nightly(worker)  # No worker serves a model.
    assert (worker.jobs_retried, worker.jobs_failed) == (1, 0)
    assert await worker.pool.zscore(QUEUE, name) > 1000 * time.time()
    jobs_pool.start()
    await worker.pool.delete(in_progress_key_prefix + name)  # arq keeps this key for a minute.
    await worker.pool.zadd(QUEUE, {name: 1})
    await run_nightly(worker)
    assert worker.jobs_complete == 1
    assert queued(jobs_pool, tmp_path / f"out-{DAY}") == SHARDS


async def test_a_worker_submits_only_runs_of_its_own_schedule(
    jobs_pool: Pool, tmp_path: Path, make_worker: MakeWorker
) -> None:
    """Two schedules have a run at the same time, and one worker has no schedule."""
    jobs_pool.start()
    outputs = [tmp_path / "first", tmp_path / "second"]
    first, second = (make_worker(write_schedule(tmp_path, output.name)) for output in outputs)
    names = [await queue_run(worker) for worker in (first, second)]
    other = make_worker()
    assert await run_nightly(other) == []
    for worker, name, output in zip((second, first), names[::-1], outputs[::-1], strict=True):
        assert await run_nightly(worker) == [name]
        assert queued(jobs_pool, output) == SHARDS
    # No worker has the schedule of the last run any more: the run is removed when arq's definition has expired.
    last = await queue_run(make_worker(write_schedule(tmp_path, "last")))
    assert await run_nightly(other) == []
    await other.pool.delete(job_key_prefix + last)
    assert await run_nightly(other) == [last]
    assert await other.pool.zscore(QUEUE, last) is None


async def test_nightly_runs_are_in_the_time_zone_of_arq_timezone(
    jobs_pool: Pool, tmp_path: Path, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs_pool.start()
    schedule = write_schedule(tmp_path, "out-{date}")
    monkeypatch.setenv("ARQ_TIMEZONE", "Asia/Tokyo")
    worker = make_worker(schedule)
    name = await queue_run(worker)
    at = datetime.fromtimestamp(int(name.partition(":")[2]) / 1000, UTC)
    assert at.replace(microsecond=0) == datetime.combine(DAY, time_of_day(2, 30), UTC) - timedelta(hours=9)
    assert await run_nightly(worker) == [name]
    assert queued(jobs_pool, tmp_path / f"out-{DAY}") == SHARDS
    for unknown in ("Atlantis", "Asia", "/etc/localtime"):
        monkeypatch.setenv("ARQ_TIMEZONE", unknown)
        with pytest.raises(SettingsError, match=f"ARQ_TIMEZONE: '{unknown}' is not a time zone"):
            make_worker(schedule)
    monkeypatch.delenv("ARQ_TIMEZONE")
    # arq would use the time zone of the machine if it were given none.
    assert worker_options(jobs_pool.url, schedule, files=tmp_path)["timezone"] is UTC


def test_a_malformed_schedule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.toml"
    entry = '[[run]]\nat = "02:30"\nsource = "a"\noutput = "b"\nwhat = "topk:3"\n'
    for text in ("", "[[run]]\n", "run = 3\n", "not TOML", entry + "colour = 1\n", entry.replace("02:30", "25:00"),
                 entry.replace("topk:3", "nothing")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(SettingsError):
            read_schedule(path)
    path.write_text('title = "nightly runs"\n' + entry)
    assert [run.what for run in read_schedule(path)] == ["topk:3"]
