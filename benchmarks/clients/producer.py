"""A process with one producer, like a user's program: `python -m benchmarks.clients.producer`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import uvloop

from benchmarks.clients.compare_client import PROMPT_TOKENS, Bursts, Ids, main, probe
from benchmarks.harness.line_protocol import Handler
from benchmarks.teacher.targets import tokens_at
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.keys import Keys

_LOCK_STEP_TEXTS = 32  # Number of texts whose prefixes of one length are requested together.
_LATE_S = 10.0  # Seconds for which `steady_load` waits for the last rows.
_IN_FLIGHT_S = 0.5  # Seconds after which a worker surely computes a submitted prompt.


class Client(Bursts):
    """Handlers that use parts of the `Producer` API that older commits do not have."""

    def handlers(self) -> list[Handler]:
        """The methods that requests may call, by name."""
        ours: list[Handler] = [self.entries, self.row_of, self.scored, self.generated, self.sampled, self.keys]
        ours += [
            self.top_tokens,
            self.top_tokens_by_prefix,
            self.hidden_states,
            self.given_tokens,
            self.grow,
            self.with_short_prompts,
            self.particles,
            self.steady_load,
        ]
        return [*super().handlers(), *ours, self.latencies, self.again_in_batches, self.alone_again]

    async def again_in_batches(self, times: int, size: int) -> float:
        """Seconds to request the prompts of the last `new` again, `times` times, in batches of `size`."""
        start = time.perf_counter()
        for _ in range(times):
            for at in range(0, len(self._prompts), size):
                await self._producer.batch_logprobs(self._prompts[at : at + size])
        return time.perf_counter() - start

    async def alone_again(self, requests: int) -> float:
        """Median seconds of one request for a row in the pool's cache, with no other request in flight."""
        prompts = self._fresh(requests)
        await asyncio.gather(*map(self._producer.logprobs, prompts))
        return await self.median(self._producer.logprobs(ids) for ids in prompts)

    async def entries(self, times: int, concurrency: int, count: int) -> float:
        """Seconds to request `count` entries of each row of the last `new`, `times` times."""
        before = self._producer.stats().cache_hits
        requests = [(ids, [token % self._producer.model.vocab_size for token in ids[:count]]) for ids in self._prompts]
        waiting = iter(requests * times)

        async def consume() -> None:
            for ids, targets in waiting:
                await self._producer.logprobs(ids, targets=targets)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(concurrency)])
        seconds = time.perf_counter() - start
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(requests):
            raise RuntimeError(f"{hits} of {times * len(requests)} requests hit the cache in Redis")
        return seconds

    async def row_of(self, prompts: list[Ids]) -> float:
        """Median seconds to request the row of one prompt; the requests run one after the other."""
        return await self.median(self._producer.logprobs(ids) for ids in prompts)

    async def scored(self, prompts: list[Ids], tokens: int) -> float:
        """Median seconds to score the last `tokens` tokens of a prompt, one request after the other."""
        return await self.median(self._producer.score(ids[:-tokens], ids[-tokens:]) for ids in prompts)

    async def generated(self, prompts: list[Ids], tokens: int) -> float:
        """Seconds for a continuation of each prompt, with one request per continuation, all concurrent."""
        start = time.perf_counter()
        made = await self._producer.batch_generate(prompts, tokens, seed=int(self._random.integers(2**32)))
        if {len(continuation.ids) for continuation in made} != {tokens}:
            raise RuntimeError(f"not every continuation has {tokens} tokens")
        return time.perf_counter() - start

    async def sampled(self, prompts: list[Ids], tokens: int) -> float:
        """Seconds for a continuation of each prompt, with one request per token."""
        start, seed = time.perf_counter(), int(self._random.integers(2**32))

        async def grow(at: int, ids: Ids) -> None:
            for step in range(tokens):
                ids = [*ids, await self._producer.sample(ids, seed=seed + (at << 32) + step)]

        await asyncio.gather(*[grow(at, ids) for at, ids in enumerate(prompts)])
        return time.perf_counter() - start

    async def top_tokens(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """Request the top-k tokens at every position of texts; return seconds, and the values at the last position."""
        start = time.perf_counter()
        last: Any = (await self._producer.batch_positions(texts, top=top))[-1]
        values, _ = getattr(last, "top", last)  # Older releases return the values and ids themselves.
        return {"seconds": time.perf_counter() - start, "probe": probe(values[-1])}

    async def given_tokens(self, texts: list[Ids], count: int) -> dict[str, Any]:
        """Request `count` other tokens at each position, the next token, logZ and the tail; return seconds."""
        targets = [tokens_at(ids, count, self._producer.model.vocab_size) for ids in texts]
        start = time.perf_counter()
        wanted: Any = {"targets": targets, "next_token": True, "logz": True, "tail": True}
        found: Any = (await self._producer.batch_positions(texts, **wanted))[-1]
        return {"seconds": time.perf_counter() - start, "probe": probe(found.targets[-1])}

    async def hidden_states(self, texts: list[Ids]) -> dict[str, Any]:
        """Request the last hidden state of every position of texts, all at once; return seconds."""
        start = time.perf_counter()
        await asyncio.gather(*map(self._producer.hidden, texts))
        return {"seconds": time.perf_counter() - start}

    async def top_tokens_by_prefix(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """Like `top_tokens`, but request each prefix of a text; the texts have equal lengths, and grow in lock step."""
        start = time.perf_counter()
        for first in range(0, len(texts), _LOCK_STEP_TEXTS):
            batch = texts[first : first + _LOCK_STEP_TEXTS]
            for length in range(1, len(batch[0]) + 1):
                values, _ = await self._producer.batch_topk([ids[:length] for ids in batch], top)
        return {"seconds": time.perf_counter() - start, "probe": probe(values[-1])}

    async def keys(self) -> list[str]:
        """The Redis keys (hexadecimal) of the rows of the last `new`."""
        info = self._producer.model
        prefix = Keys().row(info.fingerprint)
        encoded = (
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens) for ids in self._prompts
        )
        return [(prefix + prompt.digest).hex() for prompt in encoded]

    async def grow(self, contexts: list[Ids], steps: int) -> dict[str, Any]:
        """Seconds to extend contexts by one token `steps` times; the clock starts after their first rows."""
        await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - steps]) for ids in contexts])
        start = time.perf_counter()
        for left in range(steps - 1, -1, -1):
            rows = await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - left]) for ids in contexts])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def with_short_prompts(self, prompt: Ids, short_tokens: int) -> dict[str, Any]:
        """Seconds for a long prompt, and for short prompts that are requested one by one during the long prompt."""
        long = asyncio.create_task(self.together([prompt]))
        await asyncio.sleep(_IN_FLIGHT_S)
        latencies = []
        while not long.done():
            (ids,) = self._fresh(1)
            began = time.perf_counter()
            await self._producer.logprobs(ids[:short_tokens])
            latencies.append(time.perf_counter() - began)
        if not latencies:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens took less than {_IN_FLIGHT_S} s: it is too short")
        return {**await long, "latencies": latencies}

    async def particles(self, prompt: Ids, number: int, steps: int) -> float:
        """Rows per second of a particle filter, which requests the rows of all distinct contexts in every step.

        All contexts begin with the prompt. Every second step resamples the contexts with cubes of random numbers as
        weights, so that few contexts have most children. In each step every context grows by a random token.
        """
        contexts, requests = np.tile(np.asarray(prompt), (number, 1)), 0
        start = time.perf_counter()
        for step in range(steps):
            # Shuffle, because `unique` sorts siblings next to each other.
            different = self._random.permutation(np.unique(contexts, axis=0))
            requests += len(await self._producer.batch_logprobs(different))
            if step % 2:
                weights = self._random.random(number) ** 3
                contexts = contexts[self._random.choice(number, number, p=weights / weights.sum())]
            grown = self._random.integers(0, self._producer.model.vocab_size, (number, 1))
            contexts = np.hstack([contexts, grown])
        return requests / (time.perf_counter() - start)

    async def steady_load(self, concurrency: int, warm_s: float, seconds: float, tokens: int = PROMPT_TOKENS) -> int:
        """Rows of new prompts that arrive within `seconds`, with `concurrency` requests always in flight."""
        begins = time.perf_counter() + warm_s
        ends, received = begins + seconds, 0

        async def consume() -> None:
            nonlocal received
            while time.perf_counter() < ends:
                (ids,) = self._fresh(1, tokens)
                await self._producer.logprobs(ids)
                received += begins <= time.perf_counter() < ends

        tasks = [asyncio.create_task(consume()) for _ in range(concurrency)]
        ended, late = await asyncio.wait(tasks, timeout=warm_s + seconds + _LATE_S)
        for task in late:  # Cancel requests that did not end within `_LATE_S`: a long text may take minutes.
            task.cancel()
        await asyncio.wait(tasks)
        for task in ended:
            task.result()
        return received

    async def latencies(
        self, concurrency: int, warm_s: float, seconds: float, tokens: int = PROMPT_TOKENS, pause_s: float = 0.0
    ) -> list[float]:
        """Seconds of each request that starts within `seconds`, with `concurrency` requests in flight."""
        begins = time.perf_counter() + warm_s
        taken: list[float] = []

        async def consume() -> None:
            while (began := time.perf_counter()) < begins + seconds:
                (ids,) = self._fresh(1, tokens)
                await self._producer.logprobs(ids)
                if began >= begins:
                    taken.append(time.perf_counter() - began)
                await asyncio.sleep(pause_s)

        await asyncio.gather(*[consume() for _ in range(concurrency)])
        return taken


if __name__ == "__main__":
    uvloop.run(main(Client))
