"""Tries from the client's side: values of the nodes, computed by the pool or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.kernels import Kernels, Op, open_kernels
from lmpool.producer.checks import check_timeout, iterate
from lmpool.producer.session import Within
from lmpool.producer.trie_asker import TrieAsker, Wanted
from lmpool.trie import Trie
from lmpool.vocab import Vocabulary
from lmpool.weights import check_weights

Values = NDArray[np.float32]

_built: WeakValueDictionary[str, Trie] = WeakValueDictionary()


class TrieOptions(TypedDict, total=False):
    """What the calls of `PooledTrie` take besides the weights.

    Attributes:
        adapter: adapter of the prompt.
        nodes: ids of the nodes that are wanted; the others are not sent.
        under: a prefix, whose children are wanted, in the order of their bytes.
        timeout: seconds; the producer's when left out.
        local: compute in this process; the trie's when left out.
    """

    adapter: str
    nodes: Sequence[int] | NDArray[Any] | None
    under: bytes | None
    timeout: float | None
    local: bool | None


_OPTIONS = TrieOptions.__annotations__.keys()
_MOST_REMEMBERED = 4096


class PooledTrie:
    """The prefix tree over a vocabulary; made by `Producer.trie`.

    Every node stands for a prefix of some tokens; its value is the sum or the maximum of the weights of the
    tokens that begin with it. Weights are a float32 array of shape (V,) (numpy, or torch on the CPU), or a prompt,
    from whose row they are made where the row is: its probabilities, for `logsumexp` its log-probabilities.

    All calls return float32 of shape (n_nodes,), or with `nodes` or `under` of the nodes that are wanted, in that
    order; batches one more axis in front. They raise

        InvalidWeights: wrong length or dtype, or NaN.
        UnknownNode: no such node or prefix.
        SettingsError: weights and prompt, or nodes and prefix, together; or no weights at all.
        InvalidPrompt, UnknownModel, AmbiguousModel, UnknownAdapter: as `Producer.logprobs`, for a prompt.
        DeadlineExceeded, NoWorker, QueueFull, WorkerError, ServerError: as `Producer.logprobs`.

    Args:
        structure: the nodes.
        asker: asks the pool.
        timeout: seconds that a request may take.
        local: compute in this process.

    Attributes:
        structure: nodes, prefixes and children (`lmpool.trie.Trie`).
    """

    def __init__(self, structure: Trie, asker: TrieAsker, timeout: float, *, local: bool) -> None:
        self.structure = structure
        self._asker = asker
        self._timeout = timeout
        self._local = local
        self._kernels: Kernels | None = None
        # Particles ask about the same few prefixes again and again.
        self._under: dict[bytes, Wanted] = {}

    async def weight_sum(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The sum of the weights below each node; see the class and `TrieOptions`."""
        return await self._one("sum", ws, prompt, options)

    async def weight_max(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The maximum of the weights below each node; see the class and `TrieOptions`."""
        return await self._one("max", ws, prompt, options)

    async def logsumexp(self, logws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The logarithm of the sum of the weights below each node, from their logarithms; see `TrieOptions`."""
        return await self._one("logsumexp", logws, prompt, options)

    async def batch_weight_sum(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `weight_sum`, for weights of shape (n, V) or several prompts."""
        return await self._many("sum", ws, prompts, options)

    async def batch_weight_max(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `weight_max`, for weights of shape (n, V) or several prompts."""
        return await self._many("max", ws, prompts, options)

    async def batch_logsumexp(
        self, logws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `logsumexp`, for logarithms of shape (n, V) or several prompts."""
        return await self._many("logsumexp", logws, prompts, options)

    async def _one(self, op: Op, ws: Any, prompt: Any, options: TrieOptions) -> Values:
        _check_source(ws, prompt, "prompt")
        weights = None if ws is None else check_weights(ws, self.structure.n_tokens, batch=False)
        wanted, within, is_local = self._read(options)
        adapter = options.get("adapter", "")
        if is_local:
            rows = weights if weights is not None else await self._asker.row(op, prompt, adapter, within)
            values: Values = (await self._compute(op, rows[None], wanted))[0]
            return values
        if weights is not None:
            return await self._asker.of_weights(op, weights, wanted, within)
        return await self._asker.of_prompt(op, prompt, adapter, wanted, within)

    async def _many(self, op: Op, ws: Any, prompts: Iterable[Any] | None, options: TrieOptions) -> Values:
        _check_source(ws, prompts, "prompts")
        wanted, within, is_local = self._read(options)
        adapter = options.get("adapter", "")
        if ws is not None:
            weights = check_weights(ws, self.structure.n_tokens, batch=True)
            if is_local:
                return await self._compute(op, weights, wanted)
            work = [self._asker.of_weights(op, row, wanted, within) for row in weights]
        else:
            asked = list(iterate(() if prompts is None else prompts))
            if is_local:
                rows = await _all([self._asker.row(op, prompt, adapter, within) for prompt in asked])
                return await self._compute(op, np.array(rows, np.float32).reshape(-1, self.structure.n_tokens), wanted)
            work = [self._asker.of_prompt(op, prompt, adapter, wanted, within) for prompt in asked]
        found = await _all(work)
        return np.array(found, np.float32).reshape(len(found), wanted.size)

    def _read(self, options: TrieOptions) -> tuple[Wanted, Within, bool]:
        if not options.keys() <= _OPTIONS:
            raise SettingsError(f"{min(options.keys() - _OPTIONS)}: not an option; there are {', '.join(_OPTIONS)}")
        timeout, local = options.get("timeout"), options.get("local")
        within = Within(self._timeout if timeout is None else check_timeout(timeout))
        wanted = self._wanted(options.get("nodes"), options.get("under"))
        return wanted, within, self._local if local is None else local

    def _wanted(self, nodes: Any, under: Any) -> Wanted:
        if nodes is not None or type(under) is not bytes:
            return Wanted.read(self.structure, nodes, under)
        wanted = self._under.get(under)
        if wanted is None:
            if len(self._under) >= _MOST_REMEMBERED:
                self._under.clear()
            wanted = self._under[under] = Wanted.read(self.structure, None, under)
        return wanted

    async def _compute(self, op: Op, weights: Values, wanted: Wanted) -> Values:
        """The values in this process, in a thread: (n, V) -> (n, number of nodes that are wanted)."""
        if self._kernels is None:
            self._kernels = await asyncio.to_thread(open_kernels, self.structure)
        kernels = self._kernels
        inner = await asyncio.to_thread(kernels.inner, op, weights)
        return wanted.take(inner, weights)

    def __repr__(self) -> str:
        return f"PooledTrie({self.structure!r})"


def trie_of(vocabulary: Vocabulary | Iterable[bytes]) -> Trie:
    """The trie over a vocabulary; one for all who use it in this process.

    Raises:
        InvalidVocabulary: not byte strings, or over a limit.
    """
    known = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
    trie = _built.get(known.digest)
    if trie is None:
        trie = _built[known.digest] = Trie(known)
    return trie


def _check_source(ws: Any, prompt: Any, name: str) -> None:
    if (ws is None) == (prompt is None):
        given = "neither" if ws is None else "both"
        raise SettingsError(f"{name}: {given} of weights and {name} were given; exactly one of them is needed")


async def _all(work: Sequence[Any]) -> list[Values]:
    """Await all; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
