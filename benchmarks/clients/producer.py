"""A process with one producer, as a user would write it: `python -m benchmarks.clients.producer`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import uvloop

from benchmarks.clients.compare_client import PROMPT_TOKENS, Bursts, Ids, main, probe
from benchmarks.harness.line_protocol import Handler
from lmpool.protocol.keys import Keys
from lmpool.protocol.prompt import encode_prompt

_TOGETHER = 32
# How long `steady_load` waits for the last rows.
_LATE_S = 10.0
_UNDER_WAY_S = 0.5
"""By then a worker computes what was asked."""


class Client(Bursts):
    """Answers those requests too that older commits cannot answer."""

    def handlers(self) -> list[Handler]:
        """What may be asked, each under its own name."""
        ours: list[Handler] = [self.entries, self.row_of, self.scored, self.generated, self.sampled, self.keys]
        ours += [
            self.top_tokens,
            self.top_tokens_by_prefix,
            self.grow,
            self.with_short_prompts,
            self.particles,
            self.steady_load,
        ]
        return [*super().handlers(), *ours, self.waits, self.again_in_batches, self.alone_again]

    async def again_in_batches(self, times: int, size: int) -> float:
        """Seconds for the rows of the last `new` this many times over, in batches."""
        start = time.perf_counter()
        for _ in range(times):
            for at in range(0, len(self._asked), size):
                await self._producer.batch_logprobs(self._asked[at : at + size])
        return time.perf_counter() - start

    async def alone_again(self, requests: int) -> float:
        """Median seconds of one request when nothing else is under way, each for a row that the pool's cache has."""
        requests = self._fresh(requests)
        await asyncio.gather(*map(self._producer.logprobs, requests))
        return await self.median(self._producer.logprobs(ids) for ids in requests)

    async def entries(self, times: int, concurrency: int, count: int) -> float:
        """As `again`, but just `count` entries are wanted of each row, others of each."""
        before = self._producer.stats().cache_hits
        requests = [(ids, [token % self._producer.model.vocab_size for token in ids[:count]]) for ids in self._asked]
        waiting = iter(requests * times)

        async def consume() -> None:
            for ids, targets in waiting:
                await self._producer.logprobs(ids, targets=targets)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(concurrency)])
        seconds = time.perf_counter() - start
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(requests):
            raise RuntimeError(f"{hits} of {times * len(requests)} requests were answered from the cache in Redis")
        return seconds

    async def row_of(self, prompts: list[Ids]) -> float:
        """Median seconds of one row, one request after the other."""
        return await self.median(self._producer.logprobs(ids) for ids in prompts)

    async def scored(self, prompts: list[Ids], tokens: int) -> float:
        """Median seconds of scoring the last `tokens` tokens of a prompt after those before, one after the other."""
        return await self.median(self._producer.score(ids[:-tokens], ids[-tokens:]) for ids in prompts)

    async def generated(self, prompts: list[Ids], tokens: int) -> float:
        """Seconds for a continuation of each prompt, all at once, each in one request."""
        start = time.perf_counter()
        made = await self._producer.batch_generate(prompts, tokens, seed=int(self._random.integers(2**32)))
        if {len(continuation.ids) for continuation in made} != {tokens}:
            raise RuntimeError(f"not every continuation has {tokens} tokens")
        return time.perf_counter() - start

    async def sampled(self, prompts: list[Ids], tokens: int) -> float:
        """As `generated`, but each token of each is a request of its own."""
        start, seed = time.perf_counter(), int(self._random.integers(2**32))

        async def grow(at: int, ids: Ids) -> None:
            for step in range(tokens):
                ids = [*ids, await self._producer.sample(ids, seed=seed + (at << 32) + step)]

        await asyncio.gather(*[grow(at, ids) for at, ids in enumerate(prompts)])
        return time.perf_counter() - start

    async def top_tokens(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """Seconds for the likeliest tokens at every position of texts, and the values at the last one."""
        start = time.perf_counter()
        values, _ = (await self._producer.batch_positions(texts, top=top))[-1]
        return {"seconds": time.perf_counter() - start, "probe": probe(values[-1])}

    async def top_tokens_by_prefix(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """As `told`, by a prompt for each position; the texts have one length, and `_TOGETHER` grow in lock step."""
        start = time.perf_counter()
        for first in range(0, len(texts), _TOGETHER):
            some = texts[first : first + _TOGETHER]
            for length in range(1, len(some[0]) + 1):
                values, _ = await self._producer.batch_topk([ids[:length] for ids in some], top)
        return {"seconds": time.perf_counter() - start, "probe": probe(values[-1])}

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

    async def with_short_prompts(self, prompt: Ids, short_tokens: int) -> dict[str, Any]:
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

    async def particles(self, prompt: Ids, number: int, steps: int) -> float:
        """Rows a second of a particle filter: in each step the rows of all contexts that differ are asked at once.

        All begin with the prompt. Every second step draws them anew, with the cubes of random numbers as weights: few
        have most children. Each then grows by a random token, for the rows of a synthetic model are random too.
        """
        contexts, requests = np.tile(np.asarray(prompt), (number, 1)), 0
        start = time.perf_counter()
        for step in range(steps):
            # Not in the order of `unique`, which has siblings side by side.
            different = self._random.permutation(np.unique(contexts, axis=0))
            requests += len(await self._producer.batch_logprobs(different))
            if step % 2:
                weights = self._random.random(number) ** 3
                contexts = contexts[self._random.choice(number, number, p=weights / weights.sum())]
            grown = self._random.integers(0, self._producer.model.vocab_size, (number, 1))
            contexts = np.hstack([contexts, grown])
        return requests / (time.perf_counter() - start)

    async def steady_load(self, concurrency: int, warm_s: float, seconds: float, tokens: int = PROMPT_TOKENS) -> int:
        """Rows of new prompts that arrive within some seconds, with `concurrency` awaits in flight all the time."""
        begins = time.perf_counter() + warm_s
        ends, came = begins + seconds, 0

        async def consume() -> None:
            nonlocal came
            while time.perf_counter() < ends:
                (ids,) = self._fresh(1, tokens)
                await self._producer.logprobs(ids)
                came += begins <= time.perf_counter() < ends

        tasks = [asyncio.create_task(consume()) for _ in range(concurrency)]
        ended, late = await asyncio.wait(tasks, timeout=warm_s + seconds + _LATE_S)
        for task in late:  # Long texts may take minutes, and no longer count.
            task.cancel()
        await asyncio.wait(tasks)
        for task in ended:
            task.result()
        return came

    async def waits(
        self, concurrency: int, warm_s: float, seconds: float, tokens: int = PROMPT_TOKENS, pause_s: float = 0.0
    ) -> list[float]:
        """Seconds that each of the requests of `steady_load` took that were asked within those seconds."""
        begins = time.perf_counter() + warm_s
        taken: list[float] = []

        async def consume() -> None:
            while (requests := time.perf_counter()) < begins + seconds:
                (ids,) = self._fresh(1, tokens)
                await self._producer.logprobs(ids)
                if requests >= begins:
                    taken.append(time.perf_counter() - requests)
                await asyncio.sleep(pause_s)

        await asyncio.gather(*[consume() for _ in range(concurrency)])
        return taken


if __name__ == "__main__":
    uvloop.run(main(Client))
