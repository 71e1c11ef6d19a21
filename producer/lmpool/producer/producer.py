"""The class `Producer`, the asyncio client of a pool: `await producer.logprobs(ids)`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.broker.server import RedisLike, Server, where
from lmpool.errors import DeadlineExceeded, LMPoolError, ModelMismatch, SettingsError
from lmpool.metrics import is_traced
from lmpool.producer.client.queries import Mode, Queries, Wanted, entries_of
from lmpool.producer.client.requests import Deadline, RowLRU, SessionSettings, check_timeout
from lmpool.producer.client.session import CopiedAsItself, Priority, Session, SessionPerLoop, WhenAbsent, WhenFull
from lmpool.producer.metrics import Counters, ProducerStats, Traces
from lmpool.producer.options import QueryOptions, check_flag, read_batch_targets, read_options, read_targets, repeatable
from lmpool.producer.partial import PartialRows
from lmpool.producer.tokenizer import TOKENIZERS, PublishedTokenizer, import_package
from lmpool.producer.trie import PooledTrie, trie_of
from lmpool.protocol.job import encode_prompt, list_prompts
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.protocol.picks import tempered
from lmpool.protocol.version import MAX_NUMBER, split_name
from lmpool.settings import check_choice, check_name, check_number
from lmpool.vocabulary import Vocabulary

T = TypeVar("T")

CHANGES_TOO_OFTEN = "versioned: the weights changed during each call until the timeout: use a producer of `at`"
"""Message of a call that no single version has computed."""

check_version = partial(check_number, "version", least=0, most=MAX_NUMBER)

_MAX_UNUSED = 8  # Max producers for one version each that stay open after calls with `version=`.


class Producer(CopiedAsItself, PartialRows):
    """Requests rows from a pool, and results that are less or more than a row (see `PartialRows`).

    Use a producer as an async context manager, or directly: its first request connects. Of concurrent `async with`
    blocks, the last one closes the producer. One producer serves any number of concurrent calls, and can be used in
    several `asyncio.run` calls one after the other.

    A pickle contains the arguments below, including a password in the URL, but no rows and no connections. The
    unpickled producer connects to the same model with its first request. A copy of a producer is the producer itself.

    Args:
        model: name of a served model, or None if the pool serves only one model. The name `trie` is reserved for trie
            workers.
        redis: URL of the server, or a redis-py client whose address and credentials are used, or None for the
            environment's `LMPOOL_REDIS_URL`, or else this user's embedded server.
        timeout: seconds that a request may take, unless the call overrides it.
        cache_bytes: max bytes of rows in this producer's own memory; 0 keeps none. Rows in this machine's shared memory
            are kept from their second use on.
        prefix: prefix of the pool's Redis keys.
        when_full: with "wait", requests wait until their deadline while the model's queue is full. With "raise",
            requests raise QueueFull at once.
        when_absent: with "wait", `open` and requests wait until their deadline while the server cannot be reached or no
            worker serves the model. With "raise", both raise UnknownModel or ServerUnreachable at once, and NoWorker
            when the last worker has been missing for a lease (5 s at least).
        priority: with "interactive", workers take prompts from all clients in turn. With "bulk", for work such as a
            file of texts, workers take interactive prompts first, but bulk prompts get at least 1/16 of the time.
        keep_answers: whether results of queries (top-k tokens, samples, scores, positions) stay in the pool's cache for
            a minute. With False, each result is removed once it has been read, so that a million texts do not fill the
            server's memory.
        direct: whether rows of workers on other hosts are read from these workers, and not through Redis, if their
            addresses can be reached.
        tracing: whether each call has an OpenTelemetry span whose context is sent with its jobs. Tracing needs
            `lmpool[tracing]` and a tracer provider that the program sets up. None means the
            environment's `LMPOOL_TRACING`, 1 or 0. Calls of tries and changes of adapters have no spans.

    Raises:
        SettingsError: an argument is malformed.
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
        direct: bool = True,
        tracing: bool | None = None,
    ) -> None:
        if model is not None:
            check_name("model", model)
        if model == TRIE_SERVICE:
            advice = "name a model, or None for the only one, and ask for tries by `await producer.trie()`"
            raise SettingsError(f"model: {model!r} is the name of trie workers: {advice}")
        check_name("prefix", prefix)
        check_choice("when_full", when_full, get_args(WhenFull))
        check_choice("when_absent", when_absent, get_args(WhenAbsent))
        check_choice("priority", priority, get_args(Priority))
        check_flag("keep_answers", keep_answers)
        check_flag("direct", direct)
        check_number("cache_bytes", cache_bytes, 0)
        if redis is not None and not isinstance(redis, get_args(RedisLike)):
            raise SettingsError(f"redis: {type(redis).__name__} is neither a URL nor a redis-py client")
        self._timeout = check_timeout(timeout)
        self._model = model
        self._redis = redis
        values = timeout, cache_bytes, prefix, when_full, when_absent, priority, keep_answers, direct, tracing
        self._options: dict[str, Any] = dict(zip(_OPTIONS, values, strict=True))
        self._traces = Traces(model) if is_traced(tracing) else None
        self._heads = {}
        self._counters = Counters(ProducerStats(), RowLRU(cache_bytes))
        options = when_full, when_absent, priority, keep_answers, direct
        settings = SessionSettings(Keys(prefix), self._counters, self._traces, *options)
        # Do not cache results of trie workers in this process: weights hardly ever repeat, and the pool caches results
        # that trie workers compute from rows.
        of_tries = replace(settings, counters=Counters(ProducerStats(), RowLRU(0)), traces=None)
        server, waits = partial(Server, redis), when_absent == "wait"
        self._pinned: dict[int, Producer] = {}  # The producers of `at` that have not been closed.
        self._called: dict[int, tuple[Producer, int]] = {}  # Producer for `version=`, and the number of running calls.
        self._forget: Callable[[], object] | None = None  # Removes this producer of `at` from the one that made it.
        self._sessions = SessionPerLoop(server, partial(Session, settings=settings), model, waits)
        self._trie_sessions = SessionPerLoop(server, partial(Session, settings=of_tries), TRIE_SERVICE, waits)

    async def logprobs(
        self,
        ids: Any,
        *,
        targets: Any = None,
        mode: Mode = "logprobs",
        temperature: float = 1.0,
        fresh: bool = False,
        keep_row: bool = False,
        adapter: str = "",
        version: int | Literal["latest"] = "latest",
        min_version: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of the token that follows a prompt.

        Args:
            ids: list, tuple or 1-D integer array (numpy, torch) of token ids.
            targets: token ids, whose entries the server reads in the cached row, or a worker in a computed row.
            mode: "logits" for the logits as the model computed them. A worker computes the logits again, with the keys
                and values that it keeps, unless a worker still has the row in 16 bits.
            temperature: divides the logits before the log-softmax; computed here from the row. Not for logits.
            fresh: a worker computes the row now, even if the row is cached, and does not cache it.
            keep_row: with `targets`, put the row into the pool's cache too, as a call without `targets` always does.
                Not with `fresh`.
            adapter: name of one of the model's adapters (see `adapters`), or "" for none.
            version: a version of the model's weights (`publish_weights`), as `at` serves it; "latest" for the newest
                that clients use, and never an older one than this producer has seen. See `versioned`.
            min_version: wait until workers serve this version or a later one.
            timeout: seconds, or None for the producer's timeout.

        Returns:
            float32 array of shape (V,), read-only at temperature 1; with `targets` writable and of shape (k,), in the
            targets' order.

        Raises:
            InvalidPrompt: `ids` is not a prompt for this model, or `targets` are not token ids of this model.
            DeadlineExceeded, NoWorker, QueueFull: no row arrived in time.
            WorkerError: the backend failed on this prompt.
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: the model is not served, or no model is named and several are served.
            UnknownAdapter: the model has no adapter of that name.
        """
        # Serve the usual request on a faster path without nested coroutines.
        session = self._sessions.by_loop.get(asyncio.get_running_loop())
        is_usual = targets is None and mode == "logprobs" and fresh is False and adapter == "" and temperature == 1
        is_newest = version == "latest" and not min_version
        if is_usual and is_newest and session is not None and not session.closed and self._traces is None:
            timeout_s = self._timeout if timeout is None else check_timeout(timeout)
            info = session.info
            prompt = encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
            row = session.cached(prompt)
            if row is not None:
                return row
            waiter = session.begin(prompt, session.loop.time() + timeout_s, timeout_s)
            try:
                return await waiter.future
            finally:
                session.end(waiter)
        check_flag("fresh", fresh)
        temperature = read_options({"mode": mode, "temperature": temperature}).temperature
        if mode == "logits" and fresh:
            raise SettingsError("fresh: True, of rows only: not with mode='logits'")
        if keep_row and fresh:
            raise SettingsError("keep_row: True, but a row with fresh=True is not cached: give one of the two")

        async def ask(queries: Queries) -> NDArray[np.float32]:
            prompt = queries.encode(ids)
            entries = None if targets is None else read_targets(targets, queries.vocab_size)
            if mode == "logits":
                await queries.keep(prompt)
                found = await queries.last(prompt, Wanted(targets=np.array(entries or (), np.int64), values=mode))
                values: Any = found.full if entries is None else found.targets
                return np.asarray(values[0])
            if entries is not None and not fresh:
                return await queries.entries(prompt, entries, temperature)
            row = await (queries.fresh(prompt) if fresh else queries.row(prompt))
            row = tempered(row[None], temperature)[0]
            return row if entries is None else entries_of(row, entries)

        if is_newest:
            return await self._request(adapter, timeout, ask, keep_row=keep_row)
        deadline = Deadline.of(timeout, self._timeout)
        with nullcontext(self) if version == "latest" else self._using(version) as producer:
            await producer._reach(min_version, deadline)
            return await producer._request(adapter, deadline, ask, keep_row=keep_row)

    async def batch_logprobs(
        self, prompts: Iterable[Any], *, targets: Any = None, keep_row: bool = False, **options: Unpack[QueryOptions]
    ) -> NDArray[np.float32]:
        """Return the rows of several prompts: float32 (n, V), writable. Checks all prompts before it sends any prompt.

        Args:
            prompts: prompts as for `logprobs`, or a 2-D integer array.
            targets: token ids; only their entries are returned, (n, k). Give k ids for all prompts, or (n, k) ids.
            keep_row: as for `logprobs`.
            options: mode, temperature, adapter and timeout as for `logprobs`; the timeout is for all prompts together.

        Raises:
            The exceptions of `logprobs`; the first failure ends the batch. A failure's text begins with the prompt's
            index, such as "prompts[3]: ".
        """
        listed, read = list_prompts(prompts), read_options(options)

        async def ask(queries: Queries) -> NDArray[np.float32]:
            encoded = queries.encode_all(listed)
            if targets is None and read.mode == "logprobs":
                return tempered(await queries.session.answer_all(encoded, queries.deadline), read.temperature)
            entries, count = [list[int]()] * len(encoded), queries.vocab_size
            if targets is not None:
                entries, count = read_batch_targets(targets, len(encoded), queries.vocab_size)
            options: Any = {"values": read.mode, "temperature": read.temperature, "name": "prompts"}
            return await queries.all_entries(encoded, entries, count, **options)

        return await self._request(read.adapter, read.timeout, ask, keep_row=keep_row)

    def at(self, version: int) -> Producer:
        """Return a producer for one version of the model's weights; all its answers are of this version.

        Rows that are not cached are computed only while workers serve the version. The returned producer has a cache
        and counters of its own. It is closed with this one, or earlier by its own `close`; until then, all calls of
        `at` for the version return this producer. If it is used after its own `close`, only its `close` closes it.

        Raises:
            SettingsError: `version` is no number from 0 (the checkpoint that the workers were started with).
            LMPoolError: this producer names no model, and has not connected yet.
        """
        if (producer := self._pinned.get(check_version(version))) is None:
            producer = self._pinned.setdefault(version, self._of_version(version))
            producer._forget = partial(self._pinned.pop, version, None)
        return producer

    def _of_version(self, version: int) -> Producer:
        name = f"{split_name(self._model or self.model.base)[0]}@{version}"
        return Producer(name, redis=self._redis, **self._options)

    @contextmanager
    def _using(self, version: int) -> Iterator[Producer]:
        """A producer for a call with `version=`; closes all but the last ones, as a program may name many versions."""
        called = self._called
        if check_version(version) not in called:
            called[version] = self._of_version(version), 0
            called[version][0]._counters.count_in(self._counters)
        producer, calls = called.pop(version)
        called[version] = producer, calls + 1  # The version that was named last is the last one.
        try:
            yield producer
        finally:
            called[version] = producer, called[version][1] - 1
            for old in [other for other, (_, calls) in called.items() if not calls][:-_MAX_UNUSED]:
                called.pop(old)[0].close_soon()

    def _leave(self) -> None:
        """Remove this producer from the one whose `at` made it."""
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def _all_sessions(self) -> list[SessionPerLoop]:
        """The sessions of this producer, and of the producers of versions that are closed with it."""
        made = [*self._pinned.values(), *(producer for producer, _ in list(self._called.values()))]
        return [*(each for producer in made for each in producer._all_sessions()), self._trie_sessions, self._sessions]

    async def versioned(self, ask: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> tuple[T, int]:
        """Call a method of this producer; returns its answer, and the version of the weights that computed all of it.

        For example `row, version = await producer.versioned(producer.logprobs, ids)`. If clients change to another
        version during the call, the call is made again, until `timeout=` or the producer's timeout.
        """
        deadline, (values, options) = Deadline.of(options.get("timeout"), self._timeout), repeatable(args, options)
        owner = getattr(ask, "__self__", None)
        if {"version", "min_version"} & options.keys() or (isinstance(owner, Producer) and owner is not self):
            raise SettingsError("versioned: give a method of this producer, without version= and min_version=")
        while True:
            before = await self._weights(deadline)
            try:
                answer = await ask(*values, **options)
                if await self._weights(deadline) == before:
                    return answer, before[1].version
            except ModelMismatch:  # The weights may have changed between two parts of the result.
                if await self._weights(deadline) == before:
                    raise
            if deadline.end <= deadline.loop.time():
                raise DeadlineExceeded(CHANGES_TOO_OFTEN)
            if options.get("timeout") is not None:
                options["timeout"] = deadline.left

    async def _weights(self, deadline: Deadline) -> tuple[Session, ModelInfo]:
        """The session of the running event loop, and the info of the weights that it uses now."""
        session = await self._sessions.open(deadline)
        return session, session.info

    async def reach_version(self, version: int, *, timeout: float | None = None) -> None:
        """Wait until this producer uses a version of the weights that workers serve, or a later one.

        Raises DeadlineExceeded if no worker serves one in time, and the exceptions of `open`.
        """
        await self._reach(version, Deadline.of(timeout, self._timeout))

    async def _reach(self, version: int, deadline: Deadline) -> None:
        check_number("min_version", version, 0, MAX_NUMBER)
        await (await self._sessions.open(deadline)).reach(version, deadline)

    async def versions(self, *, timeout: float | None = None) -> dict[int, str]:
        """Return the published versions of the model's weights, oldest first. Raises as `open`.

        A value is "served", "refused: REASON", or "" while no worker has loaded the version.
        """
        deadline = Deadline.of(timeout, self._timeout)
        return await (await self._sessions.open(deadline)).versions.all(deadline)

    async def publish_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        version: int | None = None,
        *,
        stored: bool = False,
        bucket: str = "",
        timeout: float | None = None,
    ) -> int:
        """Publish a version of the model's weights; returns its number when the first worker serves it.

        The other workers follow, a few at a time (`--max-unavailable`). This producer uses the version, or a later one,
        from now on; other clients follow when as many workers serve it as the version before it. If the first worker
        cannot serve the weights, nothing changes.

        Args:
            weights: a folder of safetensors files, or one such file, under a path that exists here and on the workers'
                machines; or tensors of torch or numpy by name, which go through the pool. A full version has all
                tensors of the model's checkpoint; a sparse one has `NAME.indices` (int64, places in the flat tensor,
                ascending) and `NAME.values` of each changed tensor, relative to the newest version.
            version: number of the version, above all earlier ones; None for the next number.
            stored: store the file in the pool, because the workers cannot read its path. At most 1 GiB.
            bucket: URL of a folder in a bucket, such as s3://bucket/weights, to which the files are copied, because the
                workers cannot read their path. Both sides need `lmpool[fsspec]` and a package for the scheme.
            timeout: seconds, or None for the producer's timeout.

        Raises:
            SettingsError: the names, dtypes or shapes are not those of the model, or `version` is not above the others.
            WeightsRefused: the worker refused them (a NaN, a damaged file, a row that is none).
            AuthenticationFailed: the server's user may not publish weights.
            DeadlineExceeded, NoWorker, ServerError, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout)
        session = await self._sessions.open(deadline)
        number = await session.versions.publish(weights, version, stored=stored, url=bucket, deadline=deadline)
        if split_name(self._model or "")[1] is None:  # A producer for one version stays with it.
            await session.reach(number, deadline)
        await session.until_used(number)
        return number

    async def adapters(self, *, timeout: float | None = None) -> dict[str, str]:
        """Return the adapters that requests may name: name -> revision, a digest of the weights. Raises as `open`."""
        deadline = Deadline.of(timeout, self._timeout)
        session = await self._sessions.open(deadline)
        return await session.adapters.all(deadline)

    async def add_adapter(self, name: str, source: str | Path, *, timeout: float | None = None) -> str:
        """Put a LoRA adapter in service; it replaces the adapter that has this name.

        One worker loads the adapter as a check; other workers load the adapter when a request first needs it. When this
        call returns, no client gets rows of a replaced adapter. If the worker refuses the adapter, nothing changes.

        Args:
            name: name of the adapter in requests.
            source: the adapter's folder on the workers' machines, or its name on the hub for workers with
                --adapter-hub. The path of a folder that exists on this machine is made absolute.
            timeout: seconds, or None for the producer's timeout. Replacing an adapter takes 2.5 s at least.

        Returns:
            the adapter's revision, a digest of its weights.

        Raises:
            SettingsError: `name` or `source` is malformed, or the model already has its max number of adapters.
            AdapterRefused: the worker cannot load the adapter (a missing folder, a wrong shape, ...), or the worker
                terminated while it loaded the adapter.
            AuthenticationFailed: the server's user may not change adapters.
            DeadlineExceeded, NoWorker, ServerError, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout).bounded()
        session = await self._sessions.open(deadline)

        def check(adapter: str) -> Awaitable[object]:
            return session.answer(session.encode([0], adapter), deadline, private=True)

        return await session.adapters.add(name, source, check, deadline)

    async def remove_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Take an adapter out of service; when this call returns, no client gets a row of the adapter.

        Args:
            name: name of the adapter in requests.
            timeout: seconds, or None for the producer's timeout. Removing an adapter takes 2.5 s at least.

        Raises:
            SettingsError, UnknownAdapter: `name` is malformed, or the model has no adapter of that name.
            AuthenticationFailed: the server's user may not change adapters.
            DeadlineExceeded, ServerError, UnknownModel, AmbiguousModel: as `logprobs`.
        """
        deadline = Deadline.of(timeout, self._timeout).bounded()
        session = await self._sessions.open(deadline)
        await session.adapters.remove(name, deadline)

    async def trie(self, vocabulary: Vocabulary | Iterable[bytes] | None = None, *, local: bool = False) -> PooledTrie:
        """Return the trie over a vocabulary, whose node values trie workers compute.

        Args:
            vocabulary: the byte string of every token id, or None for the served model's vocabulary.
            local: compute node values in this process (needs `lmpool[trie]`) unless a call overrides this.

        Raises:
            InvalidVocabulary: `vocabulary` does not consist of byte strings, or exceeds a limit.
            UnknownVocabulary: the model publishes no vocabulary.
            ServerError, DeadlineExceeded, UnknownModel, AmbiguousModel: as for `open`, if `vocabulary` is None.
        """
        if vocabulary is None:
            deadline = Deadline(self._timeout)
            session = await self._sessions.open(deadline)
            vocabulary = await session.vocabularies.of_model(deadline)
        structure = await asyncio.to_thread(trie_of, vocabulary)
        return PooledTrie(structure, self._sessions, self._trie_sessions, self._timeout, local=local)

    async def tokenizer(self, *, timeout: float | None = None) -> PublishedTokenizer:
        """Return the model's tokenizer, as its workers publish it; all producers of a process share one object.

        This needs `lmpool[text]`, which installs the package `tokenizers`, but neither torch nor transformers.

        Raises:
            UnknownTokenizer: the workers publish no tokenizer, or the pool stores another tokenizer in its place.
            SettingsError: `tokenizers` is not installed.
            ServerError, DeadlineExceeded, UnknownModel, AmbiguousModel: as for `open`.
        """
        import_package()
        deadline = Deadline.of(timeout, self._timeout)
        session = await self._sessions.open(deadline)
        return await TOKENIZERS.get(session.info.tokenizer, session.vocabularies, deadline)

    async def encode(self, text: str, *, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """Return the token ids of a text, equal to the ids from the model's tokenizer in transformers.

        `add_special_tokens` adds the model's tokens for the beginning or end of a text. Raises NotTokenIds if
        `text` is not a str, and the exceptions of `tokenizer`.
        """
        deadline = Deadline.of(timeout, self._timeout)
        tokenizer = await self.tokenizer(timeout=timeout)
        return await TOKENIZERS.encode(tokenizer, text, deadline.left, add_special_tokens=add_special_tokens)

    async def decode(self, ids: Any, *, skip_special_tokens: bool = False, timeout: float | None = None) -> str:
        """Return the text of token ids: a list, tuple or 1-D integer array.

        `skip_special_tokens` leaves out tokens for the beginning or end of a text. Raises NotTokenIds or
        TokenOutOfRange if `ids` are not token ids of the model, and the exceptions of `tokenizer`.
        """
        tokenizer = await self.tokenizer(timeout=timeout)
        vocab_size = self.model.vocab_size
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, vocab_size=vocab_size)

    @property
    def model(self) -> ModelInfo:
        """The model info.

        Raises:
            LMPoolError: the producer has not connected yet.
        """
        if self._sessions.session is None:
            raise LMPoolError("not connected yet: enter the producer (`async with`) or `await producer.open()`")
        return self._sessions.session.info

    def stats(self) -> ProducerStats:
        """Return a snapshot of the counters of this producer's requests."""
        return self._counters.stats.copy()

    def clear_cache(self) -> None:
        """Drop the rows in this producer's own memory. The pool's cache, which all clients share, does not change."""
        for producer in [self, *(called for called, _ in self._called.values())]:
            producer._counters.cache.clear()

    async def open(self, *, timeout: float | None = None) -> None:
        """Connect now instead of with the first request.

        Raises:
            ServerError: the server cannot be used, or does not reply in time.
            UnknownModel, AmbiguousModel: the model is not served, or no model is named and several are served.
            NoWorker: no worker served the model in time, with `when_absent="wait"`.
            ProducerClosed: the producer was closed.
        """
        await self._sessions.open(Deadline.of(timeout, self._timeout))

    def close_soon(self) -> None:
        """Close without waiting, from any thread: each connection is closed in its own event loop."""
        self._leave()
        for sessions in self._all_sessions():
            sessions.close_soon()

    async def close(self) -> None:
        """End pending requests and close the connections. The producer can be opened again."""
        self._leave()
        for sessions in self._all_sessions():
            await sessions.close()

    async def __aenter__(self) -> Self:
        (await self._sessions.open(Deadline(self._timeout))).blocks += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        session = self._sessions.by_loop.get(asyncio.get_running_loop())
        if session is not None and session.blocks > 1:  # Another task is in an `async with` block of this producer.
            session.blocks -= 1
        else:
            await self.close()

    @property
    def _name(self) -> str | None:
        return self._model if self._model or self._sessions.session is None else self._sessions.session.info.base

    def __reduce__(self) -> tuple[Any, ...]:
        if self._redis is not None and not isinstance(self._redis, str):
            raise SettingsError("redis: a redis-py client cannot be pickled: make the producer with the server's URL")
        return partial(type(self), **self._options, redis=self._redis), (self._name,)

    def __repr__(self) -> str:
        is_open = any(not session.closed for session in list(self._sessions.by_loop.values()))
        return f"Producer({self._name!r}, redis={where(self._redis)!r}, {'open' if is_open else 'closed'})"


_OPTIONS = list(signature(Producer).parameters)[2:]  # All parameters of `Producer` except model and server.
