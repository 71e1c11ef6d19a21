"""What becomes of held prompts when asks and requests for the row itself meet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from lmpool.asks import TrieAsk
from lmpool.card import ModelCard
from lmpool.errors import SourceMissing
from lmpool.workers.adapters import AdapterKeeper
from lmpool.workers.asked import Asked
from lmpool.workers.backend import BackendJob
from lmpool.workers.delivery import Delivery
from lmpool.workers.held import Holdings
from lmpool.workers.intake import Taken
from lmpool.workers.publisher import Ending

NO_ADAPTERS = AdapterKeeper(
    cast(Any, None), cast(Any, None), {}, cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None)
)
PROMPT, ASKED = b"p" * 16, b"a" * 16
CARD = ModelCard("m", "synthetic", vocab_size=4, max_prompt_tokens=8, revision="r", dtype="float32")


class Ends:
    """Takes what is submitted and ended, in place of a backend and a server."""

    def __init__(self) -> None:
        self.submitted: list[bytes] = []
        self.ended: list[Ending] = []

    def submit(self, jobs: Sequence[BackendJob]) -> None:
        self.submitted += [job.digest for job in jobs]

    async def end(self, endings: Sequence[Ending]) -> None:
        self.ended += endings


async def test_a_request_for_the_row_that_joins_asks_is_computed_and_not_dropped() -> None:
    ends, held = Ends(), Holdings()
    asked = Asked(cast(Any, None), cast(Any, ends), CARD)
    delivery = Delivery(held, cast(Any, ends), cast(Any, ends), cast(Any, None), asked, CARD, NO_ADAPTERS)
    job = BackendJob(PROMPT, bytes(4))
    await delivery.accept([Taken(b"1-0", ASKED, job, ask=TrieAsk("sum", "0" * 32, "inner"))])
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
    asked = Asked(cast(Any, None), cast(Any, ends), CARD)
    delivery = Delivery(held, cast(Any, ends), cast(Any, ends), cast(Any, None), asked, CARD, NO_ADAPTERS)
    await delivery.accept([Taken(b"1-0", ASKED, BackendJob(PROMPT, bytes(4)), ask=TrieAsk("sum", "0" * 32, "inner"))])
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
