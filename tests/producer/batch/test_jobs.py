"""Shards of a batch run as jobs of arq: any number of workers write the run's output, even if some are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import redis
from arq.constants import health_check_key_suffix, in_progress_key_prefix, job_key_prefix, result_key_prefix
from arq.jobs import deserialize_result

import lmpool.batch
from lmpool.batch.fetch import FILES_VARIABLE
from lmpool.batch.folder import digest_of_file, open_folder
from lmpool.batch.jobs import QUEUE, BatchWorker, ShardJob, connect, find_jobs, worker_options
from lmpool.batch.run import BatchSettings
from lmpool.batch.run import Pool as PoolOfJobs
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.errors import SettingsError
from lmpool.producer import Producer
from tests.producer.batch.buckets import TestBucket
from tests.producer.batch.runs import batch, content, draw_texts, run, run_until_empty, worker, write_lines, write_texts
from tests.shared.broker.secure_server import SecureServer
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, PATIENCE, Pool, run_lmpool, until, until_async

TEXTS, SHARDS = draw_texts(120), 12
OPTIONS = ("--what", "topk:3", "--shard-lines", "10", "--concurrency", "8")

Wanted = tuple[Path, dict[str, bytes]]
"""An input, and the output files of a run over it: path -> content."""
Submitted = tuple[Path, Path, dict[str, bytes]]
"""An input, an output folder for which all jobs are queued, and the expected output files."""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """An open gate; tests shut it to hold up the steps of the model's worker."""
    gate = Gate(tmp_path / "gate")
    gate.open()
    return gate


@pytest.fixture
async def wanted(jobs_pool: Pool, tmp_path: Path, gate: Gate) -> Wanted:
    """Serve a model; return an input with a bad line and a repeated custom id, and the output of a run over it."""
    jobs_pool.start("--max-batch", 1, command=gate.command)
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    lines = source.read_text("utf-8").splitlines()
    lines[17], lines[55] = "bad", lines[3]
    write_lines(source, lines)
    async with jobs_pool.producer(keep_answers=False) as producer:
        await run(producer, source, tmp_path / "wanted", "topk:3", shard_lines=10)
    return source, content(tmp_path / "wanted")


@pytest.fixture
def submitted(jobs_pool: Pool, tmp_path: Path, wanted: Wanted) -> Submitted:
    source, expected = wanted
    submit(jobs_pool, source, tmp_path / "out")
    return source, tmp_path / "out", expected


def submit(pool: Pool, source: Path | str, output: Path | str) -> Any:
    return json.loads(batch(pool, "submit", source, output, *OPTIONS, "--prefix", pool.prefix, "--json"))


def status(pool: Pool, output: Path | str) -> Any:
    return json.loads(batch(pool, "status", output, "--json"))


def in_place(output: Path) -> int:
    return len(list(output.glob("shard-*[0-9].jsonl")))


async def test_several_workers_write_the_output_of_one_run(jobs_pool: Pool, tmp_path: Path, wanted: Wanted) -> None:
    source, expected = wanted
    output = tmp_path / "out"
    assert submit(jobs_pool, source, output) == {"jobs": SHARDS, "there": 0, "done": 0, "shards": SHARDS}
    assert submit(jobs_pool, source, output) == {"jobs": 0, "there": SHARDS, "done": 0, "shards": SHARDS}
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:  # Keys of jobs have no TTL and stay.
        assert {client.ttl(key) for key in (QUEUE, *client.scan_iter(match=f"{job_key_prefix}*"))} == {-1}
    assert status(jobs_pool, output) == {"shards": SHARDS, "done": 0, "queued": SHARDS, "under_way": 0, "failed": {}}
    workers = [worker(jobs_pool, "--burst") for _ in range(2)]
    assert [await asyncio.to_thread(process.wait) for process in workers] == [0, 0], workers[0].text
    assert content(output) == expected
    assert status(jobs_pool, output)["done"] == SHARDS
    assert submit(jobs_pool, source, output) == {"jobs": 0, "there": 0, "done": SHARDS, "shards": SHARDS}


async def test_a_killed_worker_does_not_change_the_output(jobs_pool: Pool, gate: Gate, submitted: Submitted) -> None:
    _, output, expected = submitted
    gate.shut()
    for steps in (0, 50):  # Number of prompts computed before the victim is killed.
        victim = worker(jobs_pool, "--jobs", "2")
        gate.let(steps)
        if steps:
            await asyncio.to_thread(until, lambda: in_place(output), "a shard is in place")
        await asyncio.to_thread(until, lambda: status(jobs_pool, output)["under_way"] == 2, "two jobs are in progress")
        victim.end()
    gate.open()
    last = worker(jobs_pool)
    await asyncio.to_thread(until, lambda: status(jobs_pool, output)["done"] == SHARDS, "all shards are in place")
    await asyncio.to_thread(until, lambda: lmpool.batch.open(output).is_finished, "the run is summed up")
    last.end()
    assert {name: data for name, data in content(output).items() if not name.endswith(".tmp")} == expected


async def test_a_killed_worker_does_not_change_the_output_in_a_bucket(
    jobs_pool: Pool, tmp_path: Path, gate: Gate, wanted: Wanted, bucket: TestBucket
) -> None:
    path, expected = wanted
    source, output = bucket.put("in.jsonl", path.read_bytes()), f"{bucket.url}/out"
    assert submit(jobs_pool, source, output)["jobs"] == SHARDS
    gate.shut()
    other, victim = worker(jobs_pool, "--burst", "--jobs", "2"), worker(jobs_pool, "--jobs", "2")
    gate.let(50)  # Compute 50 lines: more than four shards of ten lines, fewer than eight.
    await asyncio.to_thread(until, lambda: bucket.shards("out") >= 1, "a shard is done")
    client = redis.Redis.from_url(jobs_pool.url, **PATIENCE)
    marks = f"{in_progress_key_prefix}*"
    await asyncio.to_thread(until, lambda: len(list(client.scan_iter(match=marks))) == 4, "four jobs are in progress")
    victim.end()
    gate.open()
    client.close()
    assert await asyncio.to_thread(other.wait) == 0, other.text
    assert status(jobs_pool, output)["done"] == SHARDS
    assert bucket.content("out") == expected


async def test_shards_of_a_worker_killed_while_uploading_are_computed_again(
    jobs_pool: Pool, wanted: Wanted, bucket: TestBucket
) -> None:
    """The bucket has whole and cut shards without a note or with a cut note. A cut shard with a whole note was another
    worker's shard, which the killed worker had begun to overwrite.
    """
    path, expected = wanted
    source, output = bucket.put("in.jsonl", path.read_bytes()), f"{bucket.url}/out"
    assert submit(jobs_pool, source, output)["jobs"] == SHARDS
    manifest = await asyncio.to_thread(open_folder(output).read_manifest)
    assert manifest is not None
    noted = {"number": 4, "texts": 10, "errors": 0, "bytes": len(expected["shard-00004.jsonl"]), "digest": "0" * 32}
    bucket.put("out/done/00003.json", b'{"run":')
    bucket.put("out/done/00004.json", json.dumps({"run": manifest.run, "shard": noted}).encode())
    for number, most in ((1, None), (2, 100), (3, None), (4, 100)):
        name = f"shard-{number:05}.jsonl"
        bucket.put(f"out/{name}", expected[name][:most])
    await run_until_empty(jobs_pool)
    assert status(jobs_pool, output)["done"] == SHARDS
    assert bucket.content("out") == expected


async def test_jobs_of_a_removed_folder_end_without_an_error_and_can_be_cancelled(
    jobs_pool: Pool, tmp_path: Path, submitted: Submitted
) -> None:
    source, output, expected = submitted
    shutil.rmtree(output)
    assert batch(jobs_pool, "cancel", tmp_path / "other") == "0 jobs cancelled\n"
    assert batch(jobs_pool, "cancel", output) == f"{SHARDS} jobs cancelled\n"
    submit(jobs_pool, source, output)
    shutil.rmtree(output)
    process = await run_until_empty(jobs_pool)
    assert "Error" not in process.text
    assert process.text.count("the output is gone") == SHARDS
    assert not output.exists()
    assert submit(jobs_pool, source, output)["jobs"] == SHARDS
    await run_until_empty(jobs_pool)
    assert content(output) == expected


async def test_a_worker_killed_as_it_starts_a_job_holds_the_job_for_one_lease(
    own_server: EmbeddedServer, tmp_path: Path, job: Job
) -> None:
    """Before a job begins, arq would mark it for a day, its max duration; lmpool's mark lasts one lease."""
    worker = await worker_in_process(own_server.url, tmp_path)
    await worker.start_jobs([b"a"])
    assert 0 < await worker.pool.pttl(f"{in_progress_key_prefix}a") <= 60_000
    job.may_end.set()
    await asyncio.gather(*worker.tasks.values())
    await worker.close()


async def test_cancelled_jobs_do_not_run_and_can_be_queued_again(jobs_pool: Pool, submitted: Submitted) -> None:
    source, output, expected = submitted
    assert batch(jobs_pool, "cancel", output) == f"{SHARDS} jobs cancelled\n"
    assert status(jobs_pool, output)["queued"] == 0  # `status` must not report cancelled jobs as lost.
    await run_until_empty(jobs_pool)
    assert in_place(output) == 0
    assert submit(jobs_pool, source, output)["jobs"] == SHARDS
    await run_until_empty(jobs_pool)
    assert content(output) == expected


async def test_jobs_of_a_killed_worker_run_if_they_are_submitted_after_their_cancellation(
    jobs_pool: Pool, submitted: Submitted
) -> None:
    source, output, expected = submitted
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
        marks = [in_progress_key_prefix.encode() + name for name in client.zrange(QUEUE, 0, -1)]
        client.mset(dict.fromkeys(marks, "1"))  # A killed worker leaves these keys.
        assert batch(jobs_pool, "cancel", output) == f"{SHARDS} jobs cancelled\n"
        client.delete(*marks)
    assert submit(jobs_pool, source, output)["there"] == SHARDS
    await run_until_empty(jobs_pool)
    assert content(output) == expected


@pytest.mark.parametrize("forget", ["FLUSHALL", "restart"])
async def test_status_queues_all_jobs_again_if_the_server_lost_its_data(
    jobs_pool: Pool, own_server: EmbeddedServer, submitted: Submitted, forget: str
) -> None:
    _, output, expected = submitted
    if forget == "FLUSHALL":
        with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
            client.flushall()
    else:
        await asyncio.to_thread(own_server.stop)
        await asyncio.to_thread(own_server.start)
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
        assert client.zcard(QUEUE) == 0
    ended = await asyncio.to_thread(run_lmpool, "batch", "status", str(output), "--redis", jobs_pool.url)
    assert (ended.returncode, ended.stderr) == (0, f"lmpool: the server lost {SHARDS} jobs: queued again\n")
    assert ended.stdout == f"0 of {SHARDS} shards done, 0 in progress, {SHARDS} queued\n"
    assert status(jobs_pool, output) == {"shards": SHARDS, "done": 0, "queued": SHARDS, "under_way": 0, "failed": {}}
    await run_until_empty(jobs_pool)
    assert status(jobs_pool, output)["done"] == SHARDS
    assert content(output) == expected
    assert lmpool.batch.open(output).is_finished


async def test_status_queues_single_lost_jobs_again(jobs_pool: Pool, submitted: Submitted) -> None:
    source, output, expected = submitted
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
        names = [name.decode() for name in client.zrange(QUEUE, 0, -1)]
        # The server lost the definition of the first job, and the entries in the queue of all other jobs.
        client.delete(job_key_prefix + names[0])
        client.zrem(QUEUE, *names[1:])
        await run_until_empty(jobs_pool)
        client.zadd(QUEUE, {names[1]: 1})
        client.delete(job_key_prefix + names[1])
        show_status = partial(run_lmpool, "batch", "status", str(output), "--redis", jobs_pool.url)
        whole = source.read_bytes()
        source.write_bytes(whole + b"\n")
        ended = await asyncio.to_thread(show_status)
        assert f"lost {SHARDS} jobs, which cannot be queued again: {source} has changed since" in ended.stderr
        assert ended.stdout == f"0 of {SHARDS} shards done, 0 in progress, 0 queued\n"
        source.write_bytes(whole)
        ended = await asyncio.to_thread(show_status)
        assert f"the server lost {SHARDS} jobs: queued again" in ended.stderr
        assert ended.stdout == f"0 of {SHARDS} shards done, 0 in progress, {SHARDS} queued\n"
        ended = await asyncio.to_thread(show_status)
        assert (ended.stdout, ended.stderr) == (f"0 of {SHARDS} shards done, 0 in progress, {SHARDS} queued\n", "")
    await run_until_empty(jobs_pool)
    assert content(output) == expected


async def test_no_file_contains_a_secret_of_the_inputs_url(jobs_pool: Pool, wanted: Wanted, bucket: TestBucket) -> None:
    """Lost jobs of an input with a secret URL cannot be queued again, because no file contains the URL."""
    path, _ = wanted
    source, output = bucket.presigned("in.jsonl", path.read_bytes()), path.parent / "out"
    submit(jobs_pool, source, output)
    assert b"Signature" not in b"".join(file.read_bytes() for file in output.iterdir())
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
        client.delete(QUEUE, *client.scan_iter(match=f"{job_key_prefix}*"))
    ended = await asyncio.to_thread(run_lmpool, "batch", "status", str(output), "--redis", jobs_pool.url)
    assert f"lost {SHARDS} jobs, which cannot be queued again: the URL of the input has a secret in it" in ended.stderr


class Job:
    """Stand-in for the work of a job: waits, and counts how often it began and how many calls ran concurrently."""

    def __init__(self) -> None:
        self.begun = self.running = self.most = 0
        self.may_end = asyncio.Event()

    async def __call__(self, context: dict[str, Any], job: ShardJob) -> dict[str, Any]:
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may_end.wait()
        self.running -= 1
        return {"done": [job.shard]}

    async def has_begun(self, times: int) -> bool:
        return self.begun >= times


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Replace the work of a job by a stand-in that waits."""
    made = Job()
    monkeypatch.setattr("lmpool.batch.jobs._answer", made)
    return made


async def worker_in_process(url: str, folder: Path) -> BatchWorker:
    """Make a worker of jobs in this process, and queue one job, "a"."""
    made = BatchWorker(**worker_options(url, files=folder, lease_s=60, jobs=1), handle_signals=False, poll_delay=0.01)
    made.ctx["redis"] = made.pool
    await queue(made, "a", folder)
    return made


def shard_job(source: str, output: str) -> ShardJob:
    return ShardJob(source, BatchSettings("scores"), PoolOfJobs(), output, {}, 0)


async def queue(worker: BatchWorker, name: str, folder: Path) -> None:
    given = shard_job(str(folder / "in"), str(folder / "out"))
    assert await worker.pool.enqueue_job("answer_shard", msgspec.to_builtins(given), _job_id=name) is not None


async def test_one_worker_never_runs_a_job_twice_concurrently(
    own_server: EmbeddedServer, tmp_path: Path, job: Job
) -> None:
    """The server may evict the mark of a job in progress, because the mark has a TTL."""
    worker = await worker_in_process(own_server.url, tmp_path)
    worker.max_jobs = 2
    worker.sem = asyncio.BoundedSemaphore(3)
    await worker.start_jobs([b"a"])
    first = list(worker.tasks.values())
    await until_async(partial(job.has_begun, 1), "the job has begun")
    assert await worker.pool.delete(f"{in_progress_key_prefix}a") == 1
    await worker.start_jobs([b"a"])
    assert list(worker.tasks.values()) == first
    job.may_end.set()
    await asyncio.gather(*first)
    assert job.begun == 1
    await worker.close()


async def test_a_worker_continues_when_its_server_returns(
    short_dir: Path, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    server = EmbeddedServer(memory_bytes=1 << 26, folder=short_dir / "s", appendonly=True)
    server.start()
    try:
        worker = await worker_in_process(server.url, tmp_path)
        running = asyncio.create_task(worker.async_run())
        # Stop the server first while a job runs, then while the worker is idle.
        for number, name in enumerate(("b", "c"), 1):
            await until_async(partial(job.has_begun, number), "the job has begun")
            if name == "c":
                job.may_end.set()
                await until_async(lambda: asyncio.sleep(0, worker.jobs_complete == 2), "the jobs have ended")
            caplog.clear()
            await asyncio.to_thread(server.stop)
            await until_async(lambda: asyncio.sleep(0, "trying again until it answers" in caplog.text), "it is logged")
            assert not running.done()
            job.may_end.set()
            await until_async(lambda: asyncio.sleep(0, job.running == 0), "the job has ended")
            await asyncio.to_thread(server.start)
            await queue(worker, name, tmp_path)
        await until_async(partial(job.has_begun, 3), "the last job has begun")
        assert not running.done()
        await asyncio.to_thread(server.stop)
        # The worker must also end while the server is stopped.
        await worker.close()
        await asyncio.wait([running], timeout=DEADLINE_S)
        assert running.done()
    finally:
        server.stop()


async def test_a_slot_is_released_if_the_server_fails_as_a_job_starts(
    own_server: EmbeddedServer, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await worker_in_process(own_server.url, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(worker.pool, "pipeline", fail)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                await worker.start_jobs([b"a"])
    job.may_end.set()
    await worker.start_jobs([b"a"])
    await asyncio.gather(*worker.tasks.values())
    assert job.begun == 1
    await worker.close()


def fail(*_: Any, **__: Any) -> None:
    raise redis.ConnectionError("the server is stopped")


async def test_a_job_with_other_files_or_a_url_that_runs_code_fails(
    own_server: EmbeddedServer, tmp_path: Path, job: Job
) -> None:
    worker = await worker_in_process(own_server.url, tmp_path / "root")
    for number, location in enumerate((str(tmp_path / "in"), "reference::data://x:application/json;base64,e30=")):
        for given in (shard_job(location, "s3://b/out"), shard_job("s3://b/in", location)):
            name = f"{number}-{given.source == location}"
            await worker.pool.enqueue_job("answer_shard", msgspec.to_builtins(given), _job_id=name)
            await worker.start_jobs([name.encode()])
            await asyncio.gather(*worker.tasks.values())
            worker.tasks.clear()
            failed = deserialize_result(await worker.pool.get(result_key_prefix + name), deserializer=msgpack.unpackb)
            assert not failed.success
            assert ("is not below" if number == 0 else ":: in them") in failed.result
    assert job.begun == 0
    await worker.close()


async def test_the_status_shows_why_a_job_failed(jobs_pool: Pool, tmp_path: Path, wanted: Wanted) -> None:
    source, _ = wanted
    submit(jobs_pool, source, tmp_path / "out")
    whole = source.read_bytes()
    digest = digest_of_file(source)
    for other in (whole + b"\n", whole[::-1]):
        source.write_bytes(other)
        await run_until_empty(jobs_pool)
        states = status(jobs_pool, tmp_path / "out")
        assert len(states["failed"]) == SHARDS
        assert f"has the digest {digest_of_file(source)} and had {digest} when it was" in states["failed"]["0"]
        source.write_bytes(whole)
        assert submit(jobs_pool, source, tmp_path / "out")["jobs"] == SHARDS


async def test_a_shard_that_is_done_after_the_caller_listed_it_has_not_failed(
    jobs_pool: Pool, submitted: Submitted
) -> None:
    _, output, _ = submitted
    folder, listed = open_folder(str(output)), range(SHARDS)
    await run_until_empty(jobs_pool)
    manifest = folder.manifest()
    states = {"queued": 0, "under_way": 0, "failed": {}}
    assert await find_jobs(jobs_pool.url, folder, manifest, listed) == (states, "")
    (output / manifest.shard_name(5)).unlink()
    states["failed"] = {5: "it is gone"}
    assert await find_jobs(jobs_pool.url, folder, manifest, listed) == (states, "")


async def test_arqs_own_command_runs_jobs_and_no_job_is_a_pickle(
    jobs_pool: Pool, tmp_path: Path, wanted: Wanted
) -> None:
    source, expected = wanted
    submit(jobs_pool, source, tmp_path / "out")
    client = redis.Redis.from_url(jobs_pool.url, **PATIENCE)
    keys = list(client.scan_iter(match=f"{job_key_prefix}*"))
    assert len(keys) == SHARDS
    assert all(msgpack.unpackb(client.get(key), strict_map_key=False)["f"] == "answer_shard" for key in keys)
    command = [sys.executable, "-m", "arq", "lmpool.batch.WorkerSettings", "--burst"]
    ended = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "LMPOOL_REDIS_URL": jobs_pool.url, FILES_VARIABLE: str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert content(tmp_path / "out") == expected
    client.close()


def test_the_user_batch_can_submit_and_run_jobs_and_other_users_cannot(short_dir: Path, tmp_path: Path) -> None:
    """Of the Redis users of docker/redis, only `batch` may read and write jobs, and it may run their workers."""
    source, output = write_texts(tmp_path / "in.jsonl", draw_texts(30)), tmp_path / "out"
    with SecureServer(short_dir, tls=False).running() as server:
        pools = {role: Pool(server.url(role), "lmpool", tmp_path) for role in ("worker", "batch", "producer")}
        try:
            pools["worker"].start()
            assert submit(pools["batch"], source, output)["jobs"] == 3
            assert batch(pools["batch"], "cancel", output) == "3 jobs cancelled\n"
            assert submit(pools["batch"], source, output)["jobs"] == 3
            for name in ("arq:job:", "arq:in-progress:", "arq:retry:", "arq:result:", "arq:abort"):
                with server.client("producer") as client, pytest.raises(redis.exceptions.NoPermissionError):
                    client.exists(name)
            ended = worker(pools["batch"], "--burst")
            assert ended.wait() == 0, ended.text
            assert status(pools["batch"], output)["done"] == 3
            assert not (refused := [line for line in server.refusals() if "batch" in line.partition(":")[0]]), refused
            refused_worker = worker(pools["producer"])
            assert refused_worker.wait() == 2
            assert "refuses a command that this user may not run" in refused_worker.text
            assert "Traceback" not in refused_worker.text
        finally:
            pools["worker"].end()


async def test_a_worker_reports_its_health(jobs_pool: Pool) -> None:
    process = worker(jobs_pool)
    with redis.Redis.from_url(jobs_pool.url, **PATIENCE) as client:
        key = QUEUE + health_check_key_suffix
        assert b"j_complete=0" in await asyncio.to_thread(until, lambda: client.get(key), "the report is there")
    process.end()


def test_a_cluster_is_refused() -> None:
    with pytest.raises(SettingsError, match="arq cannot use a cluster"):
        connect(Server("redis+cluster://127.0.0.1:1"))


async def test_jobs_of_another_run_do_not_change_a_folder(jobs_pool: Pool, submitted: Submitted) -> None:
    source, output, _ = submitted
    options = ("--what", "topk:5", *OPTIONS[2:], "--prefix", jobs_pool.prefix)
    batch(jobs_pool, "submit", source, output, *options)
    await run_until_empty(jobs_pool)
    assert lmpool.batch.open(output).manifest.options.what == "topk:5"
    for path in output.glob("shard-*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            assert {len(row) for row in json.loads(line)["top_ids"]} == {5}


async def test_jobs_compute_nothing_if_another_run_began_before_they_had_the_lock(
    jobs_pool: Pool, tmp_path: Path, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output, _ = submitted
    async with jobs_pool.producer() as producer:

        async def run_another(*_: Any) -> Producer:
            """Run another command to its end after the first job read the manifest."""
            await run(producer, source, output, "topk:5")
            return producer

        monkeypatch.setattr("lmpool.batch.jobs._producer_of", run_another)
        monkeypatch.setattr("lmpool.batch.jobs.Run", fail)
        monkeypatch.setattr("lmpool.batch.jobs._DEFER_S", 0)  # Try the first job again at once.
        options = worker_options(jobs_pool.url, files=tmp_path, jobs=1)
        worker = BatchWorker(**options, burst=True, handle_signals=False, poll_delay=0.01)
        await worker.main()
        await worker.close()
    assert (worker.jobs_complete, worker.jobs_retried, worker.jobs_failed) == (SHARDS, 1, 0)
    batch = lmpool.batch.open(output)
    assert (batch.is_finished, batch.manifest.options.what) == (True, "topk:5")


async def test_jobs_in_progress_can_be_cancelled_and_others_queued(
    jobs_pool: Pool, submitted: Submitted, gate: Gate
) -> None:
    source, output, expected = submitted
    gate.shut()
    with ExitStack() as ended:

        def start() -> None:  # A long lease: a late renewal would give a shard to the other worker.
            ended.callback(worker(jobs_pool, "--jobs", "1", "--lease-s", "60").end)

        start()
        gate.let(15)  # Compute one shard of ten lines, and half of the next shard.
        await asyncio.to_thread(until, gate.is_used_up, "these lines are computed")
        assert in_place(output) == 1
        start()
        await asyncio.to_thread(until, lambda: status(jobs_pool, output)["under_way"] == 2, "two jobs are in progress")
        # Submit again while jobs are in progress: all jobs must count as queued or done.
        counts = submit(jobs_pool, source, output)
        assert counts["there"] + counts["done"] == SHARDS
        left = SHARDS - status(jobs_pool, output)["done"]
        assert batch(jobs_pool, "cancel", output) == f"{left} jobs cancelled\n"
        await asyncio.to_thread(
            until, lambda: status(jobs_pool, output)["under_way"] == 0, "the jobs in progress have stopped"
        )
        gate.open()
        failed = status(jobs_pool, output)["failed"]
        assert set(failed.values()) <= {"cancelled"}
        assert submit(jobs_pool, source, output)["jobs"] == left
        await asyncio.to_thread(until, lambda: status(jobs_pool, output)["done"] == SHARDS, "all shards are in place")
        await asyncio.to_thread(until, lambda: lmpool.batch.open(output).is_finished, "the run is summed up")
    assert {name: data for name, data in content(output).items() if not name.endswith(".tmp")} == expected
