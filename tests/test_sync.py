"""How a producer for synchronous code ends: for whoever waits in another thread, and after a fork."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.producer import SyncProducer
from tests.pool import Pool, until

WAITS: dict[str, Callable[[SyncProducer, Path], Any]] = {
    "a row": lambda producer, folder: producer.logprobs([1]),
    "entries": lambda producer, folder: producer.logprobs([2], targets=[1]),
    "scores": lambda producer, folder: producer.batch_score([[3]], [[4]]),
    "a change of adapters": lambda producer, folder: producer.add_adapter("poet", folder),
}


@pytest.mark.parametrize("what", WAITS)
def test_closing_ends_what_other_threads_wait_for(pool: Pool, tmp_path: Path, what: str) -> None:
    worker = pool.start("--step-ms", 60_000, "--max-batch", 1)
    (tmp_path / "weights").write_text("1")
    producer = SyncProducer(redis=pool.url, prefix=pool.prefix, timeout=50)
    ended: list[BaseException] = []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        try:
            WAITS[what](producer, tmp_path)
        except LMPoolError as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    if what != "a change of adapters":
        until(lambda: pool.jobs(), "the request is queued")
    producer.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in ended] == [ProducerClosed]
    with pytest.raises(ProducerClosed, match="this SyncProducer is closed"):
        producer.logprobs([1])
    with pytest.raises(ProducerClosed, match="this SyncProducer is closed"):
        producer.clear_cache()
    producer.close()
    worker.end()


def ask_in_child(producer: SyncProducer, said: Any) -> None:
    try:
        producer.logprobs([1], timeout=1)
    except ProducerClosed as error:
        said.put(str(error))
    producer.close()


def test_after_a_fork_it_says_that_it_is_the_parents(pool: Pool) -> None:
    pool.start()
    context = multiprocessing.get_context("fork")
    said: Any = context.Queue()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        child = context.Process(target=ask_in_child, args=(producer, said))
        child.start()
        assert said.get(timeout=20) == "this SyncProducer was made before a fork: make another one in this process"
        child.join(20)
        assert child.exitcode == 0
        producer.logprobs([1])
