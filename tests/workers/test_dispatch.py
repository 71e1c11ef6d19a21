"""What becomes of held prompts when asks and requests for the row itself meet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmpool.errors import SourceMissing
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import TrieQuery
from lmpool.workers import dispatch as dispatch_module
from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.dispatch import Dispatcher
from lmpool.workers.membership.adapters import AdapterKeeper
from lmpool.workers.queries import QueryAnswerer
from lmpool.workers.queue.consumer import EntriesByPrompt, Holdings, Taken
from lmpool.workers.queue.publisher import Ending

NO_ADAPTERS = AdapterKeeper(
    cast(Any, None), cast(Any, None), {}, cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None)
)
PROMPT, ASKED = b"p" * 16, b"a" * 16
INFO = ModelInfo("m", "synthetic", vocab_size=4, max_prompt_tokens=8, revision="r", dtype="float32")


class Ends:
    """Takes what is submitted and ended, in place of a backend and a server where nobody waits for anything.

    Attributes:
        is_waited_for: somebody does, for all.
    """

    def __init__(self) -> None:
        self.submitted: list[bytes] = []
        self.aborted: list[bytes] = []
        self.ended: list[Ending] = []
        self.owed: set[bytes] = set()
        self.looked_at: list[EntriesByPrompt] = []
        self.is_waited_for = False
        self.during_look: Callable[[], Awaitable[None]] | None = None

    def submit(self, jobs: Sequence[BackendJob]) -> None:
        self.submitted += [job.digest for job in jobs]
        self.owed.update(job.digest for job in jobs)

    def abort(self, digests: Sequence[bytes]) -> None:
        self.aborted += digests

    async def end(self, endings: Sequence[Ending]) -> None:
        self.ended += endings

    async def wanted(self, wants: EntriesByPrompt) -> EntriesByPrompt:
        self.looked_at.append(wants)
        if self.during_look is not None:
            await self.during_look()
        return wants if self.is_waited_for else {}


async def test_a_request_for_the_row_that_joins_asks_is_computed_and_not_dropped() -> None:
    ends, held = Ends(), Holdings()
    asked = QueryAnswerer(cast(Any, None), cast(Any, ends), INFO)
    delivery = Dispatcher(held, cast(Any, ends), cast(Any, ends), cast(Any, None), asked, INFO, NO_ADAPTERS)
    job = BackendJob(PROMPT, bytes(4))
    await delivery.accept([Taken(b"1-0", ASKED, job, query=TrieQuery("sum", "0" * 32, "inner"))])
    await delivery.accept([Taken(b"2-0", PROMPT, job)])
    supplied = asyncio.Event()
    supplying = asyncio.create_task(delivery.supply(supplied.set))
    async with asyncio.timeout(10):
        await supplied.wait()
    supplying.cancel()
    assert ends.submitted == [PROMPT]
    assert set(held[PROMPT].entries) == {b"1-0", b"2-0"}


async def test_asks_alone_are_turned_away_where_there_are_no_tries() -> None:
    ends, held = Ends(), Holdings()
    asked = QueryAnswerer(cast(Any, None), cast(Any, ends), INFO)
    delivery = Dispatcher(held, cast(Any, ends), cast(Any, ends), cast(Any, None), asked, INFO, NO_ADAPTERS)
    await delivery.accept(
        [Taken(b"1-0", ASKED, BackendJob(PROMPT, bytes(4)), query=TrieQuery("sum", "0" * 32, "inner"))]
    )
    supplied = asyncio.Event()
    supplying = asyncio.create_task(delivery.supply(supplied.set))
    async with asyncio.timeout(10):
        await supplied.wait()
    supplying.cancel()
    assert [(one.entry, one.digest, one.failure.kind if one.failure else "") for one in ends.ended] == [
        (b"1-0", ASKED, SourceMissing.__name__)
    ]
    assert len(held) == 0
    assert ends.submitted == []


# What nobody waits for


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are old enough for a look."""
    monkeypatch.setattr(dispatch_module, "STALE_S", -1.0)


def holding(ends: Ends) -> tuple[Dispatcher, Holdings]:
    """A delivery, and what it holds."""
    held = Holdings()
    asked = QueryAnswerer(cast(Any, None), cast(Any, ends), INFO)
    return Dispatcher(held, cast(Any, ends), cast(Any, ends), cast(Any, None), asked, INFO, NO_ADAPTERS), held


async def test_prompts_that_have_just_come_are_not_looked_at() -> None:
    ends = Ends()
    delivery, held = holding(ends)
    await delivery.accept([Taken(b"1-0", PROMPT, BackendJob(PROMPT, bytes(4)))])
    assert await delivery.let_go() == 0
    assert not ends.looked_at
    assert PROMPT in held


async def test_the_longer_a_prompt_is_held_the_more_rarely_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    ends.is_waited_for = True
    delivery, held = holding(ends)
    began, other = time.monotonic(), b"o" * 16
    await delivery.accept([Taken(b"1-0", PROMPT, BackendJob(PROMPT, bytes(4)))])
    ages: dict[bytes, list[int]] = {PROMPT: [], other: []}
    for second in range(1, 3600):
        now = began + second + 0.5
        monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda now=now: now))
        if second == 100:
            await delivery.accept([Taken(b"2-0", other, BackendJob(other, bytes(4)))])
            held[other].since = held[other].looked_at = now
        await delivery.let_go()
        for digest in [digest for asks in ends.looked_at for digest in asks]:
            ages[digest].append(second - (100 if digest == other else 0))
        ends.looked_at.clear()
    for seen in ages.values():
        assert seen[0] == 1
        assert all(after - before <= min(before + 1, 31) for before, after in pairwise(seen)), "it is never forgotten"
        assert len(seen) < 3600 / 30 + 8
    ends.is_waited_for = False
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: began + 3640))
    assert await delivery.let_go() == 2


@pytest.mark.usefixtures("looks_at_once")
async def test_a_prompt_that_nobody_waits_for_is_let_go() -> None:
    ends = Ends()
    delivery, held = holding(ends)
    await delivery.accept([Taken(b"1-0", PROMPT, BackendJob(PROMPT, bytes(4)))])
    assert await delivery.let_go() == 1
    assert ends.aborted == [PROMPT]
    assert PROMPT not in held


@pytest.mark.usefixtures("looks_at_once")
async def test_a_prompt_that_is_asked_for_again_during_the_look_stays() -> None:
    ends = Ends()
    delivery, held = holding(ends)
    job = BackendJob(PROMPT, bytes(4))
    await delivery.accept([Taken(b"1-0", PROMPT, job)])

    async def ask_again() -> None:
        await delivery.accept([Taken(b"2-0", PROMPT, job)])

    ends.during_look = ask_again
    assert await delivery.let_go() == 0
    assert not ends.aborted
    assert list(held[PROMPT].entries) == [b"2-0"]


@pytest.mark.usefixtures("looks_at_once")
async def test_a_prompt_that_is_answered_during_the_look_is_published_as_it_is() -> None:
    ends = Ends()
    delivery, held = holding(ends)
    await delivery.accept([Taken(b"1-0", PROMPT, BackendJob(PROMPT, bytes(4)))])

    async def answer() -> None:
        ends.owed.clear()

    ends.during_look = answer
    assert await delivery.let_go() == 0
    assert not ends.aborted
    assert list(held[PROMPT].entries) == [b"1-0"]
