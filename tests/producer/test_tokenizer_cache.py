"""Concurrent callers share one read of a published tokenizer, and a caller that gives up fails no other."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
import tokenizers

from lmpool.errors import DeadlineExceeded, LMPoolError, ServerUnreachable, UnknownTokenizer
from lmpool.producer.client.requests import Deadline
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, TokenizerCache
from tests.support.pool import DEADLINE_S, until_async

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

    async def has_started() -> bool:
        return reader.reads == 1

    await until_async(has_started, "the read has started")
    return cache, tasks


async def test_a_caller_that_gives_up_fails_no_other() -> None:
    reader = Reader()
    cache, (first, second, *others) = await asking(reader, 10)
    for task in (second, first):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await ask(cache, reader, 0.01)
    reader.gate.set()
    assert len(set(await asyncio.gather(*others))) == 1
    assert reader.reads == 1


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
