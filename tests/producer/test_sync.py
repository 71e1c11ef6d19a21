"""SyncProducer: its arguments, its types and how it closes, also with other threads and after a fork."""

from __future__ import annotations

import asyncio
import gc
import inspect
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.errors import LMPoolError, ModelMismatch, ProducerClosed, SettingsError
from lmpool.producer import Continuation, PooledTrie, Producer, SyncProducer, SyncTrie, TopK
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V, until

WAITS: dict[str, Callable[[SyncProducer, Path], Any]] = {
    "a row": lambda producer, folder: producer.logprobs([1]),
    "entries": lambda producer, folder: producer.logprobs([2], targets=[1]),
    "scores": lambda producer, folder: producer.batch_score([[3]], [[4]]),
    "a change of adapters": lambda producer, folder: producer.add_adapter("poet", folder),
}


@pytest.mark.parametrize("wait", WAITS)
def test_closing_ends_pending_calls_of_other_threads(pool: Pool, tmp_path: Path, wait: str) -> None:
    worker = pool.start("--step-ms", 600_000, "--max-batch", 1)
    (tmp_path / "weights").write_text("1")
    producer = SyncProducer(redis=pool.url, prefix=pool.prefix, timeout=50)
    ended: list[BaseException] = []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        try:
            WAITS[wait](producer, tmp_path)
        except LMPoolError as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    if wait != "a change of adapters":
        until(lambda: pool.jobs(), "the request is queued")
    producer.close()
    thread.join(DEADLINE_S)
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


def test_after_a_fork_the_child_gets_an_error(pool: Pool) -> None:
    pool.start()
    context = multiprocessing.get_context("fork")
    said: Any = context.Queue()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        child = context.Process(target=ask_in_child, args=(producer, said))
        child.start()
        assert (
            said.get(timeout=DEADLINE_S) == "this SyncProducer was made before a fork: make another one in this process"
        )
        child.join(DEADLINE_S)
        assert child.exitcode == 0
        producer.logprobs([1])


PROGRAM = """
    import sys
    from lmpool.producer import Continuation, PooledTrie, Producer, SyncProducer, SyncTrie, TopK

    class Kept:
        def __init__(self, url, prefix):
            self.producer = SyncProducer(redis=url, prefix=prefix)
            self.producer.logprobs([1])

        def __del__(self):
            self.producer.close()

    def rows(url, prefix):
        with SyncProducer(redis=url, prefix=prefix) as producer:
            while True:
                yield producer.logprobs([1])

    kept = Kept(*sys.argv[1:])
    begun = rows(*sys.argv[1:])
    next(begun)
    print("done", flush=True)
"""


def test_the_interpreter_exits_with_an_open_producer(pool: Pool) -> None:
    pool.start()
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), pool.url, pool.prefix]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_dropped_producer_leaves_no_thread_and_no_connection(pool: Pool) -> None:
    worker = pool.start("--lease-s", 60)
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        producer.logprobs([1])
    worker.signal(signal.SIGSTOP)  # Stop the worker, which could open connections.
    before = len(pool.redis.client_list())
    for _ in range(3):
        SyncProducer(redis=pool.url, prefix=pool.prefix).logprobs([1])

    def is_gone() -> bool:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name == "lmpool-producer"]
        return not threads and len(pool.redis.client_list()) <= before

    until(is_gone, "threads and connections end")


async def test_two_event_loops_at_once_have_a_session_each(pool: Pool) -> None:
    pool.start("--vocab-size", 64)
    producer = pool.producer(cache_bytes=0)
    before = len(pool.redis.client_list())

    async def ask(of: int) -> int:
        for at in range(60):
            row = await producer.logprobs([of, at])
            assert np.array_equal(row, synthetic_row([of, at], vocab_size=64))
        await producer.close()
        return len(pool.redis.client_list())

    most = await asyncio.gather(*(asyncio.to_thread(asyncio.run, ask(of)) for of in range(3)))
    assert max(most) - before < 40


def parameters_of(call: Any) -> list[str]:
    # A function that a call takes may be awaited in one of the two classes only.
    return [str(each).replace("Awaitable[T]", "T") for each in signature(call).parameters.values()]


def test_weights_are_published_and_each_version_has_a_producer(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        rows = [producer.logprobs([1])]
        assert producer.publish_weights({"seed": np.array(7)}) == 1
        producer.reach_version(1)
        row, version = producer.versioned(producer.logprobs, [1])
        assert version == 1
        assert np.array_equal(row, synthetic_row([1], vocab_size=V, seed=7))
        assert producer.versions() == {1: "served"}
        old = producer.at(0)
        assert old is producer.at(0)
        assert np.array_equal(old.logprobs([1]), rows[0])  # From the cache: no worker serves version 0 any more.
        assert old.versioned(old.logprobs, [1])[1] == 0
        with producer.at(1) as other:
            other.logprobs([1])
        assert producer._pinned == {0: old, 1: other}
        assert np.array_equal(producer.at(1).logprobs([1]), row)
    for closed in (old.logprobs, producer.at):
        with pytest.raises(ProducerClosed, match="this SyncProducer is closed"):
            closed(0)


def test_arguments_may_be_iterators_that_use_the_producer(pool: Pool) -> None:
    pool.start("--with-trie")
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        prompts, trie = [[1], [2, 3]], producer.trie()
        checked = (prompt for prompt in prompts if producer.sample(prompt) >= 0)
        assert np.array_equal(producer.batch_logprobs(checked), producer.batch_logprobs(prompts))
        checked = (prompt for prompt in prompts if producer.sample(prompt) >= 0)
        assert len(trie.batch_weight_sum(prompts=checked)) == 2

        class Lazy:
            def __iter__(self) -> Iterator[list[int]]:
                return (prompt for prompt in prompts if producer.sample(prompt) >= 0)

        with pytest.raises(SettingsError, match="uses the SyncProducer: pass a list instead"):
            producer.batch_logprobs(Lazy())


def test_a_call_is_repeated_when_the_weights_change_during_it(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        timeouts: list[float] = []
        numbers = iter((7, 8))

        def ask(prompts: list[list[int]], *, timeout: float) -> Any:
            timeouts.append(timeout)
            rows = producer.batch_logprobs(prompts, timeout=timeout)
            if (number := next(numbers, None)) is not None:
                producer.publish_weights({"seed": np.array(number)})
                if number == 8:
                    raise ModelMismatch("the parts of a result are of two versions")
            return rows

        rows, version = producer.versioned(ask, iter([[1], [4]]), timeout=50)
        assert (version, len(timeouts)) == (2, 3)
        assert 50 == timeouts[0] > timeouts[1] > timeouts[2]
        assert np.array_equal(rows, [synthetic_row(prompt, vocab_size=V, seed=8) for prompt in ([1], [4])])

        def fail() -> None:
            raise ModelMismatch("the vocabulary has another size")

        with pytest.raises(ModelMismatch, match="the vocabulary has another size"):
            producer.versioned(fail)


def test_every_call_takes_the_arguments_of_the_producer_and_waits() -> None:
    kinds = {SyncProducer: Producer, SyncTrie: PooledTrie}
    for kind, other in kinds.items():
        for name in (name for name in dir(kind) if not name.startswith("_") and name != "model"):
            call, awaited = getattr(kind, name), getattr(other, name)
            assert not inspect.iscoroutinefunction(call)
            assert parameters_of(call) == parameters_of(awaited)
            assert call.__doc__.startswith(("As `", "Close the connections"))
    assert signature(SyncProducer) == signature(Producer)


def takes_what_a_type_checker_sees(producer: SyncProducer) -> None:
    """mypy checks this function; it never runs."""
    assert_type(producer.topk([1], 3, allowed=[1, 2], timeout=1.0), TopK)
    assert_type(producer.sample([1], temperature=0.5, seed=3), int)
    assert_type(producer.generate([1], 3, n=2, stop=[1]), list[Continuation])
    assert_type(producer.batch_logprobs([[1]], targets=[1]), NDArray[np.float32])
    assert_type(producer.trie().weight_sum(prompt=[1], under=b""), NDArray[np.float32])
    assert_type(producer.adapters(), dict[str, str])
    assert_type(producer.versioned(producer.sample, [1]), tuple[int, int])
    assert_type(producer.at(1), SyncProducer)
    producer.sample([1], temprature=1.0)  # type: ignore[call-arg]
    producer.topk([1])  # type: ignore[call-arg]
    SyncProducer(timeout="1")  # type: ignore[arg-type]
