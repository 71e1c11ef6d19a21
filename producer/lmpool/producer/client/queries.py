"""Queries: what is wanted of a prompt beside its row; asked, or answered from a row at hand; answers are checked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import gather
from lmpool.errors import (
    CorruptRow,
    ModelMismatch,
    PromptTooLong,
    ProtocolError,
    SettingsError,
    SourceMissing,
    UnknownTokenSet,
    of_prompt,
)
from lmpool.producer.client.receive import WantedEntries
from lmpool.producer.client.session import Session
from lmpool.producer.deadline import Deadline
from lmpool.protocol.job import DIGEST_SIZE, Prompt, decode_ids, digest_of
from lmpool.protocol.query import (
    MAX_ANSWER,
    Continuation,
    FreshQuery,
    GenerateQuery,
    HeadQuery,
    MassQuery,
    PositionsQuery,
    PositionValues,
    SampleQuery,
    Sampling,
    TopK,
    TopQuery,
    mass_of,
    sample,
    sample_of,
    stack_tops,
    top,
    top_of,
    unpack_continuation,
    unpack_token,
    unpack_top,
)
from lmpool.protocol.row import FACTS, Head, Row, check_logprobs, check_row, unpack_numbers, width_of
from lmpool.protocol.token_set import TokenSet

T = TypeVar("T")

# Parts of one answer, of 8 MiB each, that are under way.
_PARTS_AT_ONCE = 2


_MAX_READ_IN_PLACE = 128
"""Entries of one row; for more, fetching the row costs the server less than looking each up."""


Mode = Literal["logprobs", "logits"]
"""Whether values are log-probabilities, or the logits that the model computed them from."""


Expected = TopK | NDArray[np.float32]
"""What is wanted of n positions: the likeliest tokens of each, (n, k), or numbers of each, mostly float32 (n, m)."""


class Allowed(NamedTuple):
    """Which tokens are allowed.

    Attributes:
        packed: the set as queries carry it (`TokenSet.packed`); b"" for all.
        tokens: it, unless the caller has given a name only.
    """

    packed: bytes = b""
    tokens: TokenSet | None = None


_ALL = Allowed()


class Wanted(NamedTuple):
    """What is wanted of every position: the `top` likeliest tokens, or the entries of targets, or whole rows.

    Attributes:
        top: how many; 0 for none.
        targets: otherwise these.
        values: of what (`PositionsQuery`).
        size: numbers of each hidden state in an answer.
        allowed: the `top` likeliest of these tokens.
    """

    top: int = 0
    targets: tuple[int, ...] = ()
    values: PositionValues = "logprobs"
    size: int = 0
    allowed: Allowed = _ALL

    def query(self, start: int) -> PositionsQuery:
        """The query for it."""
        targets = np.array(self.targets, "<u4").tobytes()
        return PositionsQuery(start, self.top, targets, self.values, self.size, self.allowed.packed)


async def ask_entries(session: Session, prompt: Prompt, targets: list[int], deadline: Deadline) -> Row:
    """Some entries of a row, float32 (k,)."""
    row = session.cached(prompt)
    if row is None and len(targets) <= _MAX_READ_IN_PLACE:
        wanted = WantedEntries(prompt.digest, targets)
        entries = await session.read_entries(wanted, deadline)
        if entries is None:
            await session.answer(prompt, deadline, warm=True)
            entries = await session.read_entries(wanted, deadline)
        elif not isinstance(entries, CorruptRow):
            session.count_hit(deadline)
        if entries is not None and not isinstance(entries, CorruptRow):
            return entries
    if row is None:
        # Many entries, or none could be read: fetching a damaged row has it computed anew.
        row = await session.answer(prompt, deadline)
    return entries_of(row, targets)


def entries_of(row: Row, targets: list[int]) -> Row:
    """Some entries of a row.

    Raises:
        ModelMismatch: the model has changed since the targets were checked, and its rows are shorter now.
    """
    if max(targets) >= len(row):
        raise ModelMismatch(f"the model's V is {len(row)} now: ask again, for targets below that")
    return row[targets]


async def _answer(
    session: Session, prompt: Prompt, deadline: Deadline, read: Callable[[Row], T], *, private: bool = False
) -> T:
    """Ask, and read the answer; one that is damaged in the cache is replaced.

    Args:
        session: with the model's workers.
        prompt: what is asked.
        deadline: for how long.
        read: reads the answer, or raises ProtocolError.
        private: as `Session.answer`.

    Raises:
        CorruptRow: it is damaged again.
    """
    answer = await session.answer(prompt, deadline, private=private)
    try:
        return read(answer)
    except ProtocolError:
        pass
    try:
        return read(await session.answer(prompt, deadline, private=private, damaged=True))
    except ProtocolError as error:
        raise CorruptRow(f"the cached answer for prompt {prompt.digest.hex()} is damaged: {error}") from error


async def ask_top(
    session: Session,
    prompt: Prompt,
    k: int,
    deadline: Deadline,
    values: Mode = "logprobs",
    allowed: Allowed = _ALL,
) -> TopK:
    """The `k` largest entries of a row, or of those of some tokens."""
    if values == "logits":
        best = await ask_last(session, prompt, Wanted(k, values=values, allowed=allowed), deadline)
        assert isinstance(best, TopK)
        return best
    row, is_whole = session.cached(prompt), not allowed.packed
    if row is not None and (is_whole or allowed.tokens is not None):
        return top(row, k) if allowed.tokens is None else top_of(row, k, allowed.tokens.ids)
    query = prompt.with_query(TopQuery(k, allowed.packed).pack(), 2 * k)
    read = partial(unpack_top, vocab_size=session.info.vocab_size, of_row=is_whole)
    return await _answer_about(allowed, session, query, deadline, read)


async def ask_sample(
    session: Session, prompt: Prompt, sampling: Sampling, deadline: Deadline, *, private: bool, allowed: Allowed = _ALL
) -> int:
    """A token drawn from a row, or from its entries of some tokens."""
    row = session.cached(prompt)
    if row is not None and (not allowed.packed or allowed.tokens is not None):
        return sample(row, sampling) if allowed.tokens is None else sample_of(row, sampling, allowed.tokens.ids)
    query = prompt.with_query(SampleQuery(*sampling, allowed.packed).pack(), 1)
    read = partial(unpack_token, vocab_size=session.info.vocab_size)
    return await _answer_about(allowed, session, query, deadline, read, private=private)


async def ask_mass(session: Session, prompt: Prompt, allowed: Allowed, deadline: Deadline) -> float:
    """The logarithm of the probability that some tokens have together."""
    row = session.cached(prompt)
    if row is not None and allowed.tokens is not None:
        return float(mass_of(row, allowed.tokens.ids))
    query = prompt.with_query(MassQuery(allowed.packed).pack(), 1)
    return await _answer_about(allowed, session, query, deadline, lambda answer: float(check_logprobs(answer)[0]))


async def _answer_about(
    allowed: Allowed,
    session: Session,
    prompt: Prompt,
    deadline: Deadline,
    read: Callable[[Row], T],
    *,
    private: bool = False,
) -> T:
    """As `_answer`; a set of tokens that the pool has forgotten is told it again."""
    try:
        return await _answer(session, prompt, deadline, read, private=private)
    except UnknownTokenSet:
        if allowed.tokens is None:
            raise
    await session.vocabularies.register_tokens(allowed.tokens, deadline)
    return await _answer(session, prompt, deadline, read, private=private)


async def ask_continuation(
    session: Session, prompt: Prompt, wanted: GenerateQuery, deadline: Deadline, *, private: bool
) -> Continuation:
    """Tokens drawn one after another by a worker."""
    query = prompt.with_query(wanted.pack(), 2 * wanted.most, wanted.most)
    read = partial(unpack_continuation, vocab_size=session.info.vocab_size)
    return await _answer(session, query, deadline, read, private=private)


async def ask_scores(
    session: Session, prompt: Prompt, continuation: Prompt, deadline: Deadline, values: Mode = "logprobs"
) -> Row:
    """The log-probability of each token of a continuation, or its logit, float32 (m,)."""
    info, ids = session.info, prompt.ids + continuation.ids
    start, end = len(prompt.ids) // 4, len(ids) // 4
    if end > info.max_prompt_tokens:
        raise PromptTooLong(
            f"the prompt and its continuation have {end} tokens: this model takes at most {info.max_prompt_tokens}"
        )
    whole = Prompt(ids, digest_of(ids, prompt.adapter), prompt.adapter)
    if info.positions:
        try:
            wanted = PositionsQuery.scores_from(start, logits=values == "logits")
            query = whole.with_query(wanted.pack(), end - start)
            return await _answer(
                session, query, deadline, _check_logits if wanted.values != "scores" else check_logprobs
            )
        except SourceMissing:
            pass  # Another worker of this model does not score.
    if values == "logits":
        raise _not_told(session, values)
    # One after the other would be slow; workers keep what prefixes have in common.
    prompts = [beginning(whole, at) for at in range(start, end)]
    pairs = zip(prompts, decode_ids(continuation.ids).tolist(), strict=True)
    scores = await gather([ask_entries(session, prefix, [token], deadline) for prefix, token in pairs])
    return np.concatenate(scores)


def beginning(text: Prompt, length: int) -> Prompt:
    """The first tokens of a prompt."""
    ids = text.ids[: 4 * length]
    return text if len(ids) == len(text.ids) else Prompt(ids, digest_of(ids, text.adapter), text.adapter)


def parts_of(session: Session, text: Prompt, start: int, wanted: Wanted) -> list[range]:
    """The positions of a text from `start` on, in parts whose answers are not too large for one reply."""
    length, size = len(text.ids) // 4, wanted.query(start).most_positions(session.info.vocab_size)
    return [range(at, min(at + size, length)) for at in range(start, length, size)]


async def ask_positions(session: Session, text: Prompt, start: int, wanted: Wanted, deadline: Deadline) -> Expected:
    """What is wanted of every position of a text from `start` on."""
    parts, fingerprint = parts_of(session, text, start, wanted), session.info.fingerprint
    if len(parts) == 1:
        return await ask_part(session, text, parts[0], wanted, deadline)
    # All at once would fill the server's memory, and an engine would compute what they have in common for each.
    at_once = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def ask(part: range) -> Expected:
        async with at_once:
            return await ask_part(session, beginning(text, part.stop), part, wanted, deadline, private=True)

    answers = await gather([ask(part) for part in parts])
    check_same_model(session, fingerprint)
    tops = [answer for answer in answers if isinstance(answer, TopK)]
    if tops:
        return TopK(np.concatenate([best.values for best in tops]), np.concatenate([best.ids for best in tops]))
    return np.concatenate([answer for answer in answers if not isinstance(answer, TopK)])


def check_same_model(session: Session, fingerprint: str) -> None:
    """Refuse what was asked in several parts if these may be of two models.

    Raises:
        ModelMismatch: the model is another one than when the first was asked.
    """
    if session.info.fingerprint != fingerprint:
        raise ModelMismatch(f"the model {session.info.name!r} has changed while parts of an answer came: ask again")


async def ask_part(
    session: Session, text: Prompt, part: range, wanted: Wanted, deadline: Deadline, *, private: bool = False
) -> Expected:
    """`ask_positions` of the last positions of a text; `private` as `Session.answer`."""
    count, vocab_size = len(part), session.info.vocab_size
    query = wanted.query(part.start)

    def read(answer: Row) -> Expected:
        if wanted.top:
            return unpack_top(answer.reshape(count, -1), vocab_size, of_row=wanted.values == "logprobs")
        if wanted.values == "logprobs":
            return check_logprobs(answer).reshape(count, -1)
        if wanted.values == "hidden":
            return unpack_numbers(answer, count, session.info.hidden, session.info.dtype)
        return _check_logits(answer) if wanted.values == "logz" else _check_logits(answer).reshape(count, -1)

    if session.info.positions:
        with_query = text.with_query(query.pack(), count * query.width(vocab_size))
        try:
            return await _answer_about(wanted.allowed, session, with_query, deadline, read, private=private)
        except SourceMissing:
            pass  # Another worker of this model does not.
    if wanted.values != "logprobs":
        raise _not_told(session, wanted.values)
    prompts = [beginning(text, at + 1) for at in part]
    if wanted.top:
        tops = await gather([ask_top(session, prompt, wanted.top, deadline) for prompt in prompts])
        return stack_tops(tops, wanted.top)
    if wanted.targets:
        return await ask_all(session, prompts, [list(wanted.targets)] * count, len(wanted.targets), deadline)
    return await session.answer_all(prompts, deadline)


def _not_told(session: Session, values: PositionValues) -> SettingsError:
    """Of a model whose workers do not answer for positions: log-probabilities can be had by rows, nothing else."""
    name, backend = session.info.name, session.info.backend
    if values == "hidden":
        return SettingsError(f"hidden: the workers of {name!r} tell no hidden states: {backend!r} is their backend")
    told = f"log-probabilities only: their backend {backend!r} does not answer for positions"
    return SettingsError(f"{'logz' if values == 'logz' else 'mode'}: the workers of {name!r} tell {told}")


def _check_logits(answer: Row) -> Row:
    """Refuse what cannot be logits, or logZ; returns them.

    Raises:
        ProtocolError: one is NaN or infinite.
    """
    if not (most := answer.max()) < np.inf:
        raise ProtocolError(f"the largest of {len(answer)} logits is {most}")
    return answer


async def ask_last(session: Session, prompt: Prompt, wanted: Wanted, deadline: Deadline) -> Expected:
    """As `ask_positions`, of the last position of a prompt, whose first axis is left out."""
    last = len(prompt.ids) // 4 - 1
    found = await ask_part(session, prompt, range(last, last + 1), wanted, deadline)
    return TopK(found.values[0], found.ids[0]) if isinstance(found, TopK) else found[0]


async def ask_hidden(session: Session, text: Prompt, start: int, deadline: Deadline) -> NDArray[Any]:
    """The last hidden states of a text from a position on, (n, d)."""
    info = session.info
    size = width_of(info.hidden, info.dtype) if info.hidden else 1
    found = await ask_positions(session, text, start, Wanted(values="hidden", size=size), deadline)
    assert not isinstance(found, TopK)
    return found


async def ask_head(session: Session, heads: dict[str, Head], deadline: Deadline) -> Head:
    """What turns the hidden states of a model into its rows; those who ask at once wait for one of them to fetch it.

    Args:
        session: with the model's workers.
        heads: has it by the model's fingerprint, once it has been fetched.
        deadline: for how long.

    Raises:
        SettingsError: its workers do not tell.
    """
    fingerprint = session.info.fingerprint
    if (head := heads.get(fingerprint)) is None:
        async with session.fetching_head(deadline):
            if (head := heads.get(fingerprint)) is None:
                head = await _fetch_head(session, deadline)
                heads.clear()
                heads[fingerprint] = head
    return head


async def _fetch_head(session: Session, deadline: Deadline) -> Head:
    info, prompt = session.info, session.encode([0], "")
    if not info.hidden:
        text = f"the workers of {info.name!r} do not tell it: their backend {info.backend!r} does not"
        raise SettingsError(f"head: {text}")
    width, size = width_of(info.hidden, info.dtype), info.vocab_size

    async def ask(query: HeadQuery, length: int, read: Callable[[Row], T]) -> T:
        return await _answer(session, prompt.with_query(query.pack(), length), deadline, read, private=True)

    one = partial(unpack_numbers, count=1, dtype="float32")
    scale, soft_cap, has_bias = (await ask(HeadQuery("facts"), FACTS, partial(one, size=FACTS)))[0].tolist()
    bias = (await ask(HeadQuery("bias"), size, partial(one, size=size)))[0].copy() if has_bias else None
    rows = max(1, MAX_ANSWER // width)
    parts = []
    # One after the other: all at once would fill the server's memory.
    for first in range(0, size, rows):
        count = min(rows, size - first)
        read = partial(unpack_numbers, count=count, size=info.hidden, dtype=info.dtype)
        parts.append(await ask(HeadQuery("weights", first, count), count * width, read))
    check_same_model(session, info.fingerprint)
    return Head(np.concatenate(parts), bias, scale, soft_cap or None, info.dtype)


async def ask_fresh(session: Session, prompt: Prompt, deadline: Deadline) -> Row:
    """A row that is computed now, whatever caches hold."""
    query = prompt.with_query(FreshQuery(secrets.token_bytes(DIGEST_SIZE)).pack(), session.info.vocab_size)
    return await _answer(session, query, deadline, check_row, private=True)


async def ask_logits(session: Session, prompt: Prompt, targets: list[int], deadline: Deadline) -> Row:
    """The logits after a prompt, float32 (V,), or some of them, (k,)."""
    found = await ask_last(session, prompt, Wanted(targets=tuple(targets), values="logits"), deadline)
    assert not isinstance(found, TopK)
    return found


async def ask_all(
    session: Session,
    prompts: Sequence[Prompt],
    targets: Sequence[list[int]],
    count: int,
    deadline: Deadline,
    ask_one: Callable[[Session, Prompt, list[int], Deadline], Coroutine[Any, Any, Row]] = ask_entries,
) -> NDArray[np.float32]:
    """Some entries of each of several rows, `count` each: float32 (n, count)."""
    out = np.empty((len(prompts), count), np.float32)

    async def ask(at: int) -> None:
        out[at] = await ask_one(session, prompts[at], targets[at], deadline)

    asked = [ask(at) for at in range(len(prompts))]
    await gather(asked, lambda error, at: of_prompt(error, "prompts", at, len(prompts)))
    return out
