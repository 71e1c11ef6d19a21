"""The cache of published tokenizers: a session reads each tokenizer once, even if a waiting caller gives up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import tokenizers

from lmpool.errors import DeadlineExceeded, LMPoolError, ServerUnreachable, UnknownTokenizer
from lmpool.producer.client.discovery import Vocabularies
from lmpool.producer.client.requests import Deadline
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, TokenizerCache
from tests.support.pool import DEADLINE_S, until, until_async

TEXT = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str()
NAME = "0" * 32


class Reader:
    """Stand-in for the vocabularies of a session: reads wait until its gate opens.

    Attributes:
        error: exception that a read raises instead of returning a text.
        reads: number of reads that have started.
    """

    def __init__(self, text: str = TEXT, pool: str = "a pool") -> None:
        self.pool = pool
        self.gate = threading.Event()
        self.error: LMPoolError | None = None
        self.text = text
        self.reads = 0

    async def tokenizer(self, digest: str, deadline: Deadline) -> str:
        """See `Vocabularies.tokenizer`."""
        self.reads += 1
        assert digest == NAME
        await until_async(self._is_open, "the gate is open")
        if self.error is not None:
            raise self.error
        return self.text

    async def _is_open(self) -> bool:
        return self.gate.is_set()


def ask(cache: TokenizerCache, reader: Reader, timeout: float = DEADLINE_S) -> asyncio.Task[PublishedTokenizer]:
    return asyncio.create_task(cache.get(NAME, cast(Vocabularies, reader), Deadline(timeout)))


async def asking(reader: Reader, count: int) -> tuple[TokenizerCache, list[Any]]:
    """Return a cache whose read has started, and the callers that wait for it."""
    cache = TokenizerCache()
    tasks = [ask(cache, reader) for _ in range(count)]
    await until_async(partial(has_started, reader), "the read has started")
    return cache, tasks


async def has_started(reader: Reader, times: int = 1) -> bool:
    return reader.reads == times


async def test_a_cancelled_caller_fails_no_other_caller_and_another_one_reads_again() -> None:
    reader = Reader()
    cache, (first, second, *others) = await asking(reader, 10)
    # Cancel a caller that waits for another caller's read, and then the caller that reads.
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


async def test_a_failed_read_is_not_cached_and_fails_no_caller_of_another_pool() -> None:
    reader, elsewhere = Reader(), Reader(pool="another pool")
    reader.error = ServerUnreachable("no server")
    cache, tasks = await asking(reader, 5)
    other = ask(cache, elsewhere)
    elsewhere.gate.set()
    assert isinstance(await other, PublishedTokenizer)
    reader.gate.set()
    with pytest.raises(ServerUnreachable, match="no server"):
        await tasks[0]
    assert set(await asyncio.gather(*tasks[1:])) == {await other}, "the caller of the other pool has read it"


async def test_a_tokenizer_that_cannot_be_parsed_fails_all_callers_and_is_not_cached() -> None:
    reader = Reader("{}")
    cache, tasks = await asking(reader, 5)
    reader.gate.set()
    for task in tasks:
        with pytest.raises(UnknownTokenizer, match="cannot be read by tokenizers"):
            await task
    reader.text = TEXT
    assert isinstance(await ask(cache, reader), PublishedTokenizer)


async def test_a_cached_tokenizer_is_not_read_again() -> None:
    reader, cache = Reader(), TokenizerCache()
    reader.gate.set()
    first = await ask(cache, reader)
    assert await ask(cache, Reader()) is first
    in_another_loop = cache.get(NAME, cast(Vocabularies, Reader()), cast(Deadline, None))
    assert await asyncio.to_thread(asyncio.run, in_another_loop) is first


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


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
