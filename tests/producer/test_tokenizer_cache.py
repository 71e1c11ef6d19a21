"""A process reads a published tokenizer once, and a caller that gives up fails no other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import tokenizers

from lmpool.errors import DeadlineExceeded, LMPoolError, ServerUnreachable, UnknownTokenizer
from lmpool.producer.client.requests import Deadline
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, TokenizerCache
from tests.support.pool import DEADLINE_S, until, until_async

TEXT = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str()
NAME = "0" * 32


class Reader:
    """A session whose reads wait until its gate opens.

    Attributes:
        error: raised instead of returning the text.
        reads: number of reads that have started.
    """

    def __init__(self, text: str = TEXT) -> None:
        self.gate = threading.Event()
        self.error: LMPoolError | None = None
        self.text = text
        self.reads = 0

    async def tokenizer(self, digest: str, deadline: Deadline) -> str:
        """See `ReadsTokenizers`."""
        self.reads += 1
        assert digest == NAME
        await until_async(self._is_open, "the gate is open")
        if self.error is not None:
            raise self.error
        return self.text

    async def _is_open(self) -> bool:
        return self.gate.is_set()


def ask(cache: TokenizerCache, reader: Reader, timeout: float = DEADLINE_S) -> asyncio.Task[PublishedTokenizer]:
    return asyncio.create_task(cache.get(NAME, reader, Deadline(timeout)))


async def asking(reader: Reader, count: int) -> tuple[TokenizerCache, list[Any]]:
    """Return a cache whose read has started, and the callers that share it."""
    cache = TokenizerCache()
    tasks = [ask(cache, reader) for _ in range(count)]

    await until_async(partial(has_started, reader), "the read has started")
    return cache, tasks


async def has_started(reader: Reader, times: int = 1) -> bool:
    return reader.reads == times


def waiting(cache: TokenizerCache) -> int:
    """Return how many callers wait for another caller's read."""
    reading: Any = cache._readings[NAME]
    return len(reading.outcome._done_callbacks)


async def are_waiting(cache: TokenizerCache, count: int) -> bool:
    return waiting(cache) == count


async def test_a_caller_that_gives_up_fails_no_other_and_another_reads_again() -> None:
    reader = Reader()
    cache, (first, second, *others) = await asking(reader, 10)
    # A caller that waits, and then the caller that reads.
    for task in (second, first):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_async(partial(has_started, reader, 2), "another caller has taken over")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await ask(cache, reader, 0.01)
    reader.gate.set()
    assert len(set(await asyncio.gather(*others))) == 1
    assert reader.reads == 2


async def test_the_deadline_of_the_first_caller_does_not_apply_to_the_others() -> None:
    cache, reader = TokenizerCache(), Reader()
    impatient, patient = ask(cache, reader, 0.05), ask(cache, reader)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await impatient
    reader.gate.set()
    assert isinstance(await patient, PublishedTokenizer)


async def test_a_failure_reaches_all_callers_of_one_session_and_no_other_session() -> None:
    reader, elsewhere = Reader(), Reader()
    reader.error = ServerUnreachable("no server")
    cache, tasks = await asking(reader, 5)
    other = ask(cache, elsewhere)
    await until_async(partial(are_waiting, cache, 5), "all wait for the first caller")
    elsewhere.gate.set()
    reader.gate.set()
    failed = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in failed] == ["no server"] * 5
    assert len(set(map(id, failed))) == 5, "each caller has an exception of its own"
    assert reader.reads == 1
    assert isinstance(await other, PublishedTokenizer)


async def test_a_tokenizer_that_cannot_be_parsed_fails_all_callers_and_is_not_cached() -> None:
    reader = Reader("{}")
    cache, tasks = await asking(reader, 5)
    reader.gate.set()
    for task in tasks:
        with pytest.raises(UnknownTokenizer, match="cannot be read by tokenizers"):
            await task
    assert reader.reads == 1
    reader.text = TEXT
    assert isinstance(await ask(cache, reader), PublishedTokenizer)


async def test_a_cached_tokenizer_is_not_read_again() -> None:
    reader = Reader()
    reader.gate.set()
    cache = TokenizerCache()
    first = await ask(cache, reader)
    assert await ask(cache, Reader()) is first
    assert await asyncio.to_thread(lambda: asyncio.run(cache.get(NAME, Reader(), deadline_in_a_thread())) is first)


def deadline_in_a_thread() -> Any:
    """A cached tokenizer needs no deadline."""
    return None


async def test_parsing_continues_for_the_others_when_the_caller_that_read_gives_up() -> None:
    reader, may_continue = Reader(), threading.Event()
    reader.gate.set()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        # Occupies the only thread of the loop, so that parsing waits.
        busy = asyncio.create_task(asyncio.to_thread(may_continue.wait, DEADLINE_S))
        cache, (first, second) = await asking(reader, 2)
        await until_async(partial(are_waiting, cache, 1), "the second caller waits")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        may_continue.set()
        assert await second is await ask(cache, reader)
        assert reader.reads == 1
        assert await busy


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_event_loops_in_several_threads_share_one_read_and_outlive_each_other() -> None:
    cache, first, readers = TokenizerCache(), Reader(), [Reader() for _ in range(4)]
    may_end = threading.Event()

    async def begin() -> None:
        ask(cache, first)
        assert await asyncio.to_thread(may_end.wait, DEADLINE_S)

    async def wait(reader: Reader) -> list[PublishedTokenizer]:
        return await asyncio.gather(*(ask(cache, reader) for _ in range(20)))

    ending, _ = in_thread(lambda: asyncio.run(begin()))
    until(lambda: first.reads, "the first loop reads")
    others = [in_thread(partial(asyncio.run, wait(reader))) for reader in readers]
    until(lambda: waiting(cache) == 80, "all others wait for this read")
    may_end.set()
    ending.join(DEADLINE_S)
    until(lambda: sum(reader.reads for reader in readers) == 1, "one of the other loops reads")
    for reader in readers:
        reader.gate.set()
    found = set()
    for thread, results in others:
        thread.join(DEADLINE_S)
        found |= set(results[0])
    assert len(found) == 1
    assert sum(reader.reads for reader in readers) == 1


def test_a_child_process_does_not_wait_for_a_read_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZERS, "_kept", {})

    async def wait(reader: Reader) -> PublishedTokenizer:
        return await ask(TOKENIZERS, reader)

    of_parent, of_child = Reader(), Reader()
    of_child.gate.set()
    thread, results = in_thread(lambda: asyncio.run(wait(of_parent)))
    until(lambda: of_parent.reads, "the parent reads")
    child = os.fork()
    if child == 0:
        try:
            ids = asyncio.run(asyncio.wait_for(wait(of_child), DEADLINE_S / 2)).encode("a")
            os._exit(0 if ids == [0] else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    of_parent.gate.set()
    thread.join(DEADLINE_S)
    assert os.waitstatus_to_exitcode(status) == 0
    assert results[0].encode("a") == [0]


def test_a_child_process_encodes_in_threads_of_its_own() -> None:
    async def encode() -> list[int]:
        return await TOKENIZERS.encode(PublishedTokenizer(TEXT), "a", DEADLINE_S / 2)

    assert asyncio.run(encode()) == [0]
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if asyncio.run(encode()) == [0] else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
