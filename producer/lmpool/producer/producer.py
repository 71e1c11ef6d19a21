"""The producer, the asyncio client of a pool: `await producer.logprobs(ids)`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.broker.server import RedisLike, Server, where
from lmpool.errors import LMPoolError, SettingsError
from lmpool.metrics import is_traced
from lmpool.producer.client.queries import Mode, ask_all, ask_entries, ask_fresh, ask_logits, entries_of
from lmpool.producer.client.requests import Counters, ProducerStats, RowLRU
from lmpool.producer.client.session import Priority, Session, WhenAbsent, WhenFull
from lmpool.producer.client.session_per_loop import CopiedAsItself, SessionPerLoop
from lmpool.producer.client.tracing import Traces
from lmpool.producer.deadline import Deadline, check_timeout
from lmpool.producer.options import check_mode, read_batch_targets, read_targets
from lmpool.producer.partial import PartialRows, encode_all
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, check_package
from lmpool.producer.trie import PooledTrie, TrieQueries, trie_of
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.protocol.prompt import encode_prompt, list_prompts
from lmpool.settings import check_choice, check_name, shown
from lmpool.vocabulary import Vocabulary


class Producer(CopiedAsItself, PartialRows):
    """Asks a pool for rows, and for less than a row (see `PartialRows`).

    Use it as an async context manager, or as it is: the first request connects. One producer serves any
    number of concurrent awaits, and survives several `asyncio.run` calls in a row.

    A pickle holds the arguments below, a password in the URL included, and no rows or connections: what is unpickled,
    in another process, connects with its first request, to the same model. A copy is the producer itself.

    Args:
        model: name of a served model; None means the only one that is served. Trie workers have the name `trie`
            to themselves.
        redis: URL, or a redis-py client whose address and credentials are taken over; None means the
            environment's `LMPOOL_REDIS_URL`, then this user's embedded server.
        timeout: seconds that a request may take, unless the call says otherwise.
        cache_bytes: bytes of rows that this producer keeps in its own memory; 0 for none. Rows of this host's shared
            memory are kept from their second use on.
        prefix: prefix of the pool's Redis keys.
        when_full: what a request does while the model's queue is at its limit: "wait" for room until its deadline, or
            "raise" QueueFull at once.
        when_absent: what opening and asking do while no worker serves the model, or none has ever served it, and
            while no server answers: "wait" until their deadline, or "raise" UnknownModel and ServerUnreachable at
            once, and NoWorker when a worker has been missing for a lease (5 s at least).
        priority: whose turn it is where prompts wait: "interactive" clients take turns with one another; "bulk" is for
            what nobody waits for at a screen, such as a file of texts: its prompts go behind all others, and get what
            these leave, and a sixteenth at least.
        keep_answers: whether answers to queries (likeliest tokens, draws, scores, positions) stay in the pool's cache
            for a minute, for whoever asks the same. False removes each as soon as it has been read: a program that asks
            about a million texts would fill the server with what nobody asks for again.
        tracing: whether OpenTelemetry gets a span of each call, whose context goes with the jobs (needs
            `lmpool[tracing]`, and a tracer provider that the program has set up); None for what the environment's
            `LMPOOL_TRACING` says, 1 or 0. Calls of tries and changes of adapters have none.

    Raises:
        SettingsError: a value is malformed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        redis: RedisLike | None = None,
        timeout: float = 60.0,
        cache_bytes: int = 256 * 1024 * 1024,
        prefix: str = "lmpool",
        when_full: WhenFull = "wait",
        when_absent: WhenAbsent = "raise",
        priority: Priority = "interactive",
        keep_answers: bool = True,
        tracing: bool | None = None,
    ) -> None:
        _check_model(model)
        check_name("prefix", prefix)
        check_choice("when_full", when_full, get_args(WhenFull))
        check_choice("when_absent", when_absent, get_args(WhenAbsent))
        check_choice("priority", priority, get_args(Priority))
        if type(keep_answers) is not bool:
            raise SettingsError(f"keep_answers: {shown(keep_answers)} must be True or False")
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise SettingsError(f"cache_bytes: {cache_bytes!r} must be a whole number of at least 0")
        if redis is not None and not isinstance(redis, get_args(RedisLike)):
            raise SettingsError(f"redis: {type(redis).__name__} is neither a URL nor a redis-py client")
        self._timeout = check_timeout(timeout)
        self._model = model
        self._redis = redis
        self._options = {
            "timeout": timeout,
            "cache_bytes": cache_bytes,
            "prefix": prefix,
            "when_full": when_full,
            "when_absent": when_absent,
            "priority": priority,
            "keep_answers": keep_answers,
            "tracing": tracing,
        }
        self._traces = Traces(model) if is_traced(tracing) else None
        self._keys = Keys(prefix)
        self._heads = {}
        self._cache = RowLRU(cache_bytes)
        self._stats = ProducerStats()
        self._counters = Counters(self._stats, self._cache)
        self._sessions = SessionPerLoop(
            lambda: Server(redis),
            lambda server: Session(
                server,
                self._keys,
                self._cache,
                self._stats,
                self._counters,
                when_full,
                when_absent,
                priority,
                keep_answers,
                self._traces,
            ),
            model,
            when_absent,
        )
        # Answers of trie workers are not kept here: they are made from weights that nobody has twice, or from rows, and
        # then they are in the pool's cache.
        self._trie_sessions = SessionPerLoop(
            lambda: Server(redis),
            lambda server: Session(
                server, self._keys, RowLRU(0), ProducerStats(), None, when_full, when_absent, priority
            ),
            TRIE_SERVICE,
            when_absent,
        )

    async def logprobs(
        self,
        ids: Any,
        *,
        targets: Any = None,
        mode: Mode = "logprobs",
        fresh: bool = False,
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """The log-probabilities of the token that follows a prompt.

        Args:
            ids: list, tuple or 1-D integer array (numpy, torch) of token ids.
            targets: token ids, if only their entries are wanted: they are read where the row is cached, and only they
                travel.
            mode: "logits" for the logits as the model computed them, in place of log-probabilities. They are computed
                anew, on the keys and values that workers keep, but where a worker still has the row in 16 bits.
            fresh: have the row computed now, whatever caches hold; it is not cached.
            adapter: one of the model's adapters (see `adapters`); "" for none.
            timeout: seconds; None for the producer's.

        Returns:
            read-only float32 array of shape (V,); with `targets` one of shape (k,), in their order, the caller's own.

        Raises:
            InvalidPrompt: `ids` is not a prompt for this model, or `targets` are not token ids of it.
            DeadlineExceeded, NoWorker, QueueFull: no row came in time.
            WorkerError: the backend failed on this prompt.
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
            UnknownAdapter: the model has no adapter of that name.
        """
        # Nearly all requests are like this: no coroutine within another for them.
        session = self._sessions.current(asyncio.get_running_loop())
        is_usual = targets is None and mode == "logprobs" and fresh is False and adapter == ""
        if session is None or not is_usual or self._traces is not None:
            return await self._logprobs(ids, targets, mode, fresh, adapter, timeout)
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        info = session.info
        prompt = encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
        row = session.cached(prompt)
        if row is not None:
            return row
        waiter = session.begin(prompt, session.loop.time() + seconds, seconds)
        try:
            return await waiter.future
        finally:
            session.end(waiter)

    async def _logprobs(
        self, ids: Any, targets: Any, mode: Mode, fresh: bool, adapter: str, timeout: float | None
    ) -> NDArray[np.float32]:
        """Any request for a row, or for entries of one."""
        if type(fresh) is not bool:
            raise SettingsError(f"fresh: {shown(fresh)} must be True or False")
        if check_mode(mode) == "logits" and fresh:
            raise SettingsError("fresh: True, of rows only: not with mode='logits'")

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[np.float32]:
            prompt = session.encode(ids, name)
            entries = None if targets is None else read_targets(targets, session.info.vocab_size)
            if mode == "logits":
                return await ask_logits(session, prompt, entries or [], deadline)
            if fresh:
                fresh_row = await ask_fresh(session, prompt, deadline)
                return fresh_row if entries is None else entries_of(fresh_row, entries)
            if entries is not None:
                return await ask_entries(session, prompt, entries, deadline)
            row = session.cached(prompt)
            return row if row is not None else await session.answer(prompt, deadline)

        return await self._request(adapter, timeout, ask)

    async def batch_logprobs(
        self,
        prompts: Iterable[Any],
        *,
        targets: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """The rows of several prompts; all prompts are checked before the first is sent.

        Args:
            prompts: prompts, each as `logprobs` takes it (or a 2-D integer array).
            targets: token ids, if only their entries are wanted: k for all prompts, or (n, k) for each its own.
            mode: as `logprobs`.
            adapter: as `logprobs`, for all of them.
            timeout: seconds for all of them together; None for the producer's.

        Returns:
            float32 array of shape (n, V), or (n, k) with `targets`; the caller's own.

        Raises:
            As `logprobs`; the first failure ends the batch. One that concerns one prompt begins with its index, such as
            "prompts[3]: ".
        """
        listed, of_logits = list_prompts(prompts), check_mode(mode) == "logits"

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[np.float32]:
            encoded, vocab_size = encode_all(session, listed, name), session.info.vocab_size
            if targets is None and not of_logits:
                return await session.answer_all(encoded, deadline)
            entries: list[list[int]] = [[]] * len(encoded)
            count = vocab_size
            if targets is not None:
                entries, count = read_batch_targets(targets, len(encoded), vocab_size)
            ask_one = ask_logits if of_logits else ask_entries
            return await ask_all(session, encoded, entries, count, deadline, ask_one)

        return await self._request(adapter, timeout, ask)

    async def adapters(self, *, timeout: float | None = None) -> dict[str, str]:
        """The adapters that requests may name now: name -> revision, a digest of its weights.

        Args:
            timeout: seconds; None for the producer's.

        Raises:
            ServerError, DeadlineExceeded, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout)
        session = await self._sessions.open(deadline)
        return await session.adapters.all(deadline)

    async def add_adapter(self, name: str, source: str | Path, *, timeout: float | None = None) -> str:
        """Put a LoRA adapter in service, or another one instead of the adapter that has this name.

        One worker loads it as a check; each other worker loads it when a request first needs it. When this returns, no
        client gets a row of the adapter that it replaces. If the worker refuses it, nothing changes.

        Args:
            name: requests name the adapter by it.
            source: its folder on the workers' machines, or its name on the hub where they run with --adapter-hub. The
                path of a folder that exists on this machine is made absolute.
            timeout: seconds; None for the producer's. Replacing an adapter takes 2.5 s at least.

        Returns:
            its revision, a digest of its weights.

        Raises:
            SettingsError: `name` or `source` is malformed, or the model has as many adapters as it may have.
            AdapterRefused: the worker cannot load it (no such folder, it does not fit the model, ...), or terminated
                while it loaded it.
            AuthenticationFailed: the server's user may not change adapters.
            DeadlineExceeded, NoWorker, ServerError, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout).bounded()
        session = await self._sessions.open(deadline)

        def check(adapter: str) -> Awaitable[object]:
            return session.answer(session.encode([0], adapter), deadline, private=True)

        return await session.adapters.add(name, source, check, deadline)

    async def remove_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Take an adapter out of service; when this returns, no client gets a row of it.

        Args:
            name: requests name the adapter by it.
            timeout: seconds; None for the producer's. It takes 2.5 s at least.

        Raises:
            SettingsError: `name` is malformed.
            UnknownAdapter: the model has no adapter of that name.
            AuthenticationFailed: the server's user may not change adapters.
            DeadlineExceeded, ServerError, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout).bounded()
        session = await self._sessions.open(deadline)
        await session.adapters.remove(name, deadline)

    async def trie(self, vocabulary: Vocabulary | Iterable[bytes] | None = None, *, local: bool = False) -> PooledTrie:
        """The trie over a vocabulary, whose values trie workers compute.

        Args:
            vocabulary: the byte string of every token id; None for the served model's vocabulary.
            local: compute in this process (needs `lmpool[trie]`) unless a call says otherwise.

        Raises:
            InvalidVocabulary: not byte strings, or over a limit.
            UnknownVocabulary: the model publishes none.
            ServerError, DeadlineExceeded, UnknownModel, AmbiguousModel: as `open`, when the model's vocabulary is
                asked for.
        """
        if vocabulary is None:
            deadline = Deadline(self._timeout)
            session = await self._sessions.open(deadline)
            vocabulary = await session.vocabularies.of_model(deadline)
        structure = await asyncio.to_thread(trie_of, vocabulary)
        return PooledTrie(
            structure, TrieQueries(structure, self._sessions, self._trie_sessions), self._timeout, local=local
        )

    async def tokenizer(self, *, timeout: float | None = None) -> PublishedTokenizer:
        """The model's tokenizer, as its workers publish it; read once for all producers of a process.

        Needs `lmpool[text]`, which is the package `tokenizers`: no torch, no transformers, no copy of the model.

        Args:
            timeout: seconds; None for the producer's.

        Raises:
            UnknownTokenizer: the model publishes none, or what the pool has in its place is another.
            SettingsError: `tokenizers` is not installed.
            ServerError, DeadlineExceeded, UnknownModel, AmbiguousModel: as `open`.
        """
        check_package()
        deadline = Deadline.of(timeout, self._timeout)
        session = await self._sessions.open(deadline)
        return await TOKENIZERS.get(session.info.tokenizer, session.vocabularies, deadline)

    async def encode(self, text: str, *, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """The token ids of a text, as transformers' tokenizer of the model makes them.

        Args:
            text: what the prompt is to say.
            add_special_tokens: with those that mark a text's beginning or end, where the model has them.
            timeout: as `tokenizer`.

        Raises:
            NotTokenIds: it is no text.
            As `tokenizer`.
        """
        deadline = Deadline.of(timeout, self._timeout)
        tokenizer = await self.tokenizer(timeout=timeout)
        return await TOKENIZERS.encode(tokenizer, text, deadline.left, add_special_tokens=add_special_tokens)

    async def decode(self, ids: Any, *, skip_special_tokens: bool = False, timeout: float | None = None) -> str:
        """The text of token ids.

        Args:
            ids: list, tuple or 1-D integer array.
            skip_special_tokens: without those that mark a beginning or an end.
            timeout: as `tokenizer`.

        Raises:
            NotTokenIds, TokenOutOfRange: they are no token ids.
            As `tokenizer`.
        """
        tokenizer = await self.tokenizer(timeout=timeout)
        vocab_size = self.model.vocab_size
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, vocab_size=vocab_size)

    @property
    def model(self) -> ModelInfo:
        """The info of the model.

        Raises:
            LMPoolError: the producer has not connected yet.
        """
        if self._sessions.session is None:
            raise LMPoolError("not connected yet: enter the producer (`async with`) or `await producer.open()`")
        return self._sessions.session.info

    def stats(self) -> ProducerStats:
        """A snapshot of what became of this producer's requests."""
        return self._stats.copy()

    def clear_cache(self) -> None:
        """Forget the rows in this producer's own memory; the pool's cache is everyone's and stays."""
        self._cache.clear()

    async def open(self, *, timeout: float | None = None) -> None:
        """Connect now instead of with the first request.

        Args:
            timeout: seconds; None for the producer's.

        Raises:
            ServerError: the server cannot be used, or does not answer in time.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
            NoWorker: nobody has served it in time (with `when_absent="wait"`).
            ProducerClosed: the producer was closed meanwhile.
        """
        await self._sessions.open(Deadline.of(timeout, self._timeout))

    def close_soon(self) -> None:
        """As `close`, from any thread and without waiting: what is open ends in its own event loop."""
        self._trie_sessions.close_soon()
        self._sessions.close_soon()

    async def close(self) -> None:
        """End the requests that are under way and close the connections. The producer can be opened again."""
        await self._trie_sessions.close()
        await self._sessions.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _is_connected(self) -> bool:
        """Whether it has a model's info."""
        return self._sessions.session is not None

    @property
    def _name(self) -> str | None:
        """The model's name, as far as it is known."""
        return self._model if self._sessions.session is None else self._sessions.session.info.name

    def __reduce__(self) -> tuple[Any, ...]:
        if self._redis is not None and not isinstance(self._redis, str):
            raise SettingsError(
                "redis: a producer that was made with a redis-py client cannot be pickled: make it with the server's "
                "URL, or make one where it is unpickled"
            )
        return _reopened, (type(self), self._name, {"redis": self._redis, **self._options})

    def __repr__(self) -> str:
        state = "open" if self._sessions.is_open else "closed"
        return f"Producer({self._name!r}, redis={where(self._redis)!r}, {state})"


def _reopened(kind: type[Producer], model: str | None, options: dict[str, Any]) -> Producer:
    """What a pickled producer becomes again."""
    return kind(model, **options)


def _check_model(model: str | None) -> None:
    if model is not None:
        check_name("model", model)
    if model == TRIE_SERVICE:
        raise SettingsError(
            f"model: {model!r} is the name of trie workers, which no model can have: name the model, or None for "
            "the only one, and ask for tries by `await producer.trie()`"
        )
