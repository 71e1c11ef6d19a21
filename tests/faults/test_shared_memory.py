"""Rows in shared memory are exact on every host, and a lost worker or socket loses no row."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lmpool.producer import Producer
from lmpool.rows import shared_memory
from lmpool.rows.segment import SegmentListener
from lmpool.rows.shared_memory import SEALS, SegmentReader, is_reference
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import (
    DEADLINE_S,
    Pool,
    WorkerProcess,
    count_waiting,
    is_held,
    lmpool_command,
    until,
    until_async,
)

V = 2048
SLOT = 12_288
"""Bytes of a slot for one row of V float32 values, rounded up to whole pages."""
ARGUMENTS = ("--vocab-size", V, "--lease-s", 2)
PROMPTS = [[i, i + 1, 7] for i in range(60)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of segments, for this test alone."""
    with tempfile.TemporaryDirectory(dir=os.environ["LMPOOL_SHM_DIR"]) as folder:
        monkeypatch.setenv("LMPOOL_SHM_DIR", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers wait longer for a worker's segment: on a busy machine a worker may take more than 0.1 s."""
    monkeypatch.setattr(shared_memory, "_ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(shared_memory, "_ALL_ANSWER_S", DEADLINE_S)


def segments(place: Path) -> list[Path]:
    return sorted(place.glob("lmpool-*/lmpool-*"))


def start(pool: Pool, place: Path, *arguments: str | int, size: int = 1000 * SLOT, **settings: Any) -> WorkerProcess:
    """Start a worker and wait until its segment of shared memory is ready."""
    environment = {"LMPOOL_SHM_DIR": str(place)}
    worker = pool.start(*ARGUMENTS, "--shm-bytes", size, *arguments, environment=environment, **settings)
    # Wait for this message: before it the socket may exist already, but rows go through Redis.
    worker.until_says("for clients on this machine")
    return worker


def row_of(prompt: list[int]) -> np.ndarray[Any, Any]:
    return synthetic_row(prompt, vocab_size=V)


async def ask(producer: Producer, prompts: list[list[int]] = PROMPTS) -> None:
    """Request rows and compare every value."""
    for prompt, row in zip(prompts, await asyncio.gather(*map(producer.logprobs, prompts)), strict=True):
        assert row.tobytes() == row_of(prompt).tobytes()


def stored(pool: Pool) -> list[bytes]:
    """Return the values in Redis under the keys of rows."""
    keys = list(pool.redis.scan_iter(match=f"{pool.prefix}:row:*", count=1000))
    values = [pool.redis.get(key) for key in keys]
    return [value for value in values if isinstance(value, bytes)]


def reads(producer: Producer) -> tuple[int, int]:
    """Number of rows that a producer has read from shared memory, and number of rows that it did not find."""
    counts = producer._counters.shared
    return counts.rows, counts.lost


def remote(pool: Pool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Producer:
    """A producer with another folder for segments, like a producer on another host, which reads rows through Redis."""
    monkeypatch.setenv("LMPOOL_SHM_DIR", tempfile.mkdtemp(dir=os.environ["LMPOOL_SHM_DIR"]))
    return pool.producer(**settings, direct=False)


async def counted(pool: Pool, field: str, expected: int) -> None:
    """Wait until the sum of a field in the heartbeats of the model's workers has this value."""

    async def is_said() -> bool:
        keys = list(pool.redis.scan_iter(match=f"{pool.prefix}:worker:*"))
        values = [pool.redis.hmget(key, "model", field) for key in keys]
        return sum(int(value or 0) for model, value in values if model == b"syn") == expected

    await until_async(is_said, f"{field} is {expected}")


async def test_rows_go_through_shared_memory_and_redis_has_references_that_expire(pool: Pool, place: Path) -> None:
    start(pool, place)
    async with pool.producer() as first, pool.producer(cache_bytes=0) as second:
        await ask(first)
        assert reads(first) == (len(PROMPTS), 0)

        async def are_stored() -> bool:
            return len(stored(pool)) == len(PROMPTS)

        await until_async(are_stored, "Redis has all rows: a datagram may bring a row before the row is stored")
        values = stored(pool)
        assert all(is_reference(value) and len(value) < 100 for value in values)
        for key in pool.redis.scan_iter(match=f"{pool.prefix}:row:*"):
            assert 0 < pool.redis.pttl(key) <= 3_600_000
        await ask(second)
        await ask(second)
        assert reads(second) == (2 * len(PROMPTS), 0)
        batch = await second.batch_logprobs(PROMPTS)
        assert batch.tobytes() == np.stack([row_of(prompt) for prompt in PROMPTS]).tobytes()
        assert second.stats().cache_hits == 3 * len(PROMPTS)
    await counted(pool, "shared", len(PROMPTS))
    await counted(pool, "rows", len(PROMPTS))


async def test_a_row_that_is_used_again_is_kept(pool: Pool, place: Path) -> None:
    start(pool, place)
    async with pool.producer() as producer:
        for _ in range(4):
            await ask(producer)
            await producer.logprobs(PROMPTS[0])
        assert reads(producer) == (2 * len(PROMPTS), 0)
        stats = producer.stats()
        assert (stats.computed, stats.cache_hits) == (len(PROMPTS), len(PROMPTS))
        assert stats.local_hits == 2 * len(PROMPTS) + 4


async def test_a_cached_row_is_read_without_the_server(pool: Pool, place: Path) -> None:
    start(pool, place)
    async with pool.producer() as first, pool.producer(cache_bytes=0) as second:
        await ask(first)
        await ask(second)
        for key in list(pool.redis.scan_iter(match=f"{pool.prefix}:row:*")):
            pool.redis.unlink(key)
        await ask(second)
        assert second.stats().computed == 0


@pytest.mark.parametrize(("targets", "together"), [(None, 8), ([1, 2], 32)])
async def test_other_tasks_run_while_many_cached_rows_are_requested(
    pool: Pool, place: Path, targets: list[int] | None, together: int
) -> None:
    start(pool, place)
    prompts, turns = [[i, 9] for i in range(400)], 0
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer, prompts)

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        begun = turns
        await asyncio.gather(*(producer.logprobs(prompt, targets=targets) for prompt in prompts))
        assert turns - begun >= 400 / together
        counting.cancel()


async def test_rows_of_16_bits_go_through_shared_memory(pool: Pool, place: Path) -> None:
    start(pool, place, "--encoding", "bf16")
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        await ask(producer)
        batch = await producer.batch_logprobs(PROMPTS)
        assert batch.tobytes() == np.stack([row_of(prompt) for prompt in PROMPTS]).tobytes()
        assert reads(producer) == (3 * len(PROMPTS), 0)


async def test_a_client_on_another_host_gets_the_row_itself_without_another_forward(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(pool, place)
    async with pool.producer(cache_bytes=0) as here:
        await ask(here)
        async with remote(pool, monkeypatch, cache_bytes=0) as elsewhere:
            await ask(elsewhere)
            assert reads(elsewhere)[0] == 0
            await ask(elsewhere, [[9, 9]])
            await ask(here, [[9, 9]])
    await counted(pool, "rows", len(PROMPTS) + 1)
    assert not any(map(is_reference, stored(pool)))


async def test_clients_of_two_hosts_that_wait_for_one_prompt_both_get_it(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    start(pool, place, command=gate.command)
    async with pool.producer() as here, remote(pool, monkeypatch) as elsewhere:
        for first, second in ((here, elsewhere), (elsewhere, here)):
            gate.shut()
            prompt = [5, int(first is here)]
            asked = asyncio.ensure_future(first.logprobs(prompt))
            await until_async(lambda: is_held(pool), "the worker holds it")
            joined = asyncio.ensure_future(second.logprobs(prompt))
            waiting = f"{pool.prefix}:{{syn}}:waiting:*"

            async def are_two(pattern: str = waiting) -> bool:
                return any(count_waiting(pool.redis, key) == 2 for key in pool.redis.scan_iter(match=pattern))

            await until_async(are_two, "both wait")
            gate.open()
            for row in await asyncio.wait_for(asyncio.gather(asked, joined), DEADLINE_S):
                assert row.tobytes() == row_of(prompt).tobytes()
    await counted(pool, "rows", 2)


async def test_a_killed_worker_loses_no_request_and_the_next_worker_removes_its_socket(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0, when_absent="wait") as producer:
        await ask(producer)
        (left,) = segments(place)
        worker.signal(signal.SIGKILL)
        await asyncio.to_thread(worker.wait)
        await asyncio.to_thread(start, pool, place)
        until(lambda: not left.exists(), "the socket of the dead worker is gone")
        await ask(producer)
        await ask(producer)
    assert len(segments(place)) == 1


async def test_a_stopped_worker_leaves_no_files(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0
    assert segments(place) == []


def memory_of(worker: WorkerProcess) -> Path:
    """Path under /proc by which another process of the same user can open a worker's segment."""
    links = Path(f"/proc/{worker.process.pid}/fd").iterdir()
    return next(link for link in links if str(link.readlink()).startswith("/memfd:lmpool-"))


async def test_no_other_process_can_shrink_a_segment_or_write_to_it(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        with memory_of(worker).open("r+b", buffering=0) as memory:
            size = os.fstat(memory.fileno()).st_size
            for spoil in (memory.truncate, lambda _: memory.write(b"junk"), lambda _: mmap.mmap(memory.fileno(), size)):
                with pytest.raises(PermissionError):
                    spoil(5000)
        await ask(producer)
        assert reads(producer) == (2 * len(PROMPTS), 0)


async def test_a_removed_socket_is_created_again(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    (path,) = segments(place)
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        path.unlink()
        await ask(producer)
        await asyncio.to_thread(worker.until_says, "another program removed the socket of this worker's shared memory")
        async with pool.producer(cache_bytes=0) as late:
            await ask(late)
            assert reads(late) == (len(PROMPTS), 0)
    assert segments(place) == [path]
    await counted(pool, "rows", len(PROMPTS))


async def test_a_frozen_worker_does_not_delay_opening(pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0) as first:
        await ask(first)
    receive, is_waiting = SegmentReader._receive, threading.Event()

    def noted(reader: SegmentReader, names: Collection[str]) -> Any:
        is_waiting.set()
        return receive(reader, names)

    second = pool.producer(cache_bytes=0)
    worker.signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as brief:
            brief.setattr(shared_memory, "_ANSWER_S", 1.0)
            async with pool.producer(cache_bytes=0):
                pass  # After a second the producer is open without this worker's segment.
        monkeypatch.setattr(SegmentReader, "_receive", noted)
        opening = asyncio.create_task(second.open())
        assert await asyncio.to_thread(is_waiting.wait, DEADLINE_S), "the producer waits for the frozen worker"
        for _ in range(100):  # Other tasks run in this time.
            await asyncio.sleep(0.001)
        assert not opening.done()
    finally:
        worker.signal(signal.SIGCONT)
    await opening
    await ask(second)
    assert reads(second) == (len(PROMPTS), 0)
    await second.close()


async def test_rows_that_are_replaced_are_computed_again(pool: Pool, place: Path) -> None:
    start(pool, place, size=65 * SLOT)
    async with pool.producer(cache_bytes=0) as producer:
        prompts = [[i, 3] for i in range(300)]
        for _ in range(2):
            await ask(producer, prompts)
        values = stored(pool)
        assert sum(map(is_reference, values)) <= 2 * 65, "what was replaced is not in Redis either"


async def test_rows_without_free_slots_go_through_redis(pool: Pool, place: Path) -> None:
    """If the segment has too few free slots for a batch, Redis stores the remaining rows themselves."""
    start(pool, place, "--max-batch", 200, "--step-ms", 50, size=70 * SLOT)
    prompts = [[i, 3] for i in range(200)]
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):
            await ask(producer, prompts)
    values = stored(pool)
    assert {is_reference(value) for value in values} == {True, False}


async def test_cached_rows_are_read_while_the_server_has_no_memory(pool: Pool, place: Path) -> None:
    start(pool, place)
    async with pool.producer(cache_bytes=0, timeout=DEADLINE_S) as producer:
        await ask(producer)
        try:
            pool.redis.config_set("maxmemory-policy", "noeviction")
            pool.redis.config_set("maxmemory", 1)
            # The producer reads these rows from shared memory, and needs no memory of the server.
            await ask(producer)
        finally:
            pool.redis.config_set("maxmemory", 0)
            pool.redis.config_set("maxmemory-policy", "volatile-lru")
        await ask(producer, [[i, 5] for i in range(70)])


@pytest.mark.parametrize(
    ("size", "folder"), [(0, "."), (63 * SLOT, "."), (1000 * SLOT, "no/where"), (1000 * SLOT, "taken")]
)
async def test_without_memory_for_a_segment_rows_go_through_redis(
    pool: Pool, place: Path, size: int, folder: str
) -> None:
    taken = place / "taken" / f"lmpool-{os.geteuid()}"
    taken.mkdir(parents=True)
    taken.chmod(0o777)  # Any user may write to this folder, so the worker must not use it.
    environment = {"LMPOOL_SHM_DIR": str(place / folder)}
    worker = pool.start(*ARGUMENTS, "--shm-bytes", size, environment=environment)
    if size:
        await asyncio.to_thread(worker.until_says, "rows go through Redis, not through shared memory")
        assert "--shm-bytes" in worker.text
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        await ask(producer)
        assert reads(producer)[0] == 0
    assert worker.text.count("through Redis") == bool(size)
    assert not any(map(is_reference, stored(pool)))
    assert segments(place) == []


async def test_queries_and_tries_are_answered_from_shared_memory(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(pool, place)
    await asyncio.to_thread(pool.start_trie_worker, "--lease-s", 2)
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        trie = await producer.trie()
        for prompt in PROMPTS[:5]:
            row = row_of(prompt)
            targets = await producer.logprobs(prompt, targets=[0, 5, V - 1])
            assert targets.tobytes() == row[[0, 5, V - 1]].tobytes()
            top = await producer.topk(prompt, 3)
            assert np.array_equal(top.values, np.sort(row)[::-1][:3])
            assert 0 <= await producer.sample(prompt, seed=1) < V
            values = await trie.weight_sum(prompt=prompt)
            np.testing.assert_allclose(values[0], 1, rtol=1e-4)
    await counted(pool, "rows", len(PROMPTS))


async def test_a_trie_worker_on_another_host_reads_rows_from_redis(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(pool, place)
    elsewhere = tempfile.mkdtemp(dir=place)
    await asyncio.to_thread(pool.start_trie_worker, "--lease-s", 2, environment={"LMPOOL_SHM_DIR": elsewhere})
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        trie = await producer.trie()
        for prompt in PROMPTS[:5]:
            values = await trie.weight_sum(prompt=prompt)
            np.testing.assert_allclose(values[0], 1, rtol=1e-4)
    assert sum(not is_reference(value) for value in stored(pool)) >= 5


async def test_clients_release_the_memory_of_a_worker_that_has_ended(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    environment = {"LMPOOL_SHM_DIR": str(place)}
    trie_worker = await asyncio.to_thread(pool.start_trie_worker, "--lease-s", 2, environment=environment)
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        trie = await producer.trie()
        (path,), new = segments(place), count()

        def held() -> list[int]:
            return [pid for pid in (os.getpid(), trie_worker.process.pid) if has_mapped(pid, path.name)]

        async def both_hold() -> bool:
            """Have the trie worker read another row; it gets a row through Redis if the segment came too late."""
            await ask(producer, [prompt := [next(new), 8]])
            await trie.weight_sum(prompt=prompt)
            return held() == [os.getpid(), trie_worker.process.pid]

        await until_async(both_hold, "both have mapped the segment")
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait)
        await asyncio.to_thread(until, lambda: not held(), "its segment is closed")


def has_mapped(pid: int, name: str) -> bool:
    """Whether a process has a segment mapped."""
    return f"/memfd:{name}" in Path(f"/proc/{pid}/maps").read_text()


KILLED_IN_A_WRITE = """
import os, signal, sys
from lmpool.cli import main
from lmpool.rows import segment

write, written = segment.Segment._write, []

def last(self, digest, row, number, *, is_there):
    written.append(digest)
    write(self, digest, row, number, is_there=is_there)
    if len(written) == {rows}:
        # The row is in its slot; the fields before it are missing, all or in part.
        at = self._at(number)
        self._memory[at : at + {kept}] = bytes({kept})
        os.kill(os.getpid(), signal.SIGKILL)

segment.Segment._write = last
main()
"""


@pytest.mark.parametrize(("rows", "kept"), [(1, 0), (20, 8), (40, 40)])
async def test_a_worker_that_is_killed_while_it_writes_a_row_loses_no_request(
    pool: Pool, place: Path, rows: int, kept: int
) -> None:
    script = KILLED_IN_A_WRITE.format(rows=rows, kept=kept)
    worker = start(pool, place, command=lambda: [sys.executable, "-c", script])
    (left,) = segments(place)
    async with pool.producer(cache_bytes=0, when_absent="wait") as producer:
        asked = asyncio.create_task(ask(producer))
        assert await asyncio.to_thread(worker.wait) == -signal.SIGKILL
        os.utime(left, (0, 0))  # A starting worker leaves sockets younger than 0.1 s; this one may be 50 ms old.
        await asyncio.to_thread(start, pool, place)
        await asyncio.wait_for(asked, DEADLINE_S)
        await ask(producer)
    assert not left.exists()
    assert len(segments(place)) == 1


KILLED_IN_A_READ = """
import asyncio, os, signal, sys
from lmpool.producer import Producer
from lmpool.rows import shared_memory

def end(*_):
    # After the copy, before the second read of the number.
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    shared_memory._ANSWER_S = 60.0  # On a busy machine the worker may take more than 0.1 s to send its segment.
    async with Producer("syn", redis=sys.argv[1], prefix=sys.argv[2]) as producer:
        shared_memory._number_at = end
        await producer.logprobs([0, 1, 7])

asyncio.run(main())
"""


async def test_a_client_killed_while_it_reads_a_row_has_no_effect(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    command = [sys.executable, "-c", KILLED_IN_A_READ, pool.url, pool.prefix]
    for _ in range(2):  # The first client requests a new row; the second client reads a stored row.
        client = await asyncio.create_subprocess_exec(*command)
        assert await asyncio.wait_for(client.wait(), DEADLINE_S) == -signal.SIGKILL
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        await ask(producer)
        assert reads(producer)[1] == 0
    assert worker.is_running
    await counted(pool, "rows", len(PROMPTS))


async def test_with_too_little_memory_rows_go_through_redis_and_the_worker_warns_once(pool: Pool, place: Path) -> None:
    vocab_size = 1_000_000
    worker = pool.start(
        "--vocab-size", vocab_size, "--shm-bytes", 2**45, environment={"LMPOOL_SHM_DIR": str(place)}
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "rows go through Redis, not through shared memory")
    async with pool.producer(cache_bytes=0) as producer:
        row = await producer.logprobs([1, 2])
        assert row.tobytes() == synthetic_row([1, 2], vocab_size=vocab_size).tobytes()
        assert reads(producer)[0] == 0
    assert worker.text.count("through Redis") == 1
    assert "--shm-bytes" in worker.text
    assert segments(place) == []


async def test_a_folder_of_64_megabytes_is_enough(pool: Pool, place: Path) -> None:
    """Containers have a /dev/shm of 64 MiB by default; it only has to hold sockets, not the segments."""
    mount = 'mount -t tmpfs -o size=64m none "$LMPOOL_SHM_DIR" && exec "$@"'
    unshare = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", mount, "sh"]
    worker = pool.start(
        "--vocab-size", 49_152, "--shm-bytes", 2**27,
        command=lambda: [*unshare, *lmpool_command()], environment={"LMPOOL_SHM_DIR": str(place)},
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "for clients on this machine")
    # This process does not see the worker's folder, so it reads rows as if the worker ran on another host.
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):
            row = await producer.logprobs([1, 2])
            assert row.tobytes() == synthetic_row([1, 2], vocab_size=49_152).tobytes()
        assert reads(producer)[0] == 0


def hand_out(place: Path, data: bytes) -> tuple[SegmentListener, Path]:
    """Create a socket that sends a sealed segment with this content; return the listener and the socket's path."""
    fd = os.memfd_create("lmpool-other", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    path = place / f"lmpool-{os.geteuid()}" / f"lmpool-{bytes(8).hex()}"
    return SegmentListener(fd, path), path


async def test_segments_and_references_of_another_release_are_ignored(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    data = bytearray(memory_of(worker).read_bytes())
    data[6:8] = (99).to_bytes(2, "little")  # Change the version number of the segment's layout.
    listener, other = hand_out(place, bytes(data))
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer)
        for key in list(pool.redis.scan_iter(match=f"{pool.prefix}:row:*")):
            reference = bytearray(cast(bytes, pool.redis.get(key)))
            reference[4] = 99
            pool.redis.set(key, bytes(reference))
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait)
        await asyncio.to_thread(start, pool, place)
        await ask(producer)
    assert other.exists()
    listener.close()
