"""Queries: what callers want of a prompt beside its row, checked; asked, or answered from a row at hand; and read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import gather
from lmpool.errors import (
    CorruptRow,
    InvalidPrompt,
    ModelMismatch,
    NotTokenIds,
    PromptTooLong,
    ProtocolError,
    SettingsError,
    SourceMissing,
    TokenOutOfRange,
)
from lmpool.producer.client.receive import WantedEntries
from lmpool.producer.client.session import Session
from lmpool.producer.deadline import Deadline
from lmpool.protocol.prompt import DIGEST_SIZE, Prompt, decode_ids, digest_of
from lmpool.protocol.query import (
    MOST_SEED,
    MOST_STOP_NUMBERS,
    Continuation,
    FreshQuery,
    GenerateQuery,
    PositionsQuery,
    PositionValues,
    SampleQuery,
    Sampling,
    TopK,
    TopQuery,
    sample,
    stack_tops,
    top,
    unpack_continuation,
    unpack_token,
    unpack_top,
)
from lmpool.protocol.row import Row, check_logprobs, check_row
from lmpool.settings import check_choice, shown

T = TypeVar("T")

_MOST_READ_IN_PLACE = 128
"""Entries of one row; for more, fetching the row costs the server less than looking each up."""


Mode = Literal["logprobs", "logits"]
"""Whether values are log-probabilities, or the logits that the model computed them from."""


class SampleOptions(TypedDict, total=False):
    """Options of `Producer.sample` and `Producer.batch_sample`.

    Attributes:
        temperature: divides the log-probabilities (default 1); 0 takes the likeliest token.
        top_p: draw among the likeliest tokens only, the fewest that have at least this probability together (default
            1: among all).
        seed: equal seeds draw equal tokens from equal rows, wherever they are drawn; None, the default, draws anew each
            time (`lmpool.protocol.query.sample`).
        adapter: as `Producer.logprobs`.
        timeout: as `Producer.logprobs`.
    """

    temperature: float
    top_p: float
    seed: int | None
    adapter: str
    timeout: float | None


class GenerateOptions(SampleOptions, total=False):
    """Options of `Producer.generate` and `Producer.batch_generate`.

    Attributes:
        temperature: as `SampleOptions`.
        top_p: as `SampleOptions`.
        seed: as `SampleOptions`: the token at place i is what `Producer.sample` draws with `seed` + i.
        stop: what ends a continuation, and is its end then: token ids, or sequences of them.
        adapter: as `Producer.logprobs`.
        timeout: as `Producer.logprobs`, for the whole continuation.
    """

    stop: Sequence[int | Sequence[int]]


Expected = TopK | NDArray[np.float32]
"""What is wanted of n positions: the likeliest tokens of each, (n, k), or float32 log-probabilities of shape (n, m)."""


class PositionOptions(TypedDict, total=False):
    """Options of `Producer.positions`, `batch_positions` and `stream_positions`.

    Attributes:
        top: so many of the likeliest tokens are wanted, 1 to V.
        targets: or the entries of these token ids.
        full: or whole rows.
        logz: or the logarithm of the sum of the exponentials of the logits, float32 (n,).
        mode: "logits" for these as the model computed them, in place of log-probabilities ("logprobs", the default).
        adapter: as `Producer.logprobs`.
        timeout: as `Producer.logprobs`.
    """

    top: int
    targets: Any
    full: bool
    logz: bool
    mode: Mode
    adapter: str
    timeout: float | None


class Positions(NamedTuple):
    """A part of what `Producer.stream_positions` brings: what is wanted of the positions from `start` on."""

    start: int
    values: Expected


class Wanted(NamedTuple):
    """What is wanted of every position: the `top` likeliest tokens, or the entries of targets, or whole rows."""

    top: int = 0
    targets: tuple[int, ...] = ()
    values: PositionValues = "logprobs"

    def query(self, start: int) -> PositionsQuery:
        """The query for it."""
        return PositionsQuery(start, self.top, np.array(self.targets, "<u4").tobytes(), self.values)


def check_known(options: Mapping[str, object], kind: Any) -> None:
    """Refuse options that there are not among the keys of a TypedDict.

    Raises:
        SettingsError: there is one, and which there are.
    """
    if unknown := options.keys() - kind.__optional_keys__:
        raise SettingsError(f"{min(unknown)}: not an option; there are {', '.join(kind.__annotations__)}")


def check_k(k: Any, session: Session, name: str = "k") -> int:
    vocab_size = session.info.vocab_size
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= vocab_size:
        raise SettingsError(f"{name}: {shown(k)} must be a whole number from 1 to {vocab_size}, the model's V")
    return int(k)


def read_wanted(options: PositionOptions, session: Session) -> Wanted:
    """Check what is wanted of every position."""
    check_known(options, PositionOptions)
    top, targets, mode = options.get("top"), options.get("targets"), check_mode(options.get("mode", "logprobs"))
    full, logz = options.get("full", False), options.get("logz", False)
    for name, value in (("full", full), ("logz", logz)):
        if type(value) is not bool:
            raise SettingsError(f"{name}: {shown(value)} must be True or False")
    if (top is not None) + (targets is not None) + full + logz != 1:
        raise SettingsError("positions: give just one of top=k, targets=[ids], full=True and logz=True")
    if top is not None:
        return Wanted(check_k(top, session, "top"), values=mode)
    if targets is not None:
        return Wanted(targets=tuple(read_targets(targets, session.info.vocab_size)), values=mode)
    return Wanted(values="logz" if logz else mode)


def check_mode(mode: Any) -> Mode:
    """Check whether log-probabilities or logits are wanted.

    Raises:
        SettingsError: neither.
    """
    check_choice("mode", mode, get_args(Mode))
    return mode  # type: ignore[no-any-return]  # that is known now


def check_start(start: Any, text: Prompt) -> Prompt:
    length = len(text.ids) // 4
    if isinstance(start, bool) or not isinstance(start, (int, np.integer)) or not 0 <= start < length:
        raise SettingsError(f"start: {shown(start)} must be a whole number from 0 to {length - 1}, the last position")
    return text


def read_targets(targets: Any, vocab_size: int) -> list[int]:
    """Check which entries of a row a caller wants.

    Raises:
        NotTokenIds: not a flat sequence of at least one integer.
        TokenOutOfRange: an id is negative or not below `vocab_size`.
    """
    # Ids in a list, as nearly always: numpy would cost several times as much.
    if type(targets) is not list or not targets or set(map(type, targets)) != {int}:
        targets = _read_ids(targets, 1).tolist()
    _check_range(min(targets), max(targets), vocab_size)
    return list(targets)


def read_batch_targets(targets: Any, count: int, vocab_size: int) -> tuple[list[list[int]], int]:
    """As `read_targets`, for `count` prompts: the same for all of them, or as many lists of equal length.

    Returns:
        the targets of each prompt, and how many each has.
    """
    ids = _read_ids(targets, 2)
    if ids.ndim == 1:
        return [read_targets(ids.tolist(), vocab_size)] * count, len(ids)
    if len(ids) != count:
        raise SettingsError(f"targets: {len(ids)} lists for {count} prompts; give one for each, or one for all")
    return [read_targets(listed, vocab_size) for listed in ids.tolist()], ids.shape[1]


def _read_ids(targets: Any, most_axes: int) -> NDArray[Any]:
    try:
        ids = np.asarray(targets)
        # numpy makes integers of bools that stand among them.
        has_bools = isinstance(targets, (list, tuple)) and any(
            isinstance(target, (bool, np.bool_)) for target in targets
        )
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise NotTokenIds(f"targets: {shown(targets)} are no token ids: {error}") from error
    if has_bools or not 1 <= ids.ndim <= most_axes or ids.size == 0 or ids.dtype.kind not in "iu":
        raise NotTokenIds(f"targets: {shown(targets)} must be a list of at least 1 token id")
    return ids


def _check_range(low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise TokenOutOfRange(
            f"targets: token id {shown(wrong)} is out of range: this model's go from 0 to {vocab_size - 1}"
        )


def read_stops(stop: Any, vocab_size: int) -> list[list[int]]:
    """Check what is to end a continuation: token ids, or sequences of them.

    Raises:
        NotTokenIds: something else, or an empty sequence.
        TokenOutOfRange: as `read_targets`.
    """
    if isinstance(stop, (str, bytes)) or not hasattr(stop, "__iter__"):
        raise NotTokenIds(f"stop: {shown(stop)} must be a list of token ids, or of lists of them")
    wanted = [[item] if isinstance(item, (int, np.integer)) else item for item in stop]
    try:
        stops = [read_targets(item, vocab_size) for item in wanted]
    except InvalidPrompt as error:
        raise type(error)(f"stop: {error}") from error
    if (numbers := sum(1 + len(item) for item in stops)) > MOST_STOP_NUMBERS:
        raise SettingsError(f"stop: {len(stops)} sequences of {numbers - len(stops)} tokens: too many to be looked for")
    return stops


def check_room(max_tokens: Any, prompt: Prompt, longest: int) -> int:
    """Check how many tokens are to follow a prompt: the row of the last one must be that of a prompt.

    Raises:
        SettingsError: not a whole number of at least 1.
        PromptTooLong: with them the prompt is longer than the model's longest.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
        raise SettingsError(f"max_tokens: {shown(max_tokens)} must be a whole number of at least 1")
    if (room := longest - len(prompt.ids) // 4 + 1) < max_tokens:
        raise PromptTooLong(
            f"max_tokens: {max_tokens} after a prompt of {len(prompt.ids) // 4} tokens: this model has room for {room}"
        )
    return int(max_tokens)


def read_sampling(temperature: Any, top_p: Any, seed: Any) -> Sampling:
    """Check how a token is to be drawn; the seed is 0 when there is none.

    Raises:
        SettingsError: a value is malformed.
    """
    for name, value, least, most in (("temperature", temperature, 0.0, 1e6), ("top_p", top_p, 0.0, 1.0)):
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (name == "top_p" and value == 0):
            limits = "above 0 and at most 1" if name == "top_p" else f"from 0 to {most:g}"
            raise SettingsError(f"{name}: {shown(value)} must be a number {limits}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise SettingsError(f"seed: {shown(seed)} must be a whole number, or None")
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise SettingsError(f"seed: {shown(seed)} must be from 0 to {MOST_SEED}")
    return Sampling(float(temperature), float(top_p), int(seed or 0))


async def ask_entries(session: Session, prompt: Prompt, targets: list[int], deadline: Deadline) -> Row:
    """Some entries of a row, float32 (k,)."""
    row = session.cached(prompt)
    if row is None and len(targets) <= _MOST_READ_IN_PLACE:
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


async def ask_top(session: Session, prompt: Prompt, k: int, deadline: Deadline, values: Mode = "logprobs") -> TopK:
    """The `k` largest entries of a row."""
    if values == "logits":
        best = await ask_last(session, prompt, Wanted(k, values=values), deadline)
        assert isinstance(best, TopK)
        return best
    row = session.cached(prompt)
    if row is not None:
        return top(row, k)
    query = prompt.with_query(TopQuery(k).pack(), 2 * k)
    return await _answer(session, query, deadline, lambda answer: unpack_top(answer, session.info.vocab_size))


async def ask_sample(session: Session, prompt: Prompt, sampling: Sampling, deadline: Deadline, *, private: bool) -> int:
    """A token drawn from a row."""
    row = session.cached(prompt)
    if row is not None:
        return sample(row, sampling)
    query = prompt.with_query(SampleQuery(*sampling).pack(), 1)
    read = partial(unpack_token, vocab_size=session.info.vocab_size)
    return await _answer(session, query, deadline, read, private=private)


async def ask_continuation(
    session: Session, prompt: Prompt, wanted: GenerateQuery, deadline: Deadline, *, private: bool
) -> Continuation:
    """Tokens drawn one after another by a worker."""
    query = prompt.with_query(wanted.pack(), 2 * wanted.most)
    read = partial(unpack_continuation, vocab_size=session.info.vocab_size)
    return await _answer(session, query, deadline, read, private=private)


async def ask_scores(session: Session, prompt: Prompt, continuation: Prompt, deadline: Deadline) -> Row:
    """The log-probability of each token of a continuation, float32 (m,)."""
    info, ids = session.info, prompt.ids + continuation.ids
    start, end = len(prompt.ids) // 4, len(ids) // 4
    if end > info.max_prompt_tokens:
        raise PromptTooLong(
            f"the prompt and its continuation have {end} tokens: this model takes at most {info.max_prompt_tokens}"
        )
    if info.positions:
        whole = Prompt(ids, digest_of(ids, prompt.adapter), prompt.adapter)
        try:
            query = whole.with_query(PositionsQuery.scores_from(start).pack(), end - start)
            return await _answer(session, query, deadline, check_logprobs)
        except SourceMissing:
            pass  # Another worker of this model does not score.
    # One after the other would be slow; workers keep what prefixes have in common.
    prefixes = [ids[: 4 * at] for at in range(start, end)]
    prompts = [Prompt(prefix, digest_of(prefix, prompt.adapter), prompt.adapter) for prefix in prefixes]
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
    parts = parts_of(session, text, start, wanted)
    answers = await gather([ask_part(session, beginning(text, part.stop), part, wanted, deadline) for part in parts])
    if len(answers) == 1:
        return answers[0]
    tops = [answer for answer in answers if isinstance(answer, TopK)]
    if tops:
        return TopK(np.concatenate([best.values for best in tops]), np.concatenate([best.ids for best in tops]))
    return np.concatenate([answer for answer in answers if not isinstance(answer, TopK)])


async def ask_part(session: Session, text: Prompt, part: range, wanted: Wanted, deadline: Deadline) -> Expected:
    """`ask_positions` of the last positions of a text."""
    count, vocab_size = len(part), session.info.vocab_size
    query = wanted.query(part.start)

    def read(answer: Row) -> Expected:
        if wanted.top:
            return unpack_top(answer.reshape(count, -1), vocab_size, of_logits=wanted.values == "logits")
        if wanted.values == "logprobs":
            return check_logprobs(answer).reshape(count, -1)
        if not answer.max() < np.inf:
            raise ProtocolError(f"the largest of {len(answer)} logits is {answer.max()}")
        return answer if wanted.values == "logz" else answer.reshape(count, -1)

    if session.info.positions:
        with_query = text.with_query(query.pack(), count * query.width(vocab_size))
        try:
            return await _answer(session, with_query, deadline, read)
        except SourceMissing:
            pass  # Another worker of this model does not.
    if wanted.values != "logprobs":
        raise SettingsError(
            f"{'logz' if wanted.values == 'logz' else 'mode'}: the workers of {session.info.name!r} tell "
            f"log-probabilities only: their backend {session.info.backend!r} does not answer for positions"
        )
    prompts = [beginning(text, at + 1) for at in part]
    if wanted.top:
        tops = await gather([ask_top(session, prompt, wanted.top, deadline) for prompt in prompts])
        return stack_tops(tops, wanted.top)
    if wanted.targets:
        return await ask_all(session, prompts, [list(wanted.targets)] * count, len(wanted.targets), deadline)
    return await session.answer_all(prompts, deadline)


async def ask_last(session: Session, prompt: Prompt, wanted: Wanted, deadline: Deadline) -> Expected:
    """As `ask_positions`, of the last position of a prompt, whose first axis is left out."""
    last = len(prompt.ids) // 4 - 1
    found = await ask_part(session, prompt, range(last, last + 1), wanted, deadline)
    return TopK(found.values[0], found.ids[0]) if isinstance(found, TopK) else found[0]


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

    await gather([ask(at) for at in range(len(prompts))])
    return out
