"""A process with one producer, as a user would write it: `python -m benchmarks.clients.producer`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from benchmarks.clients.compare_client import Bursts, Ids, main, probe
from benchmarks.harness.lines import Handler
from lmpool.protocol.keys import Keys
from lmpool.protocol.prompt import encode_prompt

_UNDER_WAY_S = 0.5
"""By then a worker computes what was asked."""


class Client(Bursts):
    """Answers those requests too that older commits cannot answer."""

    def handlers(self) -> list[Handler]:
        """What may be asked, each under its own name."""
        return [*super().handlers(), self.entries, self.row_of, self.scored, self.keys, self.grow, self.beside]

    async def entries(self, times: int, at_once: int, count: int) -> float:
        """As `again`, but just `count` entries are wanted of each row, others of each."""
        before = self._producer.stats().cache_hits
        asked = [(ids, [token % self._producer.model.vocab_size for token in ids[:count]]) for ids in self._asked]
        waiting = iter(asked * times)

        async def consume() -> None:
            for ids, targets in waiting:
                await self._producer.logprobs(ids, targets=targets)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(at_once)])
        seconds = time.perf_counter() - start
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(asked):
            raise RuntimeError(f"{hits} of {times * len(asked)} requests were answered from the cache in Redis")
        return seconds

    async def row_of(self, prompts: list[Ids]) -> float:
        """Median seconds of one row, one request after the other."""
        return await self.median(self._producer.logprobs(ids) for ids in prompts)

    async def scored(self, prompts: list[Ids], tokens: int) -> float:
        """Median seconds of scoring the last `tokens` tokens of a prompt after those before, one after the other."""
        return await self.median(self._producer.score(ids[:-tokens], ids[-tokens:]) for ids in prompts)

    async def keys(self) -> list[str]:
        """Where the rows of the last `new` are: Redis keys in hexadecimal."""
        info = self._producer.model
        prefix = Keys().row(info.fingerprint)
        encoded = (
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens) for ids in self._asked
        )
        return [(prefix + prompt.digest).hex() for prompt in encoded]

    async def grow(self, contexts: list[Ids], steps: int) -> dict[str, Any]:
        """Seconds for contexts that grow by a token `steps` times; what they begin with is asked before the clock."""
        await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - steps]) for ids in contexts])
        start = time.perf_counter()
        for left in range(steps - 1, -1, -1):
            rows = await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - left]) for ids in contexts])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def beside(self, prompt: Ids, short_tokens: int) -> dict[str, Any]:
        """Seconds for a long prompt, and those of each short one that is asked meanwhile, one after the other.

        Raises:
            RuntimeError: it took so little time that none was asked.
        """
        long = asyncio.create_task(self.together([prompt]))
        await asyncio.sleep(_UNDER_WAY_S)
        waits = []
        while not long.done():
            (ids,) = self._fresh(1)
            began = time.perf_counter()
            await self._producer.logprobs(ids[:short_tokens])
            waits.append(time.perf_counter() - began)
        if not waits:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens was answered within {_UNDER_WAY_S} s")
        return {**await long, "waits": waits}


if __name__ == "__main__":
    uvloop.run(main(Client))
