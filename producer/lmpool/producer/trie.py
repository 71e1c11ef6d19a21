"""The class `PooledTrie`, a client's trie, which requests node values from the pool or computes the values locally."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack
from weakref import WeakValueDictionary

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from lmpool import errors
from lmpool.aio import gather
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import CopiedAsItself, Session, SessionPerLoop
from lmpool.protocol.job import Prompt, digest_of, list_prompts
from lmpool.protocol.query import Op, Selection, SentWeights, TrieQuery
from lmpool.protocol.row import Values
from lmpool.settings import check_known
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.trie import Trie, check_weights
from lmpool.vocabulary import Vocabulary

_MAX_MISSING = 5  # Max tries of a request whose row or weights are missing in the pool.
_MAX_CHOICES = 4096  # Max prefixes whose child nodes are cached: the particles of a sampler repeat few prefixes.

_tries: WeakValueDictionary[str, Trie] = WeakValueDictionary()
"""The tries in use in this process, by the digest of their vocabulary."""


class TrieOptions(TypedDict, total=False):
    """Options of the methods of `PooledTrie`.

    Attributes:
        adapter: adapter of the prompt.
        nodes: ids of the nodes whose values are returned; values of other nodes are not sent.
        under: a prefix; the values of its children are returned, in the order of the children's bytes.
        timeout: seconds; by default the producer's timeout.
        local: whether to compute in this process; the default is the argument `local` of `Producer.trie`.
    """

    adapter: str
    nodes: Sequence[int] | NDArray[Any] | None
    under: bytes | None
    timeout: float | None
    local: bool | None


class _Choice(NamedTuple):
    """The nodes of a trie whose values a call requests.

    Attributes:
        size: number of nodes.
        nodes: int32 ids of the nodes, or None for all nodes.
        select: how the query selects the nodes.
        sent: encoded node ids in the query.
    """

    size: int
    nodes: NDArray[np.int32] | None
    select: Selection
    sent: bytes


class _Call(NamedTuple):
    """One call: the operation on the weights (sum, maximum, logsumexp), the requested nodes, and the deadline."""

    op: Op
    choice: _Choice
    deadline: Deadline


class PooledTrie(CopiedAsItself):
    """The prefix tree over a vocabulary; made by `Producer.trie`.

    Every node stands for a prefix of some tokens. A node's value is the sum or maximum of the weights of the tokens
    that begin with this prefix. Weights are a float32 array of shape (V,) (numpy, or torch on the CPU), which is not
    copied and must not change until the call returns. With a prompt in place of weights, the weights are the
    probabilities of the prompt's row (for `logsumexp` its log-probabilities), and the row is not fetched.

    All methods return float32 of shape (n_nodes,), or with `nodes` or `under` one value for each requested node, in
    the order of the nodes. Results of batches have one more axis in front. All methods raise

        InvalidWeights: weights have the wrong length or dtype, or contain NaN.
        UnknownNode: the trie has no node with a given id or prefix.
        SettingsError: both weights and prompt, or both `nodes` and `under`, are given; or neither weights nor prompt.
        UnknownVocabulary: the pool does not keep the vocabulary, although this client has just sent it.
        InvalidPrompt, UnknownModel, AmbiguousModel, UnknownAdapter: as `Producer.logprobs`, for a prompt.
        DeadlineExceeded, NoWorker, QueueFull, WorkerError, ServerError: as `Producer.logprobs`.

    Args:
        structure: the trie and its nodes.
        sessions: sessions with the model's workers.
        trie_sessions: sessions with the trie workers.
        timeout: seconds per request.
        local: whether to compute in this process.

    Attributes:
        structure: nodes, prefixes and children (`lmpool.trie.trie.Trie`).
    """

    def __init__(
        self, structure: Trie, sessions: SessionPerLoop, trie_sessions: SessionPerLoop, timeout: float, *, local: bool
    ) -> None:
        self.structure = structure
        # A job for trie workers has the vocabulary's digest as "prompt", so a worker with the vocabulary gets the job.
        self._prompt = Prompt(structure.digest.encode(), digest_of(structure.digest.encode()))
        self._sessions = sessions
        self._trie_sessions = trie_sessions
        self._timeout = timeout
        self._local = local
        self._kernels: Kernels | None = None
        self._opening = threading.Lock()
        self._under: dict[bytes, _Choice] = {}

    async def weight_sum(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """Return the sum of the weights below each node; see the class and `TrieOptions`."""
        return await self._request("sum", ws, prompt, options, is_batch=False)

    async def weight_max(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """Return the maximum of the weights below each node; see the class and `TrieOptions`."""
        return await self._request("max", ws, prompt, options, is_batch=False)

    async def logsumexp(self, logws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """Return the logarithm of the sum of the weights below each node; `logws` are logarithms of weights."""
        return await self._request("logsumexp", logws, prompt, options, is_batch=False)

    async def batch_weight_sum(self, ws: Any = None, *, prompts: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """Return the results of `weight_sum` for weights of shape (n, V) or for several prompts."""
        return await self._request("sum", ws, prompts, options)

    async def batch_weight_max(self, ws: Any = None, *, prompts: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """Return the results of `weight_max` for weights of shape (n, V) or for several prompts."""
        return await self._request("max", ws, prompts, options)

    async def batch_logsumexp(
        self, logws: Any = None, *, prompts: Any = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """Return the results of `logsumexp` for logarithms of shape (n, V) or for several prompts."""
        return await self._request("logsumexp", logws, prompts, options)

    async def _request(self, op: Op, ws: Any, prompts: Any, options: TrieOptions, *, is_batch: bool = True) -> Values:
        name, n_tokens = "prompts" if is_batch else "prompt", self.structure.n_tokens
        if (ws is None) == (prompts is None):
            given = "neither weights nor" if ws is None else "both weights and"
            raise errors.SettingsError(f"{name}: {given} {name} were given; exactly one of them is needed")
        check_known(options, TrieOptions.__annotations__)
        is_local = self._local if options.get("local") is None else bool(options["local"])
        deadline = Deadline.of(options.get("timeout"), self._timeout)
        call = _Call(op, self._choose(options.get("nodes"), options.get("under")), deadline)
        if ws is not None:
            weights = check_weights(ws, n_tokens, batch=is_batch).reshape(-1, n_tokens)
            if is_local:
                values = await asyncio.to_thread(self._compute, call, weights)
            else:
                values = np.empty((len(weights), call.choice.size), np.float32)
                if values.size:
                    await gather(map(partial(self._of_weights, call), weights, values))
        else:
            listed = list_prompts(prompts) if is_batch else [prompts]

            async def ask(session: Session, adapter: str) -> Values:
                return await self._of_prompts(call, session, [session.encode(ids, adapter) for ids in listed], is_local)

            values = await self._sessions.request(options.get("adapter", ""), deadline, ask)
        return values if is_batch else values[0]

    def _choose(self, nodes: Any, under: Any) -> _Choice:
        """Read the options `nodes` and `under`; raises UnknownNode for an unknown node or prefix."""
        trie = self.structure
        if nodes is not None and under is not None:
            raise errors.SettingsError("nodes: either nodes or under can be given, not both")
        if nodes is not None:
            ids = trie.check_nodes(nodes)
            return _Choice(len(ids), ids, "nodes", ids.astype("<i4").tobytes())
        if under is None:
            return _Choice(trie.n_nodes, None, "inner", b"")
        if not isinstance(under, bytes):
            raise errors.SettingsError(f"under: {under!r:.80} is not bytes: pass the prefix as bytes, such as b' the'")
        # Convert the prefix: a subclass of bytes may have another hash, such as genlm's `Token`.
        if (choice := self._under.get(prefix := bytes(under))) is None:
            if len(self._under) >= _MAX_CHOICES:
                self._under.clear()
            children = trie.children(node := trie.node(prefix))
            choice = self._under[prefix] = _Choice(len(children), children, "under", node.to_bytes(4, "little"))
        return choice

    def _compute(self, call: _Call, weights: Values) -> Values:
        """Compute node values in this process: weights (n, V) -> values (n, number of requested nodes)."""
        with self._opening:
            kernels = self._kernels = self._kernels or open_kernels(self.structure)
        if call.choice.nodes is None:
            return kernels.values(call.op, weights)
        return self.structure.pick(kernels.inner(call.op, weights), weights, call.choice.nodes)

    async def _of_weights(self, call: _Call, weights: Values, out: Values) -> None:
        """Request the values for weights of shape (V,), which are sent to a trie worker."""
        trie, choice = self.structure, call.choice
        session = await self._trie_sessions.open(call.deadline)

        async def ask() -> Values:
            sent = SentWeights(weights)
            packed = TrieQuery(call.op, trie.digest, choice.select, choice.sent, "", sent.name).pack()
            query = self._prompt.with_query(packed, trie.n_inner if choice.nodes is None else choice.size)
            return await session.answer(query, call.deadline, weights=sent)

        # Repeat the request: a restarted server loses the weights, and weights may expire while the job is queued.
        values = await self._insist(session, ask, call.deadline)
        if choice.nodes is None:
            trie.expand(values, weights, out)
        else:
            out[:] = values

    async def _of_prompts(self, call: _Call, session: Session, prompts: list[Prompt], is_local: bool) -> Values:
        """Return the values for the rows of prompts: (n, number of requested nodes)."""
        info, n_tokens = session.info, self.structure.n_tokens
        if n_tokens != info.vocab_size:
            text = f"rows of {info.name!r} have {info.vocab_size} entries, but the vocabulary has {n_tokens} tokens"
            raise errors.InvalidWeights(f"{text}: use `await producer.trie()` for the model's own")
        if is_local:

            async def row(prompt: Prompt) -> Values:
                row = session.cached(prompt)
                row = await session.answer(prompt, call.deadline) if row is None else row
                return row if call.op == "logsumexp" else np.exp(row)

            rows = np.array(await gather(map(row, prompts)), np.float32).reshape(-1, n_tokens)
            return await asyncio.to_thread(self._compute, call, rows)
        values = np.empty((len(prompts), call.choice.size), np.float32)
        if values.size:
            await gather(map(partial(self._of_row, call, session), prompts, values))
        return values

    async def _of_row(self, call: _Call, session: Session, prompt: Prompt, out: Values) -> None:
        """Request the values for a prompt's row from the model's workers or else trie workers; no row is fetched."""
        trie, choice, deadline = self.structure, call.choice, call.deadline
        is_whole = choice.nodes is None
        length = trie.n_inner + trie.n_tokens if is_whole else choice.size
        query = TrieQuery(call.op, trie.digest, "values" if is_whole else choice.select, choice.sent)

        values: Values | None = None
        if session.info.answers_tries:
            ask_model_workers = partial(session.answer, prompt.with_query(query.pack(), length), deadline)
            with suppress(errors.SourceMissing):  # The worker was started without --with-trie.
                values = await self._insist(session, ask_model_workers, deadline, 1)
        if values is None:
            trie_session = await self._trie_sessions.open(deadline)
            failure: errors.RequestFailed | None = None

            async def ask_trie_workers() -> Values:
                nonlocal failure
                if failure is not None:
                    # Have a missing row stored again. Fetching a damaged row makes a worker compute the row again.
                    is_missing = isinstance(failure, errors.SourceMissing)
                    await session.answer(prompt, deadline, warm=is_missing, whole=is_missing)
                # Read the fingerprint at each try, because it changes when the model is served with other weights.
                packed = structs.replace(query, rows=session.info.fingerprint, source=prompt.digest).pack()
                try:
                    return await trie_session.answer(self._prompt.with_query(packed, length), deadline)
                except (errors.SourceMissing, errors.CorruptRow) as error:
                    failure = error
                    raise

            values = await self._insist(trie_session, ask_trie_workers, deadline)
        if is_whole:
            trie.expand(values[: trie.n_inner], values[trie.n_inner :], out)
        else:
            out[:] = values

    async def _insist(
        self, session: Session, ask: Callable[[], Awaitable[Values]], deadline: Deadline, missing: int = _MAX_MISSING
    ) -> Values:
        """Repeat a request until the server has the vocabulary, and the row or weights, that the job names.

        The row or weights may be missing or damaged `missing` times; each new call of `ask` stores them again.
        """
        is_registered = False
        while True:
            try:
                return await ask()
            except errors.UnknownVocabulary:
                if is_registered:
                    raise
                is_registered = True
                await session.vocabularies.register(self.structure.vocabulary, deadline)
            except (errors.SourceMissing, errors.CorruptRow):
                missing -= 1
                if not missing:
                    raise

    def __repr__(self) -> str:
        return f"PooledTrie({self.structure!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        text = "pickle the producer, and have the unpickled one make the trie: `producer.trie(vocabulary)`"
        raise errors.LMPoolError(f"a trie belongs to its producer and cannot be pickled: {text}")


def trie_of(vocabulary: Vocabulary | Iterable[bytes]) -> Trie:
    """Return the trie over a vocabulary; callers in this process share one trie per vocabulary.

    Raises:
        InvalidVocabulary: `vocabulary` does not consist of byte strings, or exceeds a limit.
    """
    known = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
    return _tries.get(known.digest) or _tries.setdefault(known.digest, Trie(known))
