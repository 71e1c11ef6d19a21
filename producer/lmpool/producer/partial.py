"""Less than a row, or more: entries, likeliest tokens, a draw, scores, every position; only what is wanted travels."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import gather
from lmpool.errors import InvalidPrompt, ModelMismatch, SettingsError, of_prompt
from lmpool.producer.client.queries import (
    Expected,
    Mode,
    Wanted,
    ask_continuation,
    ask_head,
    ask_hidden,
    ask_last,
    ask_mass,
    ask_part,
    ask_positions,
    ask_sample,
    ask_scores,
    ask_top,
    beginning,
    check_same_model,
    parts_of,
)
from lmpool.producer.client.session import Session
from lmpool.producer.client.session_per_loop import SessionPerLoop
from lmpool.producer.client.tracing import Traces
from lmpool.producer.deadline import Deadline
from lmpool.producer.options import (
    GenerateOptions,
    PositionOptions,
    Positions,
    SampleOptions,
    check_k,
    check_known,
    check_members,
    check_mode,
    check_room,
    check_start,
    for_one,
    read_allowed,
    read_batch_allowed,
    read_sampling,
    read_stops,
    read_wanted,
)
from lmpool.protocol.job import Prompt, list_prompts
from lmpool.protocol.query import MAX_SEED, Continuation, GenerateQuery, TopK, pack_stops, stack_tops
from lmpool.protocol.row import Head, Row
from lmpool.protocol.token_set import TokenSet
from lmpool.settings import shown

T = TypeVar("T")


def encode_all(session: Session, prompts: Sequence[Any], adapter: str, name: str = "prompts") -> list[Prompt]:
    """Prompts for the model; an error names the prompt that it is about.

    Args:
        session: of the model.
        prompts: each as `Producer.logprobs` takes it.
        adapter: "name@revision", or "" for none.
        name: of the argument that has the prompts.

    Raises:
        InvalidPrompt: one of them is none for this model.
    """
    encoded: list[Prompt] = []
    try:
        for ids in prompts:
            encoded.append(session.encode(ids, adapter))  # noqa: PERF401 Their number is the index of the one that fails.
    except InvalidPrompt as error:
        of_prompt(error, name, len(encoded), _count(prompts))
        raise
    return encoded


async def ask_for(prompts: Sequence[Any], asked: Sequence[Coroutine[Any, Any, T]], name: str = "prompts") -> list[T]:
    """Await a request for each of several prompts; the first failure ends the others, and names its prompt."""
    count = _count(prompts)
    return await gather(asked, lambda error, index: of_prompt(error, name, index, count))


def _count(prompts: Sequence[Any]) -> int:
    """How many prompts there are; several continuations of one prompt have one."""
    return len(prompts) if any(ids is not prompts[0] for ids in prompts) else min(1, len(prompts))


class PartialRows:
    """Asks for less than a row (likeliest tokens, a draw, a mass), or more (every position, a continuation, states).

    Mixed into `Producer`. Workers answer from the row, whether they have just computed it or the cache has it; only the
    answer travels. A row that is computed for an answer is cached for everyone.

    All calls take `adapter` and `timeout` as `Producer.logprobs` does and raise what it raises; those for several
    prompts check all of them before the first is sent, and end with the first failure. One that concerns one prompt
    begins with its index, such as "prompts[3]: ".
    """

    _sessions: SessionPerLoop
    _heads: dict[str, Head]
    _timeout: float
    _traces: Traces | None

    async def topk(
        self,
        ids: Any,
        k: int,
        *,
        allowed: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> TopK:
        """The `k` likeliest tokens, likeliest first; of equal ones the lowest id first.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            k: how many, 1 to V.
            allowed: the likeliest of these tokens only: their ids, or bools (V,), or their bits (bytes, the lowest bit
                of the first for token 0), or a set that `token_set` has made, or its name. Values stay those of the
                row.
            mode: as `Producer.logprobs`.

        Returns:
            log-probabilities (or logits), float32 of shape (k,), and token ids, int64 of shape (k,).

        Raises:
            SettingsError: `k` is out of range.
        """
        values = check_mode(mode)

        # Not as a batch of one, which takes half as long again where the row is in this process's memory.
        async def ask(session: Session, name: str, deadline: Deadline) -> TopK:
            prompt, count = session.encode(ids, name), check_k(k, session)
            some = check_members(read_allowed(allowed, session.info.vocab_size), count)
            return await ask_top(session, prompt, count, deadline, values, some)

        return await self._request(adapter, timeout, ask)

    async def batch_topk(
        self,
        prompts: Iterable[Any],
        k: int,
        *,
        allowed: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> TopK:
        """As `topk`, for n prompts: both arrays have the shape (n, k).

        `allowed` is the same for all of them, or a list, or bools (n, V), with one for each.
        """
        listed, values = list_prompts(prompts), check_mode(mode)

        async def ask(session: Session, name: str, deadline: Deadline) -> TopK:
            encoded = encode_all(session, listed, name)
            count = check_k(k, session)
            sets = read_batch_allowed(allowed, len(encoded), session.info.vocab_size)
            pairs = zip(encoded, [check_members(some, count) for some in sets], strict=True)
            asked = [ask_top(session, ids, count, deadline, values, some) for ids, some in pairs]
            tops = await ask_for(listed, asked)
            return stack_tops(tops, count)

        return await self._request(adapter, timeout, ask)

    async def sample(self, ids: Any, **options: Unpack[SampleOptions]) -> int:
        """A token drawn from the distribution of the next one.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            options: see `SampleOptions`.

        Raises:
            SettingsError: an option is unknown or out of range.
        """
        if "allowed" in options:
            options["allowed"] = for_one(options["allowed"])
        return int((await self.batch_sample([ids], **options))[0])

    async def batch_sample(self, prompts: Iterable[Any], **options: Unpack[SampleOptions]) -> NDArray[np.int64]:
        """As `sample`, for n prompts; the i-th is drawn with `seed` + i.

        Returns:
            int64 token ids of shape (n,).
        """
        check_known(options, SampleOptions)
        listed = list_prompts(prompts)
        first_seed = options.get("seed")
        is_private = first_seed is None
        sampling = read_sampling(options.get("temperature", 1.0), options.get("top_p", 1.0), first_seed)
        seeds = [secrets.randbits(64) if is_private else (sampling.seed + at) & MAX_SEED for at in range(len(listed))]

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[np.int64]:
            encoded = encode_all(session, listed, name)
            sets = read_batch_allowed(options.get("allowed"), len(encoded), session.info.vocab_size)
            asked = []
            for prompt, seed, some in zip(encoded, seeds, sets, strict=True):
                how = sampling._replace(seed=seed)
                asked.append(ask_sample(session, prompt, how, deadline, private=is_private, allowed=some))
            tokens = await ask_for(listed, asked)
            return np.array(tokens, np.int64)

        return await self._request(options.get("adapter", ""), options.get("timeout"), ask)

    async def mass(self, ids: Any, allowed: Any, *, adapter: str = "", timeout: float | None = None) -> float:
        """The logarithm of the probability that the next token is one of some; -inf if it is none of them.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            allowed: which tokens, as for `topk`.

        Raises:
            SettingsError: the set is empty, or of another vocabulary.
            UnknownTokenSet: the pool does not know the set of that name.
        """
        return float((await self.batch_mass([ids], for_one(allowed), adapter=adapter, timeout=timeout))[0])

    async def batch_mass(
        self, prompts: Iterable[Any], allowed: Any, *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """As `mass`, for n prompts: float32 (n,). `allowed` is as for `batch_topk`."""
        listed = list_prompts(prompts)

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[np.float32]:
            encoded = encode_all(session, listed, name)
            sets = read_batch_allowed(allowed, len(encoded), session.info.vocab_size)
            if not all(some.packed for some in sets):
                raise SettingsError("allowed: None: give the tokens whose probability is wanted")
            pairs = zip(encoded, sets, strict=True)
            masses = await ask_for(listed, [ask_mass(session, prompt, some, deadline) for prompt, some in pairs])
            return np.array(masses, np.float32)

        return await self._request(adapter, timeout, ask)

    async def token_set(self, allowed: Any, *, timeout: float | None = None) -> TokenSet:
        """A set of tokens that the pool knows by name from now on, so that queries about it carry 17 bytes.

        For sets that are asked about often. It is kept for a day, and told again by whoever has it when it is
        forgotten; who has its name only (`TokenSet.name.hex()`) gets `UnknownTokenSet` then.

        Args:
            allowed: as for `topk`.

        Raises:
            SettingsError: as `mass`.
        """

        async def ask(session: Session, name: str, deadline: Deadline) -> TokenSet:
            tokens = read_allowed(allowed, session.info.vocab_size).tokens
            if tokens is None:
                raise SettingsError(f"allowed: {shown(allowed)}: give the tokens that the set has")
            await session.vocabularies.register_tokens(tokens, deadline)
            return replace(tokens, is_named=True)

        return await self._request("", timeout, ask)

    async def generate(
        self, ids: Any, max_tokens: int, *, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """Continuations of a prompt, each in one request: a worker draws token after token.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
            max_tokens: so many tokens at most, at least 1; all but the last must fit behind the prompt.
            n: how many, at least 1; the i-th is drawn with `seed` + i * 2**32.
            options: see `GenerateOptions`.

        Returns:
            of each its token ids, int64 (m,), m <= `max_tokens`, and what these have in their rows, float32 (m,): their
            log-probabilities, whatever the temperature.

        Raises:
            SettingsError: an option is unknown or out of range.
            PromptTooLong: prompt and continuation are longer than the model's longest prompt.
            NotTokenIds, TokenOutOfRange: `stop` has no token ids of the model.
        """
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise SettingsError(f"n: {shown(n)} must be a whole number of at least 1")
        return await self.batch_generate([ids] * int(n), max_tokens, **options)

    async def batch_generate(
        self, prompts: Iterable[Any], max_tokens: int, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """As `generate`, one continuation of each of several prompts; the i-th is drawn with `seed` + i * 2**32."""
        check_known(options, GenerateOptions)
        listed, is_private = list_prompts(prompts), options.get("seed") is None
        sampling = read_sampling(options.get("temperature", 1.0), options.get("top_p", 1.0), options.get("seed"))

        async def ask(session: Session, name: str, deadline: Deadline) -> list[Continuation]:
            stop = pack_stops(read_stops(options.get("stop", ()), session.info.vocab_size))
            encoded = encode_all(session, listed, name)
            most = [check_room(max_tokens, prompt, session.info.max_prompt_tokens) for prompt in encoded]
            seeds = [secrets.randbits(64) if is_private else (sampling.seed + (at << 32)) for at in range(len(encoded))]
            asked = []
            for prompt, count, seed in zip(encoded, most, seeds, strict=True):
                query = GenerateQuery(count, sampling.temperature, sampling.top_p, seed & MAX_SEED, stop)
                asked.append(ask_continuation(session, prompt, query, deadline, private=is_private))
            return await ask_for(listed, asked)

        return await self._request(options.get("adapter", ""), options.get("timeout"), ask)

    async def score(
        self,
        prompt: Any,
        continuation: Any,
        *,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """What each token of a continuation scores: its log-probability after the prompt and the tokens before it.

        Workers of backends that can (`model.positions`) run one forward for it; otherwise the rows of all prefixes are
        computed. Forwards of different lengths round differently: expect what rows say to about 1e-4 in float32.

        Args:
            prompt: as for `Producer.logprobs`.
            continuation: token ids, at least one. Both together are at most as long as the model's longest prompt.
            mode: as `Producer.logprobs`.

        Returns:
            float32 of shape (m,), one for each token of the continuation; the sum of log-probabilities is what all of
            it scores.
        """
        return (await self.batch_score([prompt], [continuation], mode=mode, adapter=adapter, timeout=timeout))[0]

    async def batch_score(
        self,
        prompts: Iterable[Any],
        continuations: Iterable[Any],
        *,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """As `score`, for n prompts with a continuation each.

        Raises:
            SettingsError: there are not as many continuations as prompts.
        """
        first_ids, second_ids, values = list_prompts(prompts), list_prompts(continuations), check_mode(mode)

        async def ask(session: Session, name: str, deadline: Deadline) -> list[Row]:
            firsts = encode_all(session, first_ids, name)
            try:
                seconds = encode_all(session, second_ids, name, "continuations")
            except InvalidPrompt as error:
                said = str(error).replace("the prompt", "it", 1)
                raise type(error)(said if said.startswith("continuations") else f"continuation: {said}") from error
            if len(firsts) != len(seconds):
                raise SettingsError(f"continuations: {len(seconds)} for {len(firsts)} prompts; each prompt needs one")
            pairs = zip(firsts, seconds, strict=True)
            return await ask_for(first_ids, [ask_scores(session, *pair, deadline, values) for pair in pairs])

        return await self._request(adapter, timeout, ask)

    async def positions(self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]) -> Expected:
        """What the model expects behind every token of a text from position `start` on: at i, after ids[: i + 1].

        Workers of backends that can (`model.positions`) run one forward for it; otherwise each position is a prompt of
        its own. Forwards of different lengths round differently: expect what rows say to about 1e-4 in float32.

        Args:
            ids: a text of N tokens, as a prompt for `Producer.logprobs`.
            start: the first position, 0 to N - 1.
            options: see `PositionOptions`; one of `top`, `targets`, `full` and `logz` says what is wanted.

        Returns:
            with `top` log-probabilities, float32 (n, top), and token ids, int64 (n, top), n = N - start, likeliest
            first, of equal ones the lowest id first; else log-probabilities, float32 (n, m) or (n, V).

        Raises:
            SettingsError: `start` or `top` is out of range, or not just one of the three is given.
            NotTokenIds, TokenOutOfRange: `targets` are no token ids of the model.
        """
        (found,) = await self.batch_positions([ids], start, **options)
        return found

    async def batch_positions(
        self, texts: Iterable[Any], start: int = 0, **options: Unpack[PositionOptions]
    ) -> list[Expected]:
        """As `positions`, for several texts, each from `start` on."""
        listed = list_prompts(texts)

        async def ask(session: Session, name: str, deadline: Deadline) -> list[Expected]:
            wanted = read_wanted(options, session)
            encoded = [check_start(start, text) for text in encode_all(session, listed, name, "texts")]
            asked = [ask_positions(session, text, start, wanted, deadline) for text in encoded]
            return await ask_for(listed, asked, "texts")

        return await self._request(options.get("adapter", ""), options.get("timeout"), ask)

    async def stream_positions(
        self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]
    ) -> AsyncIterator[Positions]:
        """As `positions`, in parts of 8 MiB at most, in order, for what is too large for memory.

        Args:
            ids: as for `positions`.
            start: as for `positions`.
            options: as for `positions`, but `timeout` is for each part.

        Raises:
            ModelMismatch: the model, or the adapter, is another one than for the parts before.
        """

        async def plan(session: Session, name: str, deadline: Deadline) -> tuple[Prompt, Wanted, list[range], str]:
            text, wanted = check_start(start, session.encode(ids, name)), read_wanted(options, session)
            return text, wanted, parts_of(session, text, start, wanted), session.info.fingerprint

        adapter, timeout = options.get("adapter", ""), options.get("timeout")
        text, wanted, parts, fingerprint = await self._request(adapter, timeout, plan)

        def asking(part: range) -> Callable[[Session, str, Deadline], Coroutine[Any, Any, Expected]]:
            async def ask(session: Session, name: str, deadline: Deadline) -> Expected:
                if (session.info.fingerprint, name) != (fingerprint, text.adapter):
                    raise ModelMismatch(f"the model or its adapter has changed before position {part.start}: ask again")
                is_one = len(parts) == 1
                found = await ask_part(session, beginning(text, part.stop), part, wanted, deadline, private=not is_one)
                check_same_model(session, fingerprint)
                return found

            return ask

        for part in parts:
            yield Positions(part.start, await self._request(adapter, timeout, asking(part)))

    async def logz(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> float:
        """The logarithm of the sum of the exponentials of the logits after a prompt: logits less this are its row.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
        """
        return float((await self.batch_logz([ids], adapter=adapter, timeout=timeout))[0])

    async def batch_logz(
        self, prompts: Iterable[Any], *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """As `logz`, for n prompts: float32 (n,)."""
        listed = list_prompts(prompts)

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[np.float32]:
            encoded = encode_all(session, listed, name)
            wanted = Wanted(values="logz")
            asked = [ask_last(session, ids, wanted, deadline) for ids in encoded]
            return np.array(await ask_for(listed, asked), np.float32)

        return await self._request(adapter, timeout, ask)

    async def hidden(
        self, ids: Any, start: int = 0, *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[Any]:
        """The last hidden states of a text from position `start` on: what the model's head makes its rows of.

        For clients with a device of their own: `await producer.head()` has what turns them into rows, and at V =
        128,000 they are some thirty times fewer bytes than these.

        Args:
            ids: a text of N tokens, as for `positions`.
            start: the first position, 0 to N - 1.

        Returns:
            (N - start, d) in the model's dtype; those of a bfloat16 model, which numpy does not have, in float32.

        Raises:
            SettingsError: `start` is out of range, or the backend does not tell them (`producer.model.hidden` is 0).
        """

        async def ask(session: Session, name: str, deadline: Deadline) -> NDArray[Any]:
            return await ask_hidden(session, check_start(start, session.encode(ids, name)), start, deadline)

        return await self._request(adapter, timeout, ask)

    async def head(self, *, timeout: float | None = None) -> Head:
        """What turns hidden states into rows: weights, bias, scale and soft-cap of the model's last layer.

        It is fetched once, in parts of 8 MiB, and kept in this producer as long as the model stays the same.

        Args:
            timeout: seconds for all of it; None for the producer's.

        Raises:
            SettingsError: the backend does not tell it (`producer.model.hidden` is 0).
        """

        async def ask(session: Session, name: str, deadline: Deadline) -> Head:
            return await ask_head(session, self._heads, deadline)

        return await self._request("", timeout, ask)

    async def warm(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> None:
        """Have a prompt's row computed and cached, without having it sent.

        The worker that computes it also keeps its keys and values for prompts that extend it. A row that is cached is
        not computed again, so then no worker is warmed.

        Args:
            ids: a prompt, as for `Producer.logprobs`.
        """

        async def ask(session: Session, name: str, deadline: Deadline) -> None:
            prompt = session.encode(ids, name)
            if session.cached(prompt) is None:
                await session.answer(prompt, deadline, warm=True)

        await self._request(adapter, timeout, ask)

    async def _request(
        self, adapter: object, timeout: float | None, ask: Callable[[Session, str, Deadline], Coroutine[Any, Any, T]]
    ) -> T:
        """One request: by its deadline, and with the adapter as jobs name it (see `SessionPerLoop.request`)."""
        if self._traces is None:
            return await self._ask(adapter, timeout, ask)
        # Named by the method that asks: `PartialRows.batch_topk.<locals>.ask`.
        operation = ask.__qualname__.partition(".<locals>")[0].rpartition(".")[2].lstrip("_")
        with self._traces.span(operation):
            return await self._ask(adapter, timeout, ask)

    def _ask(
        self, adapter: object, timeout: float | None, ask: Callable[[Session, str, Deadline], Coroutine[Any, Any, T]]
    ) -> Coroutine[Any, Any, T]:
        deadline = Deadline.of(timeout, self._timeout)
        return self._sessions.request(adapter, deadline, lambda session, name: ask(session, name, deadline))
