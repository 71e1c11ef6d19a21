"""`lmpool queue`: show and clear the queue of a model; clients are notified, and no other prompt is lost."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from lmpool.admin import queue as queue_module
from lmpool.admin.queue import Cleared, clear_queue
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, QueueCleared
from lmpool.producer.cli.queues import queue_app
from lmpool.protocol.keys import GROUP, ModelKeys
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate, until_full
from tests.support.pool import DEADLINE_S, Pool, V, lmpool_command, until_async

BATCH = 4


def queue(pool: Pool, *arguments: str) -> tuple[str, str]:
    """Run `lmpool queue` in this process; return its output and its error."""
    ended = CliRunner().invoke(queue_app, [*arguments, "--redis", pool.url, "--prefix", pool.prefix])
    assert ended.exception is None or isinstance(ended.exception, LMPoolError), ended.output
    return ended.stdout, str(ended.exception or "")


async def clear(pool: Pool, model: str = "syn") -> dict[str, int]:
    """Run `lmpool queue clear`; return its JSON."""
    printed, error = await asyncio.to_thread(queue, pool, "clear", model, "--yes", "--json")
    assert not error
    counts: dict[str, int] = json.loads(printed)
    return counts


async def until_queued(pool: Pool, count: int) -> None:
    async def is_queued() -> bool:
        return pool.jobs() == count

    await until_async(is_queued, f"{count} prompts are queued")


def unattended(pool: Pool) -> None:
    """Kill a worker with a long lease: the model still counts as served, but no prompt is computed."""
    pool.start("--lease-s", 600, "--max-batch", BATCH).end()


def leftovers(pool: Pool) -> list[str]:
    """Return the keys that must not remain when the queue is empty."""
    parts = (":waiting:", ":backlog", ":virtual_time")
    return [name for name in pool.names("*") if any(part in name for part in parts)]


async def test_clients_of_a_cleared_queue_are_notified_and_can_retry(pool: Pool) -> None:
    unattended(pool)
    async with pool.producer("syn") as first, pool.producer("syn") as second:
        requests = [asyncio.ensure_future(first.logprobs([number])) for number in range(500)]
        joined = [asyncio.ensure_future(second.logprobs([number])) for number in range(490, 510)]
        await until_queued(pool, 510)
        assert int(pool.redis.zcard(pool.keys.model("syn").backlog)) > 0
        assert await clear(pool) == {"removed": 510, "held": 0, "queued": 0}
        for error in await asyncio.gather(*requests, *joined, return_exceptions=True):
            assert isinstance(error, QueueCleared)
            assert "an operator has cleared the queue of 'syn'" in str(error)
        assert pool.jobs() == 0
        assert not leftovers(pool)
        assert await clear(pool) == {"removed": 0, "held": 0, "queued": 0}
        await asyncio.to_thread(pool.start, "--lease-s", 600)
        rows = await asyncio.gather(*(producer.logprobs([7]) for producer in (first, second)))
        assert all(np.array_equal(row, synthetic_row([7], vocab_size=V)) for row in rows)


async def test_prompts_that_a_worker_holds_are_computed(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start("--lease-s", 600, "--max-batch", BATCH, command=gate.command)
    async with pool.producer("syn") as producer:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(100)]
        await until_queued(pool, 100)
        await until_full(pool, BATCH)
        counts = await clear(pool)
        assert counts["held"] == pool.held() == pool.jobs() < 100
        gate.open()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        rows = {number: row for number, row in enumerate(ended) if not isinstance(row, BaseException)}
        assert len(rows) == 100 - counts["removed"]
        assert all(np.array_equal(row, synthetic_row([number], vocab_size=V)) for number, row in rows.items())
        assert all(isinstance(error, QueueCleared) for error in ended if isinstance(error, BaseException))
        await until_queued(pool, 0)
        assert not leftovers(pool)


async def test_prompts_of_a_silent_worker_count_as_waiting(pool: Pool) -> None:
    worker = pool.start("--lease-s", 0.5, "--max-batch", BATCH, "--step-ms", 600_000)
    async with pool.producer("syn", when_absent="wait") as producer:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(BATCH)]

        async def is_held() -> bool:
            return pool.held() == BATCH

        await until_async(is_held, "the worker holds the prompts")
        worker.end()

        async def is_silent() -> bool:
            pending: Any = pool.redis.xpending_range(pool.keys.model("syn").jobs, GROUP, "-", "+", 100)
            return all(entry["time_since_delivered"] > 500 for entry in pending)

        await until_async(is_silent, "the worker has been silent for a lease")
        assert await clear(pool) == {"removed": BATCH, "held": 0, "queued": 0}
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, QueueCleared) for error in ended)
        assert pool.jobs() == pool.held() == 0


async def test_clearing_a_busy_queue_loses_no_prompt(pool: Pool) -> None:
    for _ in range(2):
        await asyncio.to_thread(pool.start, "--max-batch", BATCH, "--step-ms", 2)
    outcomes: list[str] = []
    client = Server(pool.url).client()
    async with pool.producer("syn", cache_bytes=0) as first, pool.producer("syn", cache_bytes=0) as second:

        async def submit(number: int) -> None:
            producer, ids = (first, second)[number % 2], [number // 2, 0]
            while True:
                try:
                    row = await producer.logprobs(ids)
                except QueueCleared:
                    outcomes.append("cleared")
                else:
                    assert np.array_equal(row, synthetic_row(ids, vocab_size=V))
                    if len(outcomes) >= 50:
                        return
                    ids = [ids[0], (ids[1] + 1) % V]

        requests = [asyncio.ensure_future(submit(number)) for number in range(800)]
        cleared = Cleared(0, 0, 0)
        while not cleared.removed or len(outcomes) < 50:
            cleared = await clear_queue(client, [pool.keys.model("syn")], "syn", lease_s=15)
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*requests), DEADLINE_S)
    await client.aclose()
    assert "cleared" in outcomes
    await until_queued(pool, 0)
    assert not leftovers(pool)


async def test_clear_reports_prompts_that_were_submitted_during_the_call(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unattended(pool)
    keys = pool.keys.model("syn")
    listed = queue_module._list_prompts

    def fill() -> None:
        for _ in range(7):
            pool.redis.xadd(keys.jobs, {"m": b"x"})

    async def refilled(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
        prompts = await listed(redis, keys)
        fill()
        return prompts

    monkeypatch.setattr(queue_module, "_list_prompts", refilled)
    fill()
    client = Server(pool.url).client()
    cleared = await clear_queue(client, [keys], "syn", lease_s=15)
    await client.aclose()
    assert cleared == Cleared(removed=21, held=0, queued=7)
    assert pool.jobs() == 7
    monkeypatch.undo()
    assert await clear(pool) == {"removed": 7, "held": 0, "queued": 0}


async def test_a_long_queue_is_cleared_in_many_short_calls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    unattended(pool)
    keys, count = pool.keys.model("syn"), 20_000
    reply = keys.reply("client")
    pipe = pool.redis.pipeline(transaction=False)
    for number in range(count):
        digest = number.to_bytes(16, "big")
        pipe.zadd(keys.backlog, {digest: number})
        pipe.hset(keys.backlog_jobs, digest, b"%d 60000 " % number + b"x" * 400)
        pipe.hset(keys.waiting + digest, mapping={"job": "later", reply: ""})
    pipe.zadd(keys.virtual_time, {b"": 0, reply: count})
    await asyncio.to_thread(pipe.execute)
    pool.redis.slowlog_reset()
    assert (await clear(pool))["removed"] == count
    assert not leftovers(pool)
    replies: Any = pool.redis.xrange(reply)
    digests = b"".join(fields[b"d"] for _, fields in replies)
    assert len(digests) == 16 * count
    assert 400 <= len(replies) <= 800, "each call notifies for many prompts, but not for all"


async def test_a_queue_with_hostile_entries_can_be_cleared(pool: Pool) -> None:
    unattended(pool)
    keys = pool.keys.model("syn")
    pool.redis.xadd(keys.jobs, {"m": b"\xc1"})
    pool.redis.xadd(keys.jobs, {"x": b"y"})
    pool.redis.zadd(keys.backlog, {b"short": 1, b"d" * 16: 2})
    pool.redis.set(keys.waiting + b"d" * 16, "no hash")
    pool.redis.hset(keys.waiting + b"\0" * 16, mapping={"job": "later", b"lmpool:elsewhere": ""})
    pool.redis.zadd(keys.backlog, {b"\0" * 16: 3})
    assert (await clear(pool))["removed"] == 5
    assert pool.jobs() == 0
    assert not pool.redis.exists("lmpool:elsewhere")


def test_a_terminal_gets_a_question_and_other_input_needs_yes(pool: Pool) -> None:
    unattended(pool)
    options = ["--redis", pool.url, "--prefix", pool.prefix]
    command = [*lmpool_command(), "queue", "clear", "syn", *options]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2
    assert "confirm with --yes" in done.stderr
    pool.redis.xadd(pool.keys.model("syn").jobs, {"m": b"x"})
    for answer, left in (("n", 1), ("y", 0)):
        controlling, terminal = pty.openpty()
        process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.write(controlling, f"{answer}\n".encode())
        printed, _ = process.communicate(timeout=DEADLINE_S)
        os.close(controlling)
        os.close(terminal)
        assert process.returncode == (130 if left else 0)
        assert pool.jobs() == left
    assert "removed 1 prompts from the queue of 'syn'" in printed


def test_an_empty_queue_has_no_oldest_prompt(pool: Pool) -> None:
    pool.start()
    assert queue(pool, "show", "syn")[0].startswith("0 prompts: workers hold 0")


async def test_show_and_clear_include_lanes(pool: Pool) -> None:
    workers = 2
    for _ in range(workers):
        unattended(pool)
    async with pool.producer("syn") as producer:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(100)]
        await until_queued(pool, 100)
        counts = json.loads((await asyncio.to_thread(queue, pool, "show", "syn", "--json"))[0])
        lanes = counts["lanes"]
        keys = pool.keys.model("syn")
        assert lanes == {worker: int(pool.redis.xlen(keys.lane(worker))) for worker in lanes}
        assert len(lanes) == workers
        in_lanes, longest = sum(lanes.values()), max(lanes.values())
        assert 0 < longest < in_lanes
        assert in_lanes + int(pool.redis.xlen(keys.jobs)) + counts["backlog"] == counts["queued"] == 100
        printed, _ = await asyncio.to_thread(queue, pool, "show", "syn")
        assert f"; {in_lanes} are in lanes, {longest} of them in the longest" in printed
        assert await clear(pool) == {"removed": 100, "held": 0, "queued": 0}
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, QueueCleared) for error in ended)
    assert pool.jobs() == 0
    assert not leftovers(pool)
    printed, _ = await asyncio.to_thread(queue, pool, "show", "syn")
    assert "lanes" not in printed
    assert json.loads((await asyncio.to_thread(queue, pool, "show", "syn", "--json"))[0])["lanes"] == dict.fromkeys(
        lanes, 0
    )


async def test_prompts_that_workers_hold_in_their_lanes_are_computed(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    options = ("--lease-s", 600, "--max-batch", BATCH)
    for _ in range(2):
        await asyncio.to_thread(lambda: pool.start(*options, command=gate.command))
    async with pool.producer("syn") as producer:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(100)]
        await until_queued(pool, 100)
        await until_full(pool, 2 * BATCH)
        counts = await clear(pool)
        assert counts["held"] == pool.held() == pool.jobs() == 100 - counts["removed"]
        streams = [stream for stream in pool.streams() if pool.redis.xlen(stream)]
        assert set(streams) >= set(pool.streams()[1:]), "each worker holds prompts of its lane"
        gate.open()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        rows = {number: row for number, row in enumerate(ended) if not isinstance(row, BaseException)}
        assert len(rows) == counts["held"]
        assert all(np.array_equal(row, synthetic_row([number], vocab_size=V)) for number, row in rows.items())
        await until_queued(pool, 0)
        assert not leftovers(pool)


async def test_show_lists_waiting_prompts_by_client(pool: Pool) -> None:
    unattended(pool)
    async with pool.producer("syn") as producer, pool.producer("syn") as other:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(100)]
        await until_queued(pool, 100)
        requests += [asyncio.ensure_future(other.logprobs([number])) for number in range(100, 110)]
        await until_queued(pool, 110)

        counts: dict[str, Any] = {}

        async def has_given_way() -> bool:
            counts.update(json.loads((await asyncio.to_thread(queue, pool, "show", "syn", "--json"))[0]))
            return len(counts["clients"]) == 2

        await until_async(has_given_way, "both clients have prompts in the backlog")
        assert (counts["queued"], counts["held"]) == (110, 0)
        assert counts["backlog"] == 110 - int(pool.redis.xlen(pool.keys.model("syn").jobs))
        printed, _ = await asyncio.to_thread(queue, pool, "show", "syn")
        assert "110 prompts, the oldest of " in printed
        assert all(name in printed for name in counts["clients"])
        await asyncio.to_thread(pool.start, "--lease-s", 600)
        await asyncio.gather(*requests)
    for command in (["show", "nope"], ["clear", "nope", "--yes"]):
        printed, _ = await asyncio.to_thread(queue, pool, *command)
        assert "; the model 'nope' is not served; served are: syn" in printed


def test_show_without_a_model_shows_all_served_models(pool: Pool) -> None:
    assert queue(pool, "show") == ("no model is served\n", "")
    for name in ("one", "two"):
        pool.start("--lease-s", 600, model=name)
    printed, _ = queue(pool, "show")
    assert [line.partition(": 0 prompts: ")[0] for line in printed.splitlines()] == ["one", "two"]
    counts = json.loads(queue(pool, "show", "--json")[0])
    assert list(counts) == ["one", "two"]
    assert counts["one"] == json.loads(queue(pool, "show", "one", "--json")[0])


async def test_show_counts_prompts_of_bulk_clients(pool: Pool) -> None:
    unattended(pool)
    async with pool.producer("syn", priority="bulk") as producer, pool.producer("syn") as other:
        requests = [asyncio.ensure_future(producer.logprobs([number])) for number in range(100)]
        await until_queued(pool, 100)
        # Another client submits: before this, all prompts of the bulk client were in the stream.
        requests.append(asyncio.ensure_future(other.logprobs([100])))
        await until_queued(pool, 101)
        counts = json.loads((await asyncio.to_thread(queue, pool, "show", "syn", "--json"))[0])
        ((name, behind),) = counts["clients"].items()
        assert name.startswith("bulk:")
        assert behind == counts["bulk"] == counts["backlog"] > 0
        printed, _ = await asyncio.to_thread(queue, pool, "show", "syn")
        assert f"{behind} wait behind them, {behind} of them of bulk clients" in printed
        await asyncio.to_thread(pool.start, "--lease-s", 600)
        await asyncio.gather(*requests)
