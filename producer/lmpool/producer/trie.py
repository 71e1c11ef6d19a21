"""Tries from the client's side, `PooledTrie`: the values of the nodes, computed by the pool or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import gather, join_task
from lmpool.errors import (
    CorruptRow,
    InvalidWeights,
    LMPoolError,
    RequestFailed,
    SettingsError,
    SourceMissing,
    UnknownVocabulary,
)
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import CopiedAsItself, Session, SessionPerLoop
from lmpool.protocol.job import Prompt, digest_of, list_prompts
from lmpool.protocol.query import Op, Selection, SentWeights, TrieQuery
from lmpool.protocol.row import Values
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.trie import Trie, check_weights
from lmpool.vocabulary import Vocabulary

_MAX_MISSING = 5  # Times that the row or the weights of a request may be missing before it fails.
_MAX_CHOICES = 4096  # Prefixes whose children are remembered: particles request the same few again and again.

_tries: WeakValueDictionary[str, Trie] = WeakValueDictionary()
"""The tries in use in this process, by the digest of their vocabulary."""


class TrieOptions(TypedDict, total=False):
    """Options of the methods of `PooledTrie`.

    Attributes:
        adapter: adapter of the prompt.
        nodes: ids of the nodes to return; no other nodes are sent.
        under: a prefix whose children are returned, in the order of their bytes.
        timeout: seconds; by default the producer's.
        local: compute in this process; by default as the trie was made.
    """

    adapter: str
    nodes: Sequence[int] | NDArray[Any] | None
    under: bytes | None
    timeout: float | None
    local: bool | None


_OPTIONS = TrieOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class Choice:
    """The requested nodes of a trie.

    Attributes:
        trie: the trie.
        nodes: int32 ids; None for all.
        select: the query's selection for these nodes.
        sent: the query's node ids.
    """

    trie: Trie
    nodes: NDArray[np.int32] | None
    select: Selection
    sent: bytes

    @classmethod
    def read(cls, trie: Trie, nodes: Any, under: Any) -> Choice:
        """Read the options `nodes` and `under`.

        Raises:
            UnknownNode: no such node or prefix.
            SettingsError: both were given.
        """
        if nodes is not None and under is not None:
            raise SettingsError("nodes: either nodes or under can be given, not both")
        if nodes is not None:
            ids = trie.check_nodes(nodes)
            return cls(trie, ids, "nodes", ids.astype("<i4").tobytes())
        if under is not None:
            if not isinstance(under, bytes):
                raise SettingsError(f"under: {under!r:.80} is not bytes: pass the prefix as bytes, such as b' the'")
            node = trie.node(under)
            return cls(trie, trie.children(node), "under", node.to_bytes(4, "little"))
        return cls(trie, None, "inner", b"")

    @property
    def size(self) -> int:
        """Number of nodes."""
        return self.trie.n_nodes if self.nodes is None else len(self.nodes)

    def compute(self, kernels: Kernels, op: Op, weights: Values) -> Values:
        """Compute the values of the nodes in this process: (B, V) -> (B, size)."""
        if self.nodes is None:
            return kernels.values(op, weights)
        return self.trie.pick(kernels.inner(op, weights), weights, self.nodes)


class TrieQueries:
    """Sends trie queries to trie workers, and to model workers that answer tries themselves.

    Args:
        trie: the trie.
        sessions: sessions with the model's workers.
        trie_sessions: sessions with the trie workers.
    """

    def __init__(self, trie: Trie, sessions: SessionPerLoop, trie_sessions: SessionPerLoop) -> None:
        self._trie = trie
        # The "prompt" of a job for trie workers is the vocabulary's digest, so its home has the vocabulary in memory.
        self._prompt = Prompt(trie.digest.encode(), digest_of(trie.digest.encode()))
        self.sessions = sessions
        self._trie_sessions = trie_sessions

    async def of_weights(
        self, op: Op, weights: Values, choice: Choice, deadline: Deadline, out: Values | None = None
    ) -> Values:
        """Request the values for weights of shape (V,), which are sent to a trie worker.

        Args:
            op: the operation over the weights.
            weights: float32 (V,); they must not change before this returns.
            choice: the nodes.
            deadline: when to give up.
            out: an array for the values.
        """
        if choice.size == 0:
            return _put(np.empty(0, np.float32), out)
        length = self._trie.n_inner if choice.nodes is None else choice.size
        session = await self._trie_sessions.open(deadline)

        async def ask() -> Values:
            sent = SentWeights(weights)
            packed = TrieQuery(op, self._trie.digest, choice.select, choice.sent, "", sent.name).pack()
            return await session.answer(self._prompt.with_query(packed, length), deadline, weights=sent)

        # The server may have lost the weights: it restarted, or they expired in the queue.
        values = await self._insist(session, ask, deadline)
        return self._trie.expand(values, weights, out) if choice.nodes is None else _put(values, out)

    def encode(self, session: Session, prompts: Iterable[Any], adapter: str) -> list[Prompt]:
        """Check and encode all prompts before any is sent.

        Raises:
            InvalidPrompt: one is malformed for this model.
            InvalidWeights: the model's rows are not as long as the vocabulary.
        """
        encoded = [session.encode(ids, adapter) for ids in prompts]
        info, tokens = session.info, self._trie.n_tokens
        if tokens != info.vocab_size:
            raise InvalidWeights(
                f"the rows of the model {info.name!r} have {info.vocab_size} entries, but the vocabulary has {tokens} "
                "tokens: use `await producer.trie()` for the model's own"
            )
        return encoded

    async def of_prompt(
        self, op: Op, session: Session, prompt: Prompt, choice: Choice, deadline: Deadline, out: Values | None = None
    ) -> Values:
        """Request the values for a prompt's row, which is not fetched; see `of_weights`."""
        if choice.size == 0:
            return _put(np.empty(0, np.float32), out)
        trie = self._trie
        length = trie.n_inner + trie.n_tokens if choice.nodes is None else choice.size
        query = TrieQuery(op, trie.digest, "values" if choice.nodes is None else choice.select, choice.sent)
        values = await self._of_row(session, prompt, query, length, deadline)
        if choice.nodes is None:
            return trie.expand(values[: trie.n_inner], values[trie.n_inner :], out)
        return _put(values, out)

    async def row(self, op: Op, session: Session, prompt: Prompt, deadline: Deadline) -> Values:
        """The weights of a prompt, (V,), for computing in this process."""
        row = session.cached(prompt)
        if row is None:
            row = await session.answer(prompt, deadline)
        return row if op == "logsumexp" else np.exp(row)

    async def _of_row(
        self, session: Session, prompt: Prompt, query: TrieQuery, length: int, deadline: Deadline
    ) -> Values:
        async def ask_model_workers() -> Values:
            return await session.answer(prompt.with_query(query.pack(), length), deadline)

        if session.info.answers_tries:
            try:
                return await self._insist(session, ask_model_workers, deadline, 1)
            except SourceMissing:
                pass  # A worker of this model was started without --with-trie.
        trie_session = await self._trie_sessions.open(deadline)

        async def ask_trie_workers() -> Values:
            # Read at each try: the fingerprint changes when the model is served with other weights.
            source = session.info.fingerprint, prompt.digest
            packed = TrieQuery(query.op, query.vocabulary, query.select, query.nodes, *source).pack()
            return await trie_session.answer(self._prompt.with_query(packed, length), deadline)

        async def compute(error: RequestFailed) -> None:
            # Fetching a damaged row makes a worker compute it again.
            is_missing = isinstance(error, SourceMissing)
            await session.answer(prompt, deadline, warm=is_missing, whole=is_missing)

        return await self._insist(trie_session, ask_trie_workers, deadline, repair=compute)

    async def _insist(
        self,
        session: Session,
        ask: Callable[[], Awaitable[Values]],
        deadline: Deadline,
        missing: int = _MAX_MISSING,
        repair: Callable[[RequestFailed], Awaitable[None]] | None = None,
    ) -> Values:
        """Repeat a request until the server has everything that the job names.

        Args:
            session: the session with the workers that answer.
            ask: sends the request once.
            deadline: when to give up.
            missing: how often the row or the weights may be missing or damaged.
            repair: stores them again; without it `ask` does.

        Raises:
            UnknownVocabulary: the pool does not keep the vocabulary although it was sent there.
            SourceMissing, CorruptRow: the row or the weights were missing or damaged too often.
            LMPoolError: any error of `ask`, of `repair`, or of registering the vocabulary.
        """
        is_registered = False
        while True:
            try:
                return await ask()
            except UnknownVocabulary:
                if is_registered:
                    raise
                is_registered = True
                await session.vocabularies.register(self._trie.vocabulary, deadline)
            except (SourceMissing, CorruptRow) as error:
                missing -= 1
                if not missing:
                    raise
                if repair is not None:
                    await repair(error)


class PooledTrie(CopiedAsItself):
    """The prefix tree over a vocabulary; made by `Producer.trie`.

    Every node stands for a prefix of some tokens. Its value is the sum or the maximum of the weights of the tokens that
    begin with the prefix. Weights are a float32 array of shape (V,) (numpy, or torch on the CPU), which is not copied
    and must not change until the call returns. Or they come from the row of a prompt: its probabilities, or for
    `logsumexp` its log-probabilities. The row is not fetched.

    All methods return float32 of shape (n_nodes,), or with `nodes` or `under` one value for each requested node, in
    that order. Batches have one more axis in front. They raise

        InvalidWeights: wrong length or dtype, or NaN.
        UnknownNode: no such node or prefix.
        SettingsError: weights and prompt, or nodes and prefix, together; or no weights at all.
        UnknownVocabulary: the pool does not keep the vocabulary, though it was just sent there.
        InvalidPrompt, UnknownModel, AmbiguousModel, UnknownAdapter: as `Producer.logprobs`, for a prompt.
        DeadlineExceeded, NoWorker, QueueFull, WorkerError, ServerError: as `Producer.logprobs`.

    Args:
        structure: the nodes.
        queries: sends queries to the pool.
        timeout: seconds per request.
        local: compute in this process.

    Attributes:
        structure: nodes, prefixes and children (`lmpool.trie.trie.Trie`).
    """

    def __init__(self, structure: Trie, queries: TrieQueries, timeout: float, *, local: bool) -> None:
        self.structure = structure
        self._queries = queries
        self._timeout = timeout
        self._local = local
        self._kernels: Kernels | None = None
        self._opening: asyncio.Task[Kernels] | None = None
        self._under: dict[bytes, Choice] = {}

    async def weight_sum(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The sum of the weights below each node; see the class and `TrieOptions`."""
        return await self._request("sum", ws, prompt, options)

    async def weight_max(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The maximum of the weights below each node; see the class and `TrieOptions`."""
        return await self._request("max", ws, prompt, options)

    async def logsumexp(self, logws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """The logarithm of the sum of the weights below each node, from their logarithms; see `TrieOptions`."""
        return await self._request("logsumexp", logws, prompt, options)

    async def batch_weight_sum(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `weight_sum`, for weights of shape (n, V) or several prompts."""
        return await self._request_batch("sum", ws, prompts, options)

    async def batch_weight_max(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `weight_max`, for weights of shape (n, V) or several prompts."""
        return await self._request_batch("max", ws, prompts, options)

    async def batch_logsumexp(
        self, logws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `logsumexp`, for logarithms of shape (n, V) or several prompts."""
        return await self._request_batch("logsumexp", logws, prompts, options)

    async def _request(self, op: Op, ws: Any, prompt: Any, options: TrieOptions) -> Values:
        _check_source(ws, prompt, "prompt")
        if ws is not None:
            weights = check_weights(ws, self.structure.n_tokens, batch=False)
            choice, deadline, is_local = self._read(options)
            if is_local:
                values: Values = (await self._compute(op, weights[None], choice))[0]
                return values
            return await self._queries.of_weights(op, weights, choice, deadline)
        value: Values = (await self._of_prompts(op, [prompt], options))[0]
        return value

    async def _request_batch(self, op: Op, ws: Any, prompts: Iterable[Any] | None, options: TrieOptions) -> Values:
        _check_source(ws, prompts, "prompts")
        if prompts is not None:
            return await self._of_prompts(op, list_prompts(prompts), options)
        weights = check_weights(ws, self.structure.n_tokens, batch=True)
        choice, deadline, is_local = self._read(options)
        if is_local:
            return await self._compute(op, weights, choice)
        out = np.empty((len(weights), choice.size), np.float32)
        queries, pairs = self._queries, zip(weights, out, strict=True)
        await gather([queries.of_weights(op, weight, choice, deadline, row) for weight, row in pairs])
        return out

    async def _of_prompts(self, op: Op, prompts: list[Any], options: TrieOptions) -> Values:
        """The values for the rows of prompts: (n, number of requested nodes)."""
        choice, deadline, is_local = self._read(options)
        queries = self._queries

        async def ask(session: Session, adapter: str) -> Values:
            encoded = queries.encode(session, prompts, adapter)
            if is_local:
                rows = await gather([queries.row(op, session, prompt, deadline) for prompt in encoded])
                return await self._compute(op, np.array(rows, np.float32).reshape(-1, self.structure.n_tokens), choice)
            out = np.empty((len(encoded), choice.size), np.float32)
            pairs = zip(encoded, out, strict=True)
            await gather([queries.of_prompt(op, session, prompt, choice, deadline, row) for prompt, row in pairs])
            return out

        return await queries.sessions.request(options.get("adapter", ""), deadline, ask)

    def _read(self, options: TrieOptions) -> tuple[Choice, Deadline, bool]:
        if not options.keys() <= _OPTIONS:
            raise SettingsError(f"{min(options.keys() - _OPTIONS)}: not an option; options are {', '.join(_OPTIONS)}")
        timeout, local = options.get("timeout"), options.get("local")
        deadline = Deadline.of(timeout, self._timeout)
        choice = self._choose(options.get("nodes"), options.get("under"))
        return choice, deadline, self._local if local is None else local

    def _choose(self, nodes: Any, under: Any) -> Choice:
        if nodes is not None or type(under) is not bytes:
            return Choice.read(self.structure, nodes, under)
        choice = self._under.get(under)
        if choice is None:
            if len(self._under) >= _MAX_CHOICES:
                self._under.clear()
            choice = self._under[under] = Choice.read(self.structure, None, under)
        return choice

    async def _compute(self, op: Op, weights: Values, choice: Choice) -> Values:
        """Compute the values in a thread of this process: (n, V) -> (n, number of requested nodes)."""
        kernels = self._kernels or await self._open()
        return await asyncio.to_thread(choice.compute, kernels, op, weights)

    async def _open(self) -> Kernels:
        """The kernels. Concurrent callers share one attempt; after a failure the next caller tries again."""
        loop, opening = asyncio.get_running_loop(), self._opening
        if opening is None or opening.done() or opening.get_loop() is not loop:
            opening = self._opening = loop.create_task(asyncio.to_thread(open_kernels, self.structure))
        self._kernels = await join_task(opening)
        return self._kernels

    def __repr__(self) -> str:
        return f"PooledTrie({self.structure!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise LMPoolError(
            "a PooledTrie is its producer's and cannot be pickled: pickle the producer, and have the unpickled one "
            "make the trie: `await producer.trie(vocabulary)`"
        )


def trie_of(vocabulary: Vocabulary | Iterable[bytes]) -> Trie:
    """The trie over a vocabulary; callers in this process share one.

    Raises:
        InvalidVocabulary: not byte strings, or over a limit.
    """
    known = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
    trie = _tries.get(known.digest)
    if trie is None:
        trie = _tries[known.digest] = Trie(known)
    return trie


def _check_source(ws: Any, prompt: Any, name: str) -> None:
    if (ws is None) == (prompt is None):
        given = "neither weights nor" if ws is None else "both weights and"
        raise SettingsError(f"{name}: {given} {name} were given; exactly one of them is needed")


def _put(values: Values, out: Values | None) -> Values:
    """Copy the values to `out`, if there is one."""
    if out is None:
        return values
    out[:] = values
    return out
