"""Draws requests of every kind for a chaos run, and compares their results with the rows of the synthetic model."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ServerError
from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.picks import Sampling, sample, top
from lmpool.protocol.query import OPS, Op
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from tests.faults.chaos.settings import ChaosSettings

ADAPTER = "poet"
"""Name of the adapter that is added and replaced repeatedly while clients request rows with it."""
ADAPTED = "adapter"
"""Kind of a request for a row with the adapter."""
CHANGE = "change"
"""Kind of a request that adds or replaces the adapter."""
CONTEXTS = "contexts"
"""Kind of a request for one row of each context, in a group of contexts that grow in lockstep."""
OK, WRONG = "ok", "wrong"
"""First word of an outcome. The number of the adapter follows `OK`, and the prompt follows `WRONG`."""

_BATCH = 8
_RETRY_S = 0.2  # Seconds between two tries to read the vocabulary while the server restarts.
_SHARED = 40
_EPOCH_S = 2.0
_SHARED_FIRST, _CONTEXTS_FIRST = 2000, 1990
"""First token of prompts that all clients share, and of contexts; other prompts begin with the client's number."""
_RESAMPLED = 4
_RTOL, _ATOL = 1e-6, 1e-12
"""Tolerances of the values of a trie, each of which is a sum of some hundred numbers."""

Values = NDArray[Any]


class Question(NamedTuple):
    """One request to a pool.

    Attributes:
        kind: one of `ALL_KINDS`.
        size: number of prompts; each prompt counts as a request.
        ask: sends the request, and returns for each prompt `OK` or `WRONG` with further data.
    """

    kind: str
    size: int
    ask: Callable[[], Awaitable[Sequence[str]]]


class Load:
    """The endless sequence of requests of one client.

    Half of the prompts of row requests are new; all clients request the other half within the same two seconds.
    Requests of other kinds have unique prompts, so that prompts which are computed twice can be counted.

    Args:
        settings: settings of the chaos run.
        number: number of the client.
        producer: producer that sends the requests.
        adapters: the folder of the adapters.

    Attributes:
        has_adapter: whether an adapter is in service; while False, only one request names it, and waits for it.
    """

    def __init__(self, settings: ChaosSettings, number: int, producer: Producer, adapters: Path) -> None:
        self._settings = settings
        self._number = number
        self._producer = producer
        self._adapters = Adapters(settings.vocab_size, adapters)
        self._draw = random.Random(settings.seed * 100 + number)
        self._fresh = 0
        self._groups = 0
        self._trie: PooledTrie | None = None
        self.has_adapter = False
        # Send one request of each kind first, so that short runs have all kinds too.
        self._first = deque(KINDS)

    def next(self) -> Question:
        """Draw the next request, most often for a row."""
        if self._first:
            kind = self._first.popleft()
        else:
            kind = self._draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            kind = "row" if kind == ADAPTED and not self.has_adapter else kind
        return KINDS[kind][1](self)

    def rounds(self) -> Iterator[Question]:
        """Requests of contexts that grow in lockstep, as in a particle filter: copies of some replace others."""
        settings, draw, size = self._settings, self._draw, self._settings.vocab_size
        self._groups += 1
        begin = [_CONTEXTS_FIRST, self._number, self._groups % size, self._groups // size]
        begin += [draw.randrange(size) for _ in range(settings.context - len(begin))]
        contexts = [[*begin, particle] for particle in range(settings.particles)]
        for number in range(1, settings.rounds + 1):
            yield self._rows(CONTEXTS, contexts)
            rows = [self._row(context) for context in contexts]
            grown = [
                [*context, sample(row, Sampling(1.0, 1.0, draw.getrandbits(32)))]
                for context, row in zip(contexts, rows, strict=True)
            ]
            contexts = [draw.choice(grown) for _ in grown] if number % _RESAMPLED == 0 else grown

    def draw_pause(self, mean_s: float) -> float:
        """Draw the seconds until the next request of a task."""
        return self._draw.expovariate(1 / mean_s)

    def row(self) -> Question:
        """Request a row."""
        prompt = self._prompt()

        async def ask() -> list[str]:
            return [self._is_row(await self._producer.logprobs(prompt), prompt)]

        return Question("row", 1, ask)

    def batch(self) -> Question:
        """Request several rows."""
        return self._rows("batch", [self._prompt() for _ in range(_BATCH)])

    def targets(self) -> Question:
        """Request some entries of a row."""
        prompt, targets = self._new(), [self._draw.randrange(self._settings.vocab_size) for _ in range(5)]

        async def ask() -> list[str]:
            entries = await self._producer.logprobs(prompt, targets=targets)
            return [_outcome(_same(entries, self._row(prompt)[targets]), prompt)]

        return Question("targets", 1, ask)

    def fresh(self) -> Question:
        """Request a row that must not come from a cache."""
        prompt = self._new()

        async def ask() -> list[str]:
            return [self._is_row(await self._producer.logprobs(prompt, fresh=True), prompt)]

        return Question("fresh", 1, ask)

    def topk(self) -> Question:
        """Request the largest entries of a row."""
        prompt, k = self._new(), self._draw.randrange(1, 50)

        async def ask() -> list[str]:
            got, expected = await self._producer.topk(prompt, k), top(self._row(prompt), k)
            return [_outcome(_same(got.values, expected.values) and _same(got.ids, expected.ids), prompt)]

        return Question("topk", 1, ask)

    def sample(self) -> Question:
        """Request a token, drawn with a seed."""
        prompt, draw = self._new(), self._draw
        how = Sampling(draw.choice((0.0, 0.7, 1.0)), draw.choice((0.9, 1.0)), draw.getrandbits(32))

        async def ask() -> list[str]:
            token = await self._producer.sample(prompt, **how._asdict())
            return [_outcome(token == sample(self._row(prompt), how), prompt)]

        return Question("sample", 1, ask)

    def score(self) -> Question:
        """Request the scores of the tokens of a continuation."""
        prompt, size = self._new(), self._settings.vocab_size
        continuation = [self._draw.randrange(size) for _ in range(self._draw.randrange(1, 6))]

        async def ask() -> list[str]:
            got = await self._producer.score(prompt, continuation)
            expected = [self._row([*prompt, *continuation[:at]])[token] for at, token in enumerate(continuation)]
            return [_outcome(_same(got, np.array(expected, np.float32)), prompt)]

        return Question("score", 1, ask)

    def trie(self) -> Question:
        """Request values of the vocabulary's trie below a prefix, from a row that stays in the pool."""
        prompt, op = self._new(), self._draw.choice(OPS)
        tokens = _tokens(self._settings.vocab_size)
        prefix = self._draw.choice([token for token in tokens if len(token) > 1])[:1]

        async def ask() -> list[str]:
            if self._trie is None:
                self._trie = await self._open_trie()
            call = {"sum": self._trie.weight_sum, "max": self._trie.weight_max, "logsumexp": self._trie.logsumexp}[op]
            got, expected = await call(prompt=prompt, under=prefix), _below(tokens, prefix, op, self._row(prompt))
            is_right = got.shape == expected.shape and np.allclose(got, expected, rtol=_RTOL, atol=_ATOL)
            return [_outcome(is_right, prompt)]

        return Question("trie", 1, ask)

    async def _open_trie(self) -> PooledTrie:
        """Read the vocabulary. Checkouts before 0.2.0, which mixed runs use, fail at once while the server restarts."""
        end = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                return await self._producer.trie()
            except ServerError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_RETRY_S)

    def adapter(self) -> Question:
        """Request a row with the adapter that is in service."""
        prompt = self._new()

        async def ask() -> list[str]:
            row = await self._producer.logprobs(prompt, adapter=ADAPTER)
            number = self._adapters.which(prompt, row)
            return [_outcome(False, prompt) if number is None else f"{OK} {number}"]

        return Question(ADAPTED, 1, ask)

    def _rows(self, kind: str, prompts: Sequence[Sequence[int]]) -> Question:
        async def ask() -> list[str]:
            rows = await self._producer.batch_logprobs(prompts)
            return [self._is_row(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

        return Question(kind, len(prompts), ask)

    def _new(self) -> list[int]:
        size = self._settings.vocab_size
        self._fresh += 1
        return [self._number, self._fresh // size, self._fresh % size]

    def _prompt(self) -> list[int]:
        size = self._settings.vocab_size
        if self._draw.random() < 0.5:
            epoch = int(time.monotonic() / _EPOCH_S)
            return [_SHARED_FIRST, epoch % size, epoch // size % size, self._draw.randrange(_SHARED)]
        return self._new()

    def _row(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        return synthetic_row(prompt, vocab_size=self._settings.vocab_size)

    def _is_row(self, row: NDArray[np.float32], prompt: Sequence[int]) -> str:
        return _outcome(_same(row, self._row(prompt)), prompt)


KINDS: dict[str, tuple[float, Callable[[Load], Question]]] = {
    "row": (0.6, Load.row),
    "batch": (0.08, Load.batch),
    "targets": (0.04, Load.targets),
    "fresh": (0.04, Load.fresh),
    "topk": (0.04, Load.topk),
    "sample": (0.04, Load.sample),
    "score": (0.04, Load.score),
    "trie": (0.04, Load.trie),
    ADAPTED: (0.08, Load.adapter),
}
"""Kind of request -> its share of the requests of a task, and the method that makes a request."""
ALL_KINDS = (*KINDS, CONTEXTS, CHANGE)


class Adapters:
    """The adapters of a run, one folder each, numbered in the order in which they are put in service.

    Args:
        vocab_size: number of tokens of the model's vocabulary.
        folder: contains the folders of the adapters.
    """

    def __init__(self, vocab_size: int, folder: Path) -> None:
        self._vocab_size = vocab_size
        self._folder = folder
        self._backend = SyntheticBackend(SyntheticSettings(vocab_size=vocab_size))
        self._revisions: list[str] = []

    def make(self) -> Path:
        """Write the next adapter; return its folder."""
        place = self._folder / str(len(self._revisions))
        # Rename the folder when it is complete, so that other processes never see a part of it.
        unseen = place.with_suffix(".new")
        unseen.mkdir(parents=True)
        (unseen / "weights").write_text(f"adapter {place.name}")
        unseen.rename(place)
        self._look()
        return place

    def which(self, prompt: Sequence[int], row: NDArray[np.float32]) -> int | None:
        """Find the number of the adapter that a row was computed with; None if no adapter gives this row."""
        self._look()
        for number in reversed(range(len(self._revisions))):
            revision = self._revisions[number]
            if _same(row, synthetic_row(prompt, vocab_size=self._vocab_size, adapter_revision=revision)):
                return number
        return None

    def _look(self) -> None:
        while (place := self._folder / str(len(self._revisions))).exists():
            self._revisions.append(self._backend.load_adapter(ADAPTER, str(place)))


def _outcome(is_right: bool, prompt: Sequence[int]) -> str:
    return OK if is_right else f"{WRONG} for {list(prompt)}"


def _same(got: Values, expected: Values) -> bool:
    return got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@cache
def _tokens(vocab_size: int) -> list[bytes]:
    return list(synthetic_vocabulary(vocab_size).tokens)


def _below(tokens: Sequence[bytes], prefix: bytes, op: Op, row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the values of a trie's nodes one byte below a prefix, in the order of their bytes, without a trie."""
    groups: dict[int, list[int]] = {}
    for number, token in enumerate(tokens):
        if token.startswith(prefix) and len(token) > len(prefix):
            groups.setdefault(token[len(prefix)], []).append(number)
    logs = row.astype(np.float64)
    functions: dict[Op, Callable[[Values], float]] = {
        "sum": np.sum, "max": np.max, "logsumexp": np.logaddexp.reduce,
    }  # fmt: skip
    weights = logs if op == "logsumexp" else np.exp(logs)
    return np.array([functions[op](weights[groups[byte]]) for byte in sorted(groups)], np.float32)
