"""Draws the requests of a soak run and compares every result with the rows of the synthetic model."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.picks import Sampling, sample, top
from lmpool.synthetic import draw_few_tokens
from tests.faults.chaos.settings import ChaosSettings

ADAPTER = "poet"
"""Name of the only adapter; the first client puts it in service."""
HURRIED, CANCELLED, ADAPTED, CONTEXTS = "hurried", "cancelled", "adapter", "contexts"
"""Kinds of requests with a short deadline, that the client cancels, with an adapter, and of contexts that grow."""

_POPULAR = 2048  # Prompts that all clients repeat during one epoch.
_EPOCH_S = 15.0  # Seconds after which other prompts are popular; less than the lifetime of rows.
_POPULAR_FIRST, _CONTEXTS_FIRST = 62, 61  # First tokens of popular prompts and of contexts; others begin with 0 to 60.
_RESAMPLED = 4  # Tokens between two rounds in which copies of contexts replace others.
_TARGETS, _K, _CONTINUED = 5, 8, 4  # Entries, top tokens and tokens of a continuation per prompt.
_MAX_HURRY_S, _MAX_PATIENCE_S = 0.2, 0.05  # Max deadline of a hurried request, and max seconds before a cancellation.
_RTOL, _ATOL = 1e-6, 1e-12  # Tolerances of a trie's sums.

Prompts = Sequence[Sequence[int]]


class WrongValue(Exception):
    """A result differs from the reference. Attributes: the prompt, and both values as text."""

    def __init__(self, prompt: Sequence[int], got: object, expected: object) -> None:
        super().__init__(f"got {got}, expected {expected}")
        self.prompt, self.got, self.expected = list(prompt), str(got), str(expected)


class Request(NamedTuple):
    """One call: its kind, the number of its prompts, its deadline, and a function that sends it and checks results."""

    kind: str
    size: int
    timeout_s: float
    ask: Callable[[], Awaitable[None]]


class Traffic:
    """The endless sequence of requests of one client process.

    Args:
        settings: settings of the run; prompts and rows have `settings.vocab_size` tokens.
        number: number of the client process; later processes have larger numbers.
        producer: sends interactive requests.
        bulk: sends bulk requests.

    Attributes:
        revision: revision of the adapter in service; "" for none, and then no request names it.
    """

    def __init__(self, settings: ChaosSettings, number: int, producer: Producer, bulk: Producer) -> None:
        self._settings = settings
        self._first = [number // 61 % 61, number % 61]
        self._producer, self._bulk = producer, bulk
        self._draw = random.Random(settings.seed * 1000 + number)
        self._fresh = itertools.count()
        self._groups = itertools.count()
        self._trie: PooledTrie | None = None
        self._below: dict[bytes, NDArray[np.float32]] = {}
        self.revision = ""

    async def open(self) -> None:
        """Build the trie, and prepare the reference of its sums."""
        self._trie = await self._producer.trie()
        tokens = self._trie.structure.vocabulary.tokens
        for prefix in {token[:1] for token in tokens if len(token) > 1}:
            nexts = sorted({token[1] for token in tokens if token[:1] == prefix and len(token) > 1})
            below = [[token.startswith(prefix + bytes([value])) for token in tokens] for value in nexts]
            self._below[prefix] = np.array(below, np.float64)

    def next(self) -> Request:
        """Draw the next request."""
        kind = self._draw.choices(list(KINDS), _WEIGHTS)[0]
        return KINDS[ADAPTED if kind == ADAPTED and self.revision else "rows" if kind == ADAPTED else kind][1](self)

    def rounds(self) -> Any:
        """Requests of contexts that grow in lockstep, as in a particle filter: copies of some replace others."""
        settings, draw, group = self._settings, self._draw, next(self._groups)
        begin = [_CONTEXTS_FIRST, *self._first, *_digits(group, 3)]
        begin += [draw.randrange(settings.vocab_size) for _ in range(settings.context - len(begin))]
        contexts = [[*begin, particle] for particle in range(settings.particles)]
        for number in range(1, settings.rounds + 1):
            yield self._rows(CONTEXTS, contexts)
            seeds = [Sampling(1.0, 1.0, draw.getrandbits(32)) for _ in contexts]
            drawn = zip(contexts, self._reference(contexts), seeds, strict=True)
            grown = [[*context, sample(row, how)] for context, row, how in drawn]
            contexts = [draw.choice(grown) for _ in grown] if number % _RESAMPLED == 0 else grown

    def popular(self) -> Request:
        """Request rows that are nearly always cached."""
        epoch = int(time.monotonic() / _EPOCH_S)
        numbers = [self._draw.randrange(_POPULAR) for _ in range(32)]
        return self._rows("popular", [[_POPULAR_FIRST, *_digits(epoch, 3), *_digits(number, 2)] for number in numbers])

    def rows(self) -> Request:
        """Request rows that a worker computes."""
        return self._rows("rows", self._new(32))

    def row(self) -> Request:
        """Request one row that a worker computes."""
        (prompt,) = prompts = self._new(1)

        async def ask() -> None:
            self._compare(prompts, [await self._producer.logprobs(prompt)], self._reference(prompts))

        return self._request("row", 1, ask)

    def fresh(self) -> Request:
        """Request a row that must not come from a cache."""
        (prompt,) = prompts = self._new(1)

        async def ask() -> None:
            self._compare(prompts, [await self._producer.logprobs(prompt, fresh=True)], self._reference(prompts))

        return self._request("fresh", 1, ask)

    def entries(self) -> Request:
        """Request some entries of rows."""
        prompts, targets = self._new(16), self._draw.sample(range(self._settings.vocab_size), _TARGETS)

        async def ask() -> None:
            got = await self._producer.batch_logprobs(prompts, targets=targets)
            self._compare(prompts, got, self._reference(prompts)[:, targets])

        return self._request("entries", 16, ask)

    def topk(self) -> Request:
        """Request the largest entries of rows."""
        prompts = self._new(16)

        async def ask() -> None:
            got, expected = await self._producer.batch_topk(prompts, _K), [top(r, _K) for r in self._reference(prompts)]
            self._compare(prompts, got.values, [pick.values for pick in expected])
            self._compare(prompts, got.ids, [pick.ids for pick in expected])

        return self._request("topk", 16, ask)

    def sample(self) -> Request:
        """Request tokens, drawn with seeds."""
        prompts, seed = self._new(16), self._draw.getrandbits(32)

        async def ask() -> None:
            got = await self._producer.batch_sample(prompts, seed=seed, temperature=0.7)
            rows = enumerate(self._reference(prompts))
            self._compare(prompts, got, [np.int64(sample(row, Sampling(0.7, 1.0, seed + at))) for at, row in rows])

        return self._request("sample", 16, ask)

    def score(self) -> Request:
        """Request the scores of the tokens of continuations."""
        prompts, size = self._new(8), self._settings.vocab_size
        continuations = [[self._draw.randrange(size) for _ in range(_CONTINUED)] for _ in prompts]

        async def ask() -> None:
            got = await self._producer.batch_score(prompts, continuations)
            longer = [[*p, *c[:at]] for p, c in zip(prompts, continuations, strict=True) for at in range(_CONTINUED)]
            rows = self._reference(longer)
            expected = rows[np.arange(len(longer)), np.array(continuations).ravel()].reshape(len(prompts), _CONTINUED)
            self._compare(prompts, got, expected)

        return self._request("score", 8, ask)

    def trie(self) -> Request:
        """Request the sums below the children of a trie's node."""
        prompts, (prefix, below) = self._new(4), self._draw.choice(list(self._below.items()))

        async def ask() -> None:
            assert self._trie is not None
            got = await self._trie.batch_weight_sum(prompts=prompts, under=prefix)
            expected = np.exp(self._reference(prompts).astype(np.float64)) @ below.T
            for prompt, value, right in zip(prompts, got, expected, strict=True):
                if not np.allclose(value, right, rtol=_RTOL, atol=_ATOL):
                    raise WrongValue(prompt, value, right)

        return self._request("trie", 4, ask)

    def bulk(self) -> Request:
        """Request rows with the bulk priority."""
        prompts = self._new(64)

        async def ask() -> None:
            self._compare(prompts, await self._bulk.batch_logprobs(prompts), self._reference(prompts))

        return self._request("bulk", 64, ask)

    def adapter(self) -> Request:
        """Request rows with the adapter."""
        prompts, revision = self._new(8), self.revision

        async def ask() -> None:
            got = await self._producer.batch_logprobs(prompts, adapter=ADAPTER)
            try:
                self._compare(prompts, got, self._reference(prompts, revision))
            except WrongValue:  # The request was pending while another adapter replaced this adapter.
                if self.revision in (revision, ""):
                    raise
                self._compare(prompts, got, self._reference(prompts, self.revision))

        return self._request(ADAPTED, 8, ask)

    def hurried(self) -> Request:
        """Request rows with a short deadline, which may end with DeadlineExceeded."""
        prompts, timeout_s = self._new(8), self._draw.uniform(0.002, _MAX_HURRY_S)

        async def ask() -> None:
            got = await self._producer.batch_logprobs(prompts, timeout=timeout_s)
            self._compare(prompts, got, self._reference(prompts))

        return Request(HURRIED, 8, timeout_s, ask)

    def cancelled(self) -> Request:
        """Request rows and cancel the call soon; it may have ended before."""
        prompts, wait_s = self._new(8), self._draw.uniform(0.0, _MAX_PATIENCE_S)

        async def ask() -> None:
            call = asyncio.create_task(self._producer.batch_logprobs(prompts))
            await asyncio.wait([call], timeout=wait_s)
            call.cancel()
            with suppress(asyncio.CancelledError):
                self._compare(prompts, await call, self._reference(prompts))

        return Request(CANCELLED, 8, wait_s, ask)

    def _rows(self, kind: str, prompts: Prompts) -> Request:
        async def ask() -> None:
            self._compare(prompts, await self._producer.batch_logprobs(prompts), self._reference(prompts))

        return self._request(kind, len(prompts), ask)

    def _request(self, kind: str, size: int, ask: Callable[[], Awaitable[None]]) -> Request:
        return Request(kind, size, self._settings.timeout_s, ask)

    def _new(self, count: int) -> list[list[int]]:
        return [[*self._first, *_digits(number, 5)] for number in itertools.islice(self._fresh, count)]

    def _reference(self, prompts: Prompts, revision: str = "") -> NDArray[np.float32]:
        encoded = [(np.array(prompt, "<u4").tobytes(), revision) for prompt in prompts]
        rows: NDArray[np.float32] = draw_few_tokens(encoded, self._settings.vocab_size, 0)[0]
        return rows

    def _compare(self, prompts: Prompts, got: Sequence[Any] | NDArray[Any], expected: Any) -> None:
        """Raise WrongValue for the first prompt whose value differs from the reference in any bit."""
        given, right = np.asarray(got), np.asarray(expected)
        if given.dtype == right.dtype and given.shape == right.shape and given.tobytes() == right.tobytes():
            return
        for prompt, value, reference in zip(prompts, given, right, strict=True):
            if value.dtype != reference.dtype or value.tobytes() != reference.tobytes():
                raise WrongValue(prompt, value.tolist(), reference.tolist())
        raise WrongValue(prompts[0], given.shape, right.shape)


def _digits(number: int, count: int) -> list[int]:
    """The last `count` digits of a number in base 60, as token ids."""
    return [number // 60**place % 60 for place in reversed(range(count))]


KINDS: dict[str, tuple[float, Callable[[Traffic], Request]]] = {
    "popular": (0.24, Traffic.popular),
    "rows": (0.12, Traffic.rows),
    "row": (0.24, Traffic.row),
    "fresh": (0.02, Traffic.fresh),
    "entries": (0.06, Traffic.entries),
    "topk": (0.06, Traffic.topk),
    "sample": (0.06, Traffic.sample),
    "score": (0.04, Traffic.score),
    "trie": (0.04, Traffic.trie),
    "bulk": (0.03, Traffic.bulk),
    ADAPTED: (0.04, Traffic.adapter),
    HURRIED: (0.03, Traffic.hurried),
    CANCELLED: (0.02, Traffic.cancelled),
}
"""Kind of request -> its share of the calls, and the method that makes a request."""
_WEIGHTS = [weight for weight, _ in KINDS.values()]
ALL_KINDS = (*KINDS, CONTEXTS)
