"""The calls of a producer for less or more than one row: entries, top-k tokens, samples, scores, positions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidPrompt, ModelMismatch, SettingsError
from lmpool.producer import options as arguments
from lmpool.producer.byte_mass import ByteMass, ByteOptions, Search, read_texts
from lmpool.producer.client.queries import Queries, Wanted, check_each, for_each
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import Session, SessionPerLoop
from lmpool.producer.metrics import Traces
from lmpool.producer.options import GenerateOptions, PositionOptions, QueryOptions, SampleOptions
from lmpool.protocol.job import Prompt, list_prompts
from lmpool.protocol.picks import TopK
from lmpool.protocol.query import MAX_SEED, Continuation, GenerateQuery, Predictions, pack_stops, stack_tops
from lmpool.protocol.row import Head
from lmpool.protocol.token_set import TokenSet
from lmpool.settings import shown

T = TypeVar("T")


class PartialRows:
    """The calls of `Producer` for less than a row (top-k tokens, a sample, a mass) or more (positions, continuations).

    Workers compute or read the row, and send only the result that they compute from it. Redis does not store a row
    that no client requests, unless `keep_row` is True. The worker keeps the row in shared memory, if it has any.
    Clients on its host find the row there, and the worker answers later requests from this row.

    All calls take prompts (`ids`), `adapter`, `mode` and `timeout` like `Producer.logprobs`, and raise the same
    exceptions. A call for several prompts checks all prompts before it sends the first prompt, and ends with the first
    failure. The text of a prompt's failure begins with the prompt's index, such as "prompts[3]: ".
    """

    _sessions: SessionPerLoop
    _heads: dict[str, Head]
    _timeout: float
    _traces: Traces | None

    async def topk(
        self, ids: Any, k: int, *, allowed: Any = None, keep_row: bool = False, **options: Unpack[QueryOptions]
    ) -> TopK:
        """Return the `k` most likely tokens, the most likely first. Tokens of equal value are ordered by id.

        Args:
            k: number of tokens, 1 to V.
            allowed: choose only from these tokens, given as ids, bools (V,), bits (bytes; the lowest bit of the first
                byte is token 0), a set made by `token_set`, or the name of a set. The row's values stay unchanged.
            keep_row: put the row into the pool's cache too, as `logprobs` does.

        Returns:
            log-probabilities (or logits), float32 of shape (k,), and token ids, int64 of shape (k,).

        Raises:
            SettingsError: `k` is out of range.
        """
        read = arguments.read_options(options)

        # For speed, do not call `batch_topk`, which takes 1.5 times as long for a row in this process's memory.
        async def ask(queries: Queries) -> TopK:
            prompt, count = queries.encode(ids), arguments.check_k(k, queries.vocab_size)
            tokens = arguments.read_allowed(allowed, queries.vocab_size, count)
            return await queries.top(prompt, count, read.mode, tokens, read.temperature)

        return await self._request(read.adapter, read.timeout, ask, keep_row=keep_row)

    async def batch_topk(
        self,
        prompts: Iterable[Any],
        k: int,
        *,
        allowed: Any = None,
        keep_row: bool = False,
        **options: Unpack[QueryOptions],
    ) -> TopK:
        """Call `topk` for n prompts: both returned arrays have the shape (n, k).

        `allowed` is one token set for all prompts, or a list or bools (n, V) with one set for each prompt.
        """
        listed, read = list_prompts(prompts), arguments.read_options(options)

        async def ask(queries: Queries) -> TopK:
            encoded, count = queries.encode_all(listed), arguments.check_k(k, queries.vocab_size)
            sets = arguments.read_batch_allowed(allowed, len(encoded), queries.vocab_size, count)
            pairs = zip(encoded, sets, strict=True)
            work = [queries.top(prompt, count, read.mode, tokens, read.temperature) for prompt, tokens in pairs]
            return stack_tops(await for_each(work), count)

        return await self._request(read.adapter, read.timeout, ask, keep_row=keep_row)

    async def sample(self, ids: Any, **options: Unpack[SampleOptions]) -> int:
        """Sample the next token; SettingsError if an option is unknown or out of range (see `SampleOptions`)."""
        if "allowed" in options:
            options["allowed"] = arguments.for_one(options["allowed"])
        return int((await self.batch_sample([ids], **options))[0])

    async def batch_sample(self, prompts: Iterable[Any], **options: Unpack[SampleOptions]) -> NDArray[np.int64]:
        """Sample the next token of n prompts as `sample` does: int64 (n,). Prompt i is sampled with `seed` + i."""
        sampling = arguments.read_drawing(options, SampleOptions)
        listed, is_private = list_prompts(prompts), options.get("seed") is None
        seeds = [secrets.randbits(64) if is_private else (sampling.seed + at) & MAX_SEED for at in range(len(listed))]

        async def ask(queries: Queries) -> NDArray[np.int64]:
            encoded = queries.encode_all(listed)
            sets = arguments.read_batch_allowed(options.get("allowed"), len(encoded), queries.vocab_size)
            work = [
                queries.sample(prompt, sampling._replace(seed=seed), tokens, private=is_private)
                for prompt, seed, tokens in zip(encoded, seeds, sets, strict=True)
            ]
            return np.array(await for_each(work), np.int64)

        keep_row = options.get("keep_row", False)
        return await self._request(options.get("adapter", ""), options.get("timeout"), ask, keep_row=keep_row)

    async def mass(
        self, ids: Any, allowed: Any, *, keep_row: bool = False, adapter: str = "", timeout: float | None = None
    ) -> float:
        """Return the logarithm of the probability that the next token is in a set; -inf if the probability is 0.

        Args:
            allowed: the token set, as for `topk`.
            keep_row: as for `topk`.

        Raises:
            SettingsError: the set is empty, or was made for another vocabulary.
            UnknownTokenSet: the pool has no token set of this name.
        """
        options: Any = {"keep_row": keep_row, "adapter": adapter, "timeout": timeout}
        return float((await self.batch_mass([ids], arguments.for_one(allowed), **options))[0])

    async def batch_mass(
        self,
        prompts: Iterable[Any],
        allowed: Any,
        *,
        keep_row: bool = False,
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """Return the result of `mass` for n prompts: float32 (n,). `allowed` is as for `batch_topk`."""
        listed = list_prompts(prompts)

        async def ask(queries: Queries) -> NDArray[np.float32]:
            encoded = queries.encode_all(listed)
            sets = arguments.read_batch_allowed(allowed, len(encoded), queries.vocab_size)
            if not all(tokens.packed for tokens in sets):
                raise SettingsError("allowed: None: give the tokens whose probability is wanted")
            pairs = zip(encoded, sets, strict=True)
            return np.array(await for_each([queries.mass(*pair) for pair in pairs]), np.float32)

        return await self._request(adapter, timeout, ask, keep_row=keep_row)

    async def mass_of_bytes(
        self,
        ids: Any,
        continuations: Iterable[bytes],
        *,
        adapter: str = "",
        timeout: float | None = None,
        **options: Unpack[ByteOptions],
    ) -> ByteMass:
        """Return the logarithm of the probability that the text goes on with given bytes, whatever tokens spell them.

        Models with different vocabularies can be compared by these probabilities. The probability of `b` is the sum
        over all token sequences that spell a proper prefix of `b` of the probability of the sequence, times the
        probability of the next tokens that begin with the remaining bytes (Vieira et al. 2024, "From Language Models
        over Tokens to Language Models over Characters", arXiv:2412.03719). Each of these sequences needs one row. The
        text ends at a special token (such as EOS), which has no bytes, so special tokens add nothing.

        Args:
            ids: the prompt. The result is the probability after these tokens, and not after their bytes: other
                tokens with the same bytes are not considered.
            continuations: n byte strings of up to 4,096 bytes. Rows are shared, so all prefixes of a continuation
                together need no more rows than the continuation alone.
            options: see `ByteOptions`. Without `tolerance`, the result is exact.

        Returns:
            log-probabilities and their upper bounds, each float64 (n,): 0 for b"", -inf if no tokens spell the bytes.

        Raises:
            SettingsError: a continuation is no byte string or too long, an option is out of range, or the exact sum
                needs more than `max_rows` rows. In this case no row is requested.
            PromptTooLong: prompt and continuation are longer than the model's longest prompt.
            InvalidVocabulary: `vocabulary` does not fit the model.
            UnknownVocabulary: the model publishes no vocabulary.
            UnknownTokenizer: the pool stores another tokenizer in place of the model's.
        """
        texts = read_texts(continuations, options)

        async def ask(queries: Queries) -> ByteMass:
            search = await Search.prepare(queries, ids, texts, options)
            await search.run()
            return search.result(texts)

        return await self._request(adapter, timeout, ask)

    async def token_set(self, allowed: Any, *, timeout: float | None = None) -> TokenSet:
        """Store a token set in the pool, so that queries carry its name of 17 bytes instead of its members.

        The pool keeps the set for a day. If the pool has evicted the set, a client with the `TokenSet` stores the set
        again; a client with only its name (`TokenSet.name.hex()`) gets `UnknownTokenSet`. `allowed` is as for `mass`.
        """

        async def ask(queries: Queries) -> TokenSet:
            tokens = arguments.read_allowed(allowed, queries.vocab_size).tokens
            if tokens is None:
                raise SettingsError(f"allowed: {shown(allowed)}: give the tokens that the set has")
            await queries.session.vocabularies.register_tokens(tokens, queries.deadline)
            return replace(tokens, is_named=True)

        return await self._request("", timeout, ask)

    async def generate(
        self, ids: Any, max_tokens: int, *, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """Generate continuations of a prompt, each by one request: a worker samples one token after the other.

        Args:
            max_tokens: max tokens per continuation, from 1 to `model.max_prompt_tokens` - len(ids) + 1.
            n: number of continuations; continuation i is sampled with `seed` + i * 2**32.
            options: see `GenerateOptions`.

        Returns:
            for each continuation the token ids, int64 (m,), m <= `max_tokens`, and the log-probabilities of these
            tokens in the rows, float32 (m,), which do not depend on the temperature.

        Raises:
            SettingsError: an option is unknown or out of range.
            PromptTooLong: prompt and continuation are longer than the model's longest prompt.
            NotTokenIds, TokenOutOfRange: `stop` does not consist of token ids of the model.
        """
        return await self.batch_generate([ids] * arguments.check_whole("n", n, 1), max_tokens, **options)

    async def batch_generate(
        self, prompts: Iterable[Any], max_tokens: int, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """Generate one continuation of each prompt, as `generate` does, with `seed` + i * 2**32 for prompt i."""
        sampling = arguments.read_drawing(options, GenerateOptions)
        listed, is_private = list_prompts(prompts), options.get("seed") is None

        async def ask(queries: Queries) -> list[Continuation]:
            stop = pack_stops(arguments.read_stops(options.get("stop", ()), queries.vocab_size))
            # `generate` passes one prompt several times: then an error has no index.
            name = "prompts" if any(ids is not listed[0] for ids in listed) else ""
            encoded, count = queries.encode_all(listed, name), arguments.check_whole("max_tokens", max_tokens, 1)
            room = partial(arguments.check_room, count, max_prompt_tokens=queries.session.info.max_prompt_tokens)
            check_each(room, encoded, name=name)
            work = []
            for at, prompt in enumerate(encoded):
                seed = secrets.randbits(64) if is_private else (sampling.seed + (at << 32)) & MAX_SEED
                query = GenerateQuery(count, sampling.temperature, sampling.top_p, seed, stop)
                work.append(queries.continuation(prompt, query, private=is_private))
            return await for_each(work, name)

        return await self._request(options.get("adapter", ""), options.get("timeout"), ask)

    async def score(self, prompt: Any, continuation: Any, **options: Unpack[QueryOptions]) -> NDArray[np.float32]:
        """Return the log-probability of each token of a continuation, given the prompt and all earlier tokens.

        A backend with `model.positions` runs one forward pass; other backends compute the rows of all prefixes. Forward
        passes of different lengths round differently, so float32 results agree with rows to about 1e-4.

        Args:
            continuation: token ids, at least one. Prompt and continuation must fit the model's longest prompt.

        Returns:
            float32 (m,), one value per token. Log-probabilities add up to the log-probability of the continuation.
        """
        return (await self.batch_score([prompt], [continuation], **options))[0]

    async def batch_score(
        self, prompts: Iterable[Any], continuations: Iterable[Any], **options: Unpack[QueryOptions]
    ) -> list[NDArray[np.float32]]:
        """Score n continuations of n prompts as `score` does; raises SettingsError if the numbers differ."""
        read = arguments.read_options(options)
        first_ids, second_ids = list_prompts(prompts), list_prompts(continuations)

        async def ask(queries: Queries) -> list[NDArray[np.float32]]:
            firsts = queries.encode_all(first_ids)
            try:
                seconds = queries.encode_all(second_ids, "continuations")
            except InvalidPrompt as error:
                text = str(error).replace("the prompt", "it", 1)
                raise type(error)(text if text.startswith("continuations") else f"continuation: {text}") from error
            if len(firsts) != len(seconds):
                raise SettingsError(f"continuations: {len(seconds)} for {len(firsts)} prompts; each prompt needs one")
            pairs = zip(firsts, seconds, strict=True)
            return await for_each([queries.scores(*pair, read.mode, read.temperature) for pair in pairs])

        return await self._request(read.adapter, read.timeout, ask)

    async def positions(self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]) -> Predictions:
        """Return the model's predictions at every position of a text from `start` on, at position i given ids[: i + 1].

        A backend with `model.positions` runs one forward pass; other backends compute a row for each position. Forward
        passes of different lengths round differently, so float32 results agree with rows to about 1e-4. Calls with
        other numbers for `top`, or without some of the options, share one cached result.

        Args:
            ids: a text of N tokens.
            start: the first position, 0 to N - 1.
            options: see `PositionOptions`; at least one of its options is required.

        Returns:
            the requested values for n = N - start positions; see `Predictions` for shapes and dtypes.

        Raises:
            SettingsError: `start` or `top` is out of range, or no option says which values to return.
            NotTokenIds, TokenOutOfRange: `targets` are not token ids of the model.
        """
        if options.get("targets") is not None:
            options["targets"] = [options["targets"]]
        return (await self.batch_positions([ids], start, **options))[0]

    async def batch_positions(
        self, texts: Iterable[Any], start: int = 0, **options: Unpack[PositionOptions]
    ) -> list[Predictions]:
        """Return the result of `positions` for each of several texts, from position `start` on."""
        listed = list_prompts(texts)
        targets = arguments.targets_of_texts(options.get("targets"), len(listed))

        async def ask(queries: Queries) -> list[Predictions]:
            encoded = queries.encode_all(listed, "texts")
            wanted = arguments.read_wanted(options, queries.vocab_size, start)

            def read(text: Prompt, ids: Any) -> Wanted:
                count = len(arguments.check_start(start, text).ids) // 4 - start
                if ids is None:
                    return wanted
                return wanted._replace(targets=arguments.read_position_targets(ids, queries.vocab_size, count))

            pairs = zip(encoded, check_each(read, encoded, targets, name="texts"), strict=True)
            return await for_each([queries.positions(text, start, each) for text, each in pairs], "texts")

        return await self._request(options.get("adapter", ""), options.get("timeout"), ask)

    async def stream_positions(
        self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]
    ) -> AsyncIterator[Predictions]:
        """Yield the result of `positions` in parts of at most 8 MiB, for results that do not fit in memory.

        `timeout` applies to each part. Raises ModelMismatch if the model or adapter changes between two parts.
        """
        parts: list[range] = []
        wanted = Wanted()
        version: tuple[str, str] | None = None

        async def ask(queries: Queries, at: int) -> Predictions:
            nonlocal parts, version, wanted
            now = queries.session.info.fingerprint, queries.adapter
            if version not in (None, now):
                text = f"the model or its adapter has changed before position {parts[at].start}: ask again"
                raise ModelMismatch(text)
            prompt = arguments.check_start(start, queries.encode(ids))
            if version is None:
                wanted = arguments.read_wanted(options, queries.vocab_size, start, len(prompt.ids) // 4 - start)
                parts, version = queries.parts(prompt, start, wanted), now
            found = await queries.part(prompt, parts[at], wanted, private=len(parts) > 1)
            queries.check_same_model(now[0])
            return found

        at = 0
        while at == 0 or at < len(parts):
            work = partial(ask, at=at)
            yield await self._request(options.get("adapter", ""), options.get("timeout"), work, "stream_positions")
            at += 1

    async def logz(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> float:
        """Return logZ, the logarithm of the sum of the exponentials of the logits: the row is the logits minus logZ."""
        return float((await self.batch_logz([ids], adapter=adapter, timeout=timeout))[0])

    async def batch_logz(
        self, prompts: Iterable[Any], *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """Return the result of `logz` for n prompts: float32 (n,)."""
        listed = list_prompts(prompts)

        async def ask(queries: Queries) -> NDArray[np.float32]:
            work = [queries.last(prompt, Wanted(logz=True)) for prompt in queries.encode_all(listed)]
            found = [last.logz for last in await for_each(work)]
            return np.array(found, np.float32).reshape(len(listed))

        return await self._request(adapter, timeout, ask)

    async def hidden(
        self, ids: Any, start: int = 0, *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[Any]:
        """Return the last hidden states of a text from position `start` on, from which the head computes rows.

        A client with its own accelerator can compute rows from hidden states and the weights of `producer.head()`. At
        V = 128,000, hidden states take about thirty times fewer bytes than rows.

        Returns:
            (N - start, d) array in the model's dtype; float32 for a bfloat16 model, because numpy has no bfloat16.

        Raises:
            SettingsError: `start` is out of range, or the backend returns no hidden states (`model.hidden` is 0).
        """

        async def ask(queries: Queries) -> NDArray[Any]:
            return await queries.hidden(arguments.check_start(start, queries.encode(ids)), start)

        return await self._request(adapter, timeout, ask)

    async def head(self, *, adapter: str = "", timeout: float | None = None) -> Head:
        """Return the weights, bias, scale and soft-cap of the model's last layer, which turns hidden states into rows.

        The head of an adapter that targets the last layer also has LoRA factors. The producer fetches the head once, in
        parts of 8 MiB, and keeps it until the model changes. All callers share its arrays, which are read-only.

        Raises:
            SettingsError: the backend does not return the head (`producer.model.hidden` is 0).
        """

        async def ask(queries: Queries) -> Head:
            return await queries.head(self._heads)

        return await self._request(adapter, timeout, ask)

    async def warm(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> None:
        """Have a worker compute and cache a prompt's row, without receiving the row.

        The worker that computes the row also keeps the prompt's keys and values, for prompts that extend this prompt. A
        cached row is not computed again, so possibly no worker has the prompt's keys and values.
        """

        async def ask(queries: Queries) -> None:
            prompt = queries.encode(ids)
            if queries.session.cached(prompt) is None:
                await queries.session.answer(prompt, queries.deadline, warm=True)

        await self._request(adapter, timeout, ask)

    async def _request(
        self,
        adapter: object,
        timeout: float | Deadline | None,
        ask: Callable[[Queries], Awaitable[T]],
        operation: str = "",
        *,
        keep_row: bool = False,
    ) -> T:
        """Call `ask` as `SessionPerLoop.request` does, in a span with the name of the method that defines `ask`."""
        arguments.check_flag("keep_row", keep_row)
        deadline = Deadline.of(timeout, self._timeout)

        async def work_in(session: Session, name: str) -> T:
            return await ask(Queries(session, name, deadline, keep_row))

        work = self._sessions.request(adapter, deadline, work_in)
        if self._traces is None:
            return await work
        # For example, take the name `batch_topk` from `PartialRows.batch_topk.<locals>.ask`.
        operation = operation or ask.__qualname__.partition(".<locals>")[0].rpartition(".")[2]
        with self._traces.span(operation):
            return await work
