"""A published tokenizer is read once for a process, and who gives up fails nobody else."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
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
    """A session that reads when its gate opens.

    Attributes:
        gate: as above.
        error: what is raised in place of a text.
        text: what is read.
        reads: how often reading has begun.
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
        try:
            async with deadline.limit():
                await until_async(self._is_open, "the gate is open")
        except TimeoutError as error:
            raise DeadlineExceeded(str(error)) from error
        if self.error is not None:
            raise self.error
        return self.text

    async def _is_open(self) -> bool:
        return self.gate.is_set()


def ask(cache: TokenizerCache, reader: Reader, timeout: float = DEADLINE_S) -> asyncio.Task[PublishedTokenizer]:
    return asyncio.create_task(cache.get(NAME, reader, Deadline(timeout)))


@asynccontextmanager
async def asking(reader: Reader, count: int) -> AsyncIterator[tuple[TokenizerCache, list[Any]]]:
    """A cache whose reading has begun, for the first of some that ask."""
    cache = TokenizerCache()
    tasks = [ask(cache, reader) for _ in range(count)]
    await until_async(lambda: begun(reader), "reading has begun")
    yield cache, tasks


async def begun(reader: Reader, times: int = 1) -> bool:
    return reader.reads == times


def waiting(cache: TokenizerCache) -> int:
    """How many wait for what another reads."""
    reading: Any = cache._readings[NAME]
    return len(reading._done_callbacks)


async def are_waiting(cache: TokenizerCache, count: int) -> bool:
    return waiting(cache) == count


async def test_who_gives_up_fails_nobody_else() -> None:
    reader = Reader()
    async with asking(reader, 10) as (cache, (first, second, *others)):
        # One that waits, and then the one that reads.
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_async(lambda: begun(reader, 2), "another has taken over")
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            await ask(cache, reader, 0.01)
        reader.gate.set()
        assert len(set(await asyncio.gather(*others))) == 1
        assert reader.reads == 2


async def test_the_deadline_of_who_asked_first_is_not_that_of_the_others() -> None:
    cache, reader = TokenizerCache(), Reader()
    impatient, patient = ask(cache, reader, 0.05), ask(cache, reader)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await impatient
    reader.gate.set()
    assert isinstance(await patient, PublishedTokenizer)


async def test_a_failure_is_that_of_those_who_ask_of_the_same_pool() -> None:
    reader, elsewhere = Reader(), Reader()
    reader.error = ServerUnreachable("no server")
    async with asking(reader, 5) as (cache, tasks):
        other = ask(cache, elsewhere)
        await until_async(lambda: are_waiting(cache, 5), "all wait for the first")
        elsewhere.gate.set()
        reader.gate.set()
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in failed] == ["no server"] * 5
        assert len(set(map(id, failed))) == 5
        assert reader.reads == 1
        assert isinstance(await other, PublishedTokenizer)


async def test_what_cannot_be_parsed_fails_all_and_is_not_kept() -> None:
    reader = Reader("{}")
    async with asking(reader, 5) as (cache, tasks):
        reader.gate.set()
        for task in tasks:
            with pytest.raises(UnknownTokenizer, match="cannot be read by tokenizers"):
                await task
        assert reader.reads == 1
        reader.text = TEXT
        assert isinstance(await ask(cache, reader), PublishedTokenizer)


async def test_what_has_been_read_is_parsed_for_others_when_its_reader_gives_up() -> None:
    reader, may_go_on = Reader(), threading.Event()
    reader.gate.set()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        busy = asyncio.create_task(asyncio.to_thread(may_go_on.wait, DEADLINE_S))
        async with asking(reader, 2) as (cache, (first, second)):
            # Nothing else can run in the loop's threads.
            await until_async(lambda: are_waiting(cache, 1), "it has been read")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            may_go_on.set()
            assert await second is await ask(cache, reader)
        assert reader.reads == 1
        assert await busy


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_event_loops_in_several_threads_read_it_once_and_outlive_each_other() -> None:
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
    until(lambda: waiting(cache) == 80, "all wait for that")
    may_end.set()
    ending.join(DEADLINE_S)
    until(lambda: sum(reader.reads for reader in readers) == 1, "one of the others reads")
    for reader in readers:
        reader.gate.set()
    found = set()
    for thread, results in others:
        thread.join(DEADLINE_S)
        found |= set(results[0])
    assert len(found) == 1
    assert sum(reader.reads for reader in readers) == 1


def test_a_child_process_does_not_wait_for_what_its_parent_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZERS, "_kept", OrderedDict())

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
