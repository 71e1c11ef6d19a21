"""Answer queries about prompts, such as top-k tokens, from a cached row, or request their results from workers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool import errors
from lmpool.aio import gather
from lmpool.producer.client.requests import MAX_OVERWRITES, Deadline
from lmpool.producer.client.session import Session
from lmpool.protocol import picks
from lmpool.protocol import query as wire
from lmpool.protocol.adapter import name_of
from lmpool.protocol.job import DIGEST_SIZE, Prompt, decode_ids, digest_of
from lmpool.protocol.row import FACTS, Head, Row, check_logits, check_logprobs, check_row, unpack_numbers, width_of
from lmpool.protocol.token_set import TokenSet

T = TypeVar("T")

Mode = Literal["logprobs", "logits"]
"""Whether values are log-probabilities, or the logits from which the model computed them."""

# Max parts (8 MiB each) of one result that are requested at once, so that parts do not fill the server's memory.
_MAX_PARTS_IN_FLIGHT = 2
# Max entries read one by one from a cached row. For more entries, a query to a worker costs the server less.
_MAX_READ_IN_PLACE = 128
_MAX_SHARE = 1 / 8  # Max share of a row's entries that a query requests. For more entries, the row itself is requested.
_MIN_TOP = 8  # Request at least this many top tokens, so that calls share results.


class Allowed(NamedTuple):
    """The tokens that a query may return.

    Attributes:
        packed: the token set as it is encoded in queries (`TokenSet.packed`); b"" for all tokens.
        tokens: the token set, or None for all tokens or if the caller gave only the name of a set.
    """

    packed: bytes = b""
    tokens: TokenSet | None = None


_ALL = Allowed()
_NO_TARGETS = np.empty(0, np.int64)


class Wanted(NamedTuple):
    """The values that are requested at every position. Without any of the first five, these are whole rows.

    Attributes:
        top: number of most likely tokens; 0 for none.
        targets: ids of the tokens whose entries are requested: int64 (m,), or (n, m) with the ids of each position of
            the text from `start` on, padded with `NO_TOKEN`.
        next_token: whether the entry of the token that follows each position is requested.
        logz: whether logZ is requested.
        tail: whether the log-sum-exp over the other tokens than `top` and `targets` is requested.
        full: whether whole rows are requested too.
        values: kind of the values, as in `PositionsQuery`.
        temperature: divides the logits.
        size: number of float32 values that encode one hidden state.
        allowed: the tokens that `top` chooses from.
        start: the position of the first row of `targets`.
    """

    top: int = 0
    targets: NDArray[np.int64] = _NO_TARGETS
    next_token: bool = False
    logz: bool = False
    tail: bool = False
    full: bool = False
    values: wire.PositionValues = "logprobs"
    temperature: float = 1.0
    size: int = 0
    allowed: Allowed = _ALL
    start: int = 0

    def query(self, part: range, length: int) -> wire.PositionsQuery:
        """Return the query for positions of a prompt of `length` tokens."""
        targets = self._targets_at(part)
        each = targets.shape[1] if targets.ndim == 2 else 0
        return wire.PositionsQuery(
            part.start, self.top, targets.astype("<u4").tobytes(), each, self.next_token, self.logz, self.tail,
            self.values, self.temperature, self.size, self.allowed.packed, stop=part.stop if part.stop < length else 0,
        )  # fmt: skip

    def _targets_at(self, part: range) -> NDArray[np.int64]:
        """Return the targets of some positions."""
        return self.targets if self.targets.ndim == 1 else self.targets[part.start - self.start :][: len(part)]

    def shared(self, vocab_size: int) -> Wanted:
        """Return what to request from workers, so that calls with similar options share one cached result.

        Numbers that cost next to nothing are always part of it. All else is computed from whole rows, if requested.
        """
        if self.full:  # The logits have logZ too.
            return Wanted(values="logits") if self.logz else Wanted(values=self.values, temperature=self.temperature)
        top = self.top and min(vocab_size, max(_MIN_TOP, 1 << (self.top - 1).bit_length()))
        return self._replace(top=top, next_token=True, logz=True, tail=top > 0 or self.targets.size > 0)

    def of(self, found: wire.Predictions, text: Prompt) -> wire.Predictions:
        """Return what is requested, from predictions that were requested as `shared` says."""
        part = range(found.start, found.start + len(found))
        if found.full is not None:
            rows, ids, log_z = found.full, decode_ids(text.ids), np.zeros(len(part), np.float32)
            full, query = rows, self._replace(temperature=1.0).query(part, len(ids))
            if self.logz:  # These are logits before the division by the temperature.
                log_z, query = picks.logsumexp(rows), self.query(part, len(ids))
                if self.values == "logprobs":
                    full = picks.tempered(rows - log_z[:, None], self.temperature)
            if self.allowed.tokens is not None:
                query = query.among(self.allowed.tokens.ids)
            if not query.is_of_entries:
                return wire.Predictions(part.start, full=full)
            return replace(query.with_rows(rows, log_z, part, ids), full=full)
        top, tail = found.top, found.tail if self.tail else None
        if top is not None and top.ids.shape[1] > self.top:
            values, others = top.values[:, self.top :], top.ids[:, self.top :]
            if tail is not None:
                targets = np.broadcast_to(self._targets_at(part), (len(part), self.targets.shape[-1]))
                is_target = np.stack([np.isin(*pair) for pair in zip(others, targets, strict=True)])
                more = np.where(is_target, -np.float32(np.inf), values)
                tail = picks.logsumexp(np.concatenate([tail[:, None], more], axis=1))
            top = picks.TopK(top.values[:, : self.top].copy(), top.ids[:, : self.top].copy())
        following, logz = found.next_token if self.next_token else None, found.logz if self.logz else None
        return wire.Predictions(found.start, top, found.targets, following, logz, tail)


def entries_of(row: Row, targets: list[int]) -> Row:
    """Return some entries of a row; raises ModelMismatch if the model has changed and its rows are too short."""
    if max(targets) >= len(row):
        raise errors.ModelMismatch(f"the model's V is {len(row)} now: ask again, for targets below that")
    return row[targets]


def prefix_of(text: Prompt, length: int) -> Prompt:
    """Return a prompt of the first `length` tokens of `text`."""
    ids = text.ids[: 4 * length]
    return text if len(ids) == len(text.ids) else Prompt(ids, digest_of(ids, text.adapter), text.adapter)


@dataclass(slots=True, eq=False)
class Queries:
    """Makes the queries of one call, in one session and with one deadline.

    `keep_row`: whether the pool's cache must keep the rows from which results are computed (`keep`).
    """

    session: Session
    adapter: str
    deadline: Deadline
    keep_row: bool = False

    @property
    def vocab_size(self) -> int:
        """V, the vocabulary size of the model."""
        return self.session.info.vocab_size

    def encode(self, ids: Any) -> Prompt:
        """Check and encode a prompt."""
        return self.session.encode(ids, self.adapter)

    def encode_all(self, prompts: Sequence[Any], name: str = "prompts") -> list[Prompt]:
        """Check and encode the prompts of the argument `name`."""
        return check_each(self.encode, prompts, name=name)

    async def row(self, prompt: Prompt) -> Row:
        """Return a row."""
        row = self.session.cached(prompt)
        return row if row is not None else await self.session.answer(prompt, self.deadline)

    async def fresh(self, prompt: Prompt) -> Row:
        """Return a row that a worker computes now, without reading or writing a cache."""
        query = wire.FreshQuery(secrets.token_bytes(DIGEST_SIZE)).pack()
        return await self._result(prompt.with_query(query, self.vocab_size), check_row, private=True)

    async def keep(self, prompt: Prompt) -> None:
        """If `keep_row` is set, wait until the pool's cache has the row of a prompt, which a worker may compute."""
        if self.keep_row:
            await self.session.answer(prompt, self.deadline, warm=True)

    async def _cached(self, prompt: Prompt) -> Row | None:
        """Return a row that this process can read without a request; without such a row, `keep` the row."""
        row = self.session.cached(prompt)
        if row is None:
            await self.keep(prompt)
        return row

    async def entries(self, prompt: Prompt, targets: list[int], temperature: float = 1.0) -> Row:
        """Return some entries of a row: float32 (k,)."""
        session, deadline = self.session, self.deadline
        row = await self._cached(prompt)
        if row is None:
            if temperature == 1 and len(targets) <= _MAX_READ_IN_PLACE:
                read = session.entries.read(prompt.digest, targets, deadline.end)
                if (entries := await read) is not None:
                    session.count_hits(deadline.end - deadline.seconds)
                    return entries
            if len(targets) <= self.vocab_size * _MAX_SHARE:
                query = wire.EntriesQuery(np.array(targets, "<u4").tobytes(), temperature)
                return await self._of_row(prompt, query, len(targets), lambda answer: check_logprobs(answer.copy()))
            row = await session.answer(prompt, deadline)
        return entries_of(picks.tempered(row[None], temperature)[0], targets)

    async def all_entries(
        self, prompts: Sequence[Prompt], targets: Sequence[list[int]], k: int, *, values: Mode = "logprobs",
        temperature: float = 1.0, name: str = "",
    ) -> NDArray[np.float32]:  # fmt: skip
        """Return `k` entries of each row: float32 (n, k). Error texts name the prompt: "prompts[3]"."""
        out = np.empty((len(prompts), k), np.float32)

        async def put(at: int) -> None:
            if values == "logits" or temperature != 1:
                await self.keep(prompts[at])
                ids = np.array(targets[at], np.int64)
                wanted = Wanted(targets=ids, values=values, temperature=temperature)
                found = await self.last(prompts[at], wanted)
                out[at] = found.full if found.targets is None else found.targets
            else:
                out[at] = await self.entries(prompts[at], targets[at])

        await for_each([put(at) for at in range(len(prompts))], name)
        return out

    async def _result(
        self, prompt: Prompt, read: Callable[[Row], T], *, private: bool = False, allowed: Allowed = _ALL
    ) -> T:
        """Request the result of a prompt's query and decode it with `read`, which raises ProtocolError for damage.

        A worker computes a damaged result again, at most twice; then this raises `CorruptRow`. The second time is for a
        read that began before the damaged result was removed, and ends after it. If the pool has evicted the query's
        token set `allowed`, the set is stored again. `private` is an option of `Session.answer`.
        """
        ask = partial(self.session.answer, prompt, self.deadline, private=private)
        try:
            answer = await ask()
        except errors.UnknownTokenSet:
            if allowed.tokens is None:
                raise
            await self.session.vocabularies.register_tokens(allowed.tokens, self.deadline)
            answer = await ask()
        for _ in range(MAX_OVERWRITES):
            with suppress(errors.ProtocolError):
                return read(answer)
            answer = await ask(damaged=True)
        try:
            return read(answer)
        except errors.ProtocolError as error:
            text = f"the cached answer for prompt {prompt.digest.hex()} is damaged: {error}"
            raise errors.CorruptRow(text) from error

    async def _of_row(
        self, prompt: Prompt, query: wire.PickQuery, length: int, read: Callable[[Row], T], *, private: bool = False,
        allowed: Allowed = _ALL,
    ) -> T:  # fmt: skip
        """Request the result of a query about a prompt's row; arguments as for `_result`.

        If queries about one prompt could be sent to several workers, each of these workers would compute the row. So
        later queries wait for the first, and are then sent to its worker, which has the row.
        """
        session = self.session
        wanted = prompt.with_query(query.pack(), length)
        ask = partial(self._result, wanted, read, private=private, allowed=allowed)
        if session.has_place_for(prompt) or session.is_pending(wanted):
            return await ask()
        if (first := session.first_queries.get(prompt.digest)) is not None:
            await asyncio.wait([first], timeout=self.deadline.left)
            return await ask()
        session.first_queries[prompt.digest] = first = session.loop.create_future()
        try:
            return await ask()
        finally:
            del session.first_queries[prompt.digest]
            first.set_result(None)

    async def top(
        self, prompt: Prompt, k: int, values: Mode = "logprobs", allowed: Allowed = _ALL, temperature: float = 1.0
    ) -> picks.TopK:
        """Return the `k` largest entries of a row."""
        row = await self._cached(prompt)
        if row is not None and values == "logprobs" and (allowed.tokens is not None or not allowed.packed):
            row = picks.tempered(row[None], temperature)[0]
            return picks.top(row, k, None if allowed.tokens is None else allowed.tokens.ids)
        if values == "logits" or temperature != 1:
            wanted = Wanted(k, values=values, temperature=temperature, allowed=allowed)
            best = (await self.last(prompt, wanted)).top
            assert best is not None
            return picks.TopK(best.values[0], best.ids[0])
        read = partial(wire.unpack_top, vocab_size=self.vocab_size, of_row=not allowed.packed)
        return await self._of_row(prompt, wire.TopQuery(k, allowed.packed), 2 * k, read, allowed=allowed)

    async def sample(self, prompt: Prompt, sampling: picks.Sampling, allowed: Allowed, *, private: bool) -> int:
        """Return a token sampled from a row."""
        row = await self._cached(prompt)
        if row is not None and (allowed.tokens is not None or not allowed.packed):
            return picks.sample(row, sampling, None if allowed.tokens is None else allowed.tokens.ids)
        query = wire.SampleQuery(*sampling, allowed.packed)
        read = partial(wire.unpack_token, vocab_size=self.vocab_size)
        return await self._of_row(prompt, query, 1, read, private=private, allowed=allowed)

    async def mass(self, prompt: Prompt, allowed: Allowed) -> float:
        """Return the logarithm of the total probability of the allowed tokens."""
        row = await self._cached(prompt)
        if row is not None and allowed.tokens is not None:
            return float(picks.mass_of(row, allowed.tokens.ids))
        query = wire.MassQuery(allowed.packed)
        return await self._of_row(prompt, query, 1, lambda answer: float(check_logprobs(answer)[0]), allowed=allowed)

    async def continuation(self, prompt: Prompt, wanted: wire.GenerateQuery, *, private: bool) -> wire.Continuation:
        """Return tokens that a worker samples one after the other."""
        query = prompt.with_query(wanted.pack(), 2 * wanted.most, wanted.most)
        return await self._result(query, partial(wire.unpack_continuation, vocab_size=self.vocab_size), private=private)

    async def scores(self, prompt: Prompt, continuation: Prompt, values: Mode, temperature: float) -> Row:
        """Return the log-probability, or the logit, of each token of a continuation: float32 (m,)."""
        info, ids = self.session.info, prompt.ids + continuation.ids
        start, end = len(prompt.ids) // 4, len(ids) // 4
        if end > (limit := info.max_prompt_tokens):
            raise errors.PromptTooLong(f"the prompt and its continuation have {end} tokens: the limit is {limit}")
        whole = Prompt(ids, digest_of(ids, prompt.adapter), prompt.adapter)
        if info.positions:
            wanted = wire.PositionsQuery.scores_from(start, logits=values == "logits", temperature=temperature)
            check = check_logprobs if values == "logprobs" else check_logits
            with suppress(errors.SourceMissing):  # The worker that took the job does not support positions.
                return await self._result(whole.with_query(wanted.pack(), end - start), check)
        if values == "logits":
            raise self._unsupported("mode")
        if temperature != 1:
            wanted_rows = Wanted(next_token=True, temperature=temperature)
            return np.asarray((await self._from_rows(whole, range(start - 1, end - 1), wanted_rows)).next_token)
        # Request all prefixes concurrently, so that workers compute their common part once.
        prefixes = [prefix_of(whole, at) for at in range(start, end)]
        tokens = decode_ids(continuation.ids).tolist()
        return (await self.all_entries(prefixes, [[token] for token in tokens], 1))[:, 0]

    def parts(self, text: Prompt, start: int, wanted: Wanted) -> list[range]:
        """Split the positions of a text from `start` on into parts whose results each fit into one reply."""
        length, vocab_size = len(text.ids) // 4, self.vocab_size
        requested = wanted if wanted.size else wanted.shared(vocab_size)
        size = requested.query(range(start, start + 1), length).most_positions(vocab_size)
        return [range(at, min(at + size, length)) for at in range(start, length, size)]

    async def positions(self, text: Prompt, start: int, wanted: Wanted) -> wire.Predictions:
        """Return the predictions at every position of a text from `start` on."""
        return wire.Predictions.join(await self._all_parts(text, start, wanted, self.part))

    async def hidden(self, text: Prompt, start: int) -> NDArray[Any]:
        """Return the last hidden states of a text from position `start` on: (n, d)."""
        info = self.session.info
        if not info.hidden or not info.positions:
            raise self._unsupported("hidden")
        wanted = Wanted(values="hidden", size=width_of(info.hidden, info.dtype))

        async def part(text: Prompt, part: range, wanted: Wanted, *, private: bool = False) -> NDArray[Any]:
            prompt = prefix_of(text, part.stop)
            read = partial(unpack_numbers, count=len(part), size=info.hidden, dtype=info.dtype)
            prompt = prompt.with_query(wanted.query(part, part.stop).pack(), len(part) * wanted.size)
            return await self._result(prompt, read, private=private)

        return np.concatenate(await self._all_parts(text, start, wanted, part))

    async def _all_parts(self, text: Prompt, start: int, wanted: Wanted, ask: Callable[..., Any]) -> list[Any]:
        """Await `ask` for all parts of a text's positions."""
        parts, fingerprint = self.parts(text, start, wanted), self.session.info.fingerprint
        if len(parts) == 1:
            return [await ask(text, parts[0], wanted)]
        # Request few parts at once: more could fill the server's memory, and engines would compute each prefix again.
        slots = asyncio.Semaphore(_MAX_PARTS_IN_FLIGHT)

        async def ask_one(part: range) -> Any:
            async with slots:
                return await ask(text, part, wanted, private=True)

        answers = await gather([ask_one(part) for part in parts])
        self.check_same_model(fingerprint)
        return answers

    def check_same_model(self, fingerprint: str) -> None:
        """Raise ModelMismatch if the fingerprint has changed, because the parts of a result may be of two models."""
        if (info := self.session.info).fingerprint != fingerprint:
            text = f"the model {info.name!r} has changed while parts of a result arrived: ask again"
            raise errors.ModelMismatch(text)

    async def part(
        self, text: Prompt, part: range, wanted: Wanted, *, private: bool = False, shares: bool = True
    ) -> wire.Predictions:
        """Return the predictions at positions of a text.

        `private` is an option of `Session.answer`. `shares`: whether to request the result as `Wanted.shared` says.
        """
        if self.session.info.positions:
            requested, vocab_size = wanted.shared(self.vocab_size) if shares else wanted, self.vocab_size
            # The token after the part is needed too; later tokens are not.
            prompt = prefix_of(text, min(part.stop + 1, len(text.ids) // 4))
            query = requested.query(part, len(prompt.ids) // 4)

            def read(answer: Row) -> wire.Predictions:
                return query.split(answer, part, len(text.ids) // 4, vocab_size)

            with_query = prompt.with_query(query.pack(), len(part) * query.width(vocab_size))
            with suppress(errors.SourceMissing):  # The worker that took the job does not support positions.
                found = await self._result(with_query, read, private=private, allowed=wanted.allowed)
                return wanted.of(found, text) if shares else found
        return await self._from_rows(text, part, wanted)

    async def _from_rows(self, text: Prompt, part: range, wanted: Wanted) -> wire.Predictions:
        """Return the predictions at positions of a text, computed here from the rows of all prefixes."""
        if wanted.logz or wanted.values == "logits":
            raise self._unsupported("logz" if wanted.logz else "mode")
        if wanted.allowed.packed and wanted.allowed.tokens is None:
            raise self._unsupported("allowed")
        size, found = max(1, wire.MAX_ANSWER // self.vocab_size), list[wire.Predictions]()
        for first in range(part.start, part.stop, size):
            some = range(first, min(first + size, part.stop))
            prefixes = [prefix_of(text, at + 1) for at in some]
            rows = picks.tempered(await self.session.answer_all(prefixes, self.deadline), wanted.temperature)
            made = wanted.of(wire.Predictions(some.start, full=rows), text)
            found.append(made if wanted.full else replace(made, full=None))
        return wire.Predictions.join(found)

    def _unsupported(self, name: str) -> errors.SettingsError:
        """Return the error for an option or a call that the backend does not support."""
        info, is_hidden = self.session.info, name in ("hidden", "head")
        only, support = ("no hidden states", "them") if is_hidden else ("log-probabilities only", "positions")
        text = f"the workers of {info.name!r} return {only}: their backend {info.backend!r} does not support {support}"
        return errors.SettingsError(f"{name}: {text}")

    async def last(self, prompt: Prompt, wanted: Wanted) -> wire.Predictions:
        """Return the predictions at the last position of a prompt."""
        last = len(prompt.ids) // 4 - 1
        return await self.part(prompt, range(last, last + 1), wanted, shares=False)

    async def head(self, heads: dict[str, Head]) -> Head:
        """Return the head (the last layer) from `heads`, or fetch it for all callers.

        `heads`: fingerprint, followed by the name of an adapter -> head.
        """
        fingerprint = self.session.info.fingerprint
        name = fingerprint + self.adapter
        if (head := heads.get(name)) is not None:
            return head
        lock = self.session.fetching_head
        async with self.deadline.limit():
            await lock.acquire()
        try:
            if (head := heads.get(fingerprint)) is None:
                head = await self._fetch_head()
                heads.clear()
                heads[fingerprint] = _sealed(head)
            if self.adapter and name not in heads:
                # Keep the head of one revision of each adapter: a trainer replaces its adapter often.
                adapter = name_of(self.adapter)
                for old in [key for key in heads if name_of(key.removeprefix(fingerprint)) == adapter]:
                    del heads[old]
                heads[name] = _sealed(await self._with_factors(head))
        finally:
            lock.release()
        return heads[name]

    async def _with_factors(self, head: Head) -> Head:
        """Return the head with the LoRA factors that the adapter has for it."""
        info, prompt = self.session.info, self.session.encode([0], self.adapter)

        async def ask(part: Literal["rank", "down", "up"], first: int = 0, count: int = 0) -> Row:
            query = wire.HeadQuery(part, first, count)
            read = partial(unpack_numbers, count=1, size=count or 1, dtype="float32")
            numbers: Row = (await self._result(prompt.with_query(query.pack(), count or 1), read, private=True))[0]
            return numbers

        async def ask_all(part: Literal["down", "up"], shape: tuple[int, int]) -> Row:
            size = shape[0] * shape[1]
            starts = range(0, size, wire.MAX_ANSWER)
            parts = [await ask(part, first, min(wire.MAX_ANSWER, size - first)) for first in starts]
            return np.concatenate(parts).reshape(shape)

        if not (rank := int((await ask("rank"))[0])):
            return head
        down, up = await ask_all("down", (rank, info.hidden)), await ask_all("up", (info.vocab_size, rank))
        self.check_same_model(info.fingerprint)
        return replace(head, down=down, up=up)

    async def _fetch_head(self) -> Head:
        info, prompt = self.session.info, self.session.encode([0])
        if not info.hidden:
            raise self._unsupported("head")
        width, size = width_of(info.hidden, info.dtype), info.vocab_size

        async def ask(query: wire.HeadQuery, length: int, read: Callable[[Row], T]) -> T:
            return await self._result(prompt.with_query(query.pack(), length), read, private=True)

        one = partial(unpack_numbers, count=1, dtype="float32")
        scale, soft_cap, has_bias = (await ask(wire.HeadQuery("facts"), FACTS, partial(one, size=FACTS)))[0].tolist()
        bias = (await ask(wire.HeadQuery("bias"), size, partial(one, size=size)))[0].copy() if has_bias else None
        rows = max(1, wire.MAX_ANSWER // width)
        parts = []
        # Request one part after the other: all parts at once could fill the server's memory.
        for first in range(0, size, rows):
            count = min(rows, size - first)
            read = partial(unpack_numbers, count=count, size=info.hidden, dtype=info.dtype)
            parts.append(await ask(wire.HeadQuery("weights", first, count), count * width, read))
        self.check_same_model(info.fingerprint)
        return Head(np.concatenate(parts), bias, scale, soft_cap or None, info.dtype)


def _sealed(head: Head) -> Head:
    """Make the arrays of a head read-only, because all callers share them."""
    for array in (head.weights, head.bias, head.down, head.up):
        if array is not None:
            array.setflags(write=False)
    return head


def check_each(check: Callable[..., T], *arguments: Sequence[Any], name: str = "prompts") -> list[T]:
    """Call `check` with the arguments of each prompt; with a `name`, an error begins with it and the prompt's index."""
    checked: list[T] = []
    try:
        for each in zip(*arguments, strict=True):
            checked.append(check(*each))  # noqa: PERF401 `len(checked)` is an invalid prompt's index.
    except (errors.InvalidPrompt, errors.SettingsError) as error:
        if name and len(arguments[0]) > 1:
            error.args = (text := f"{name}[{len(checked)}]: {error}",)
            if isinstance(error, errors.SettingsError):
                error.setting, error.problem = "", text
        raise
    return checked


async def for_each(work: Sequence[Coroutine[Any, Any, T]], name: str = "prompts") -> list[T]:
    """Await the work for each prompt; the first failure cancels the other work, and begins as in `check_each`."""
    named = len(work) if name else 0
    return await gather(work, lambda error, index: errors.of_prompt(error, name, index, named))
