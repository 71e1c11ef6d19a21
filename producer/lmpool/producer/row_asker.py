"""Asking for less than a row, so that only that travels."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool.asks import FreshAsk, SampleAsk, ScoreAsk, TopAsk
from lmpool.checks import shown
from lmpool.errors import (
    CorruptRow,
    ModelMismatch,
    NotTokenIds,
    PromptTooLong,
    ProtocolError,
    SettingsError,
    SourceMissing,
    TokenOutOfRange,
)
from lmpool.picks import MOST_SEED, Sampling, TopK, sample, top, unpack_token, unpack_top
from lmpool.producer.entries import WantedEntries
from lmpool.producer.session import Session
from lmpool.producer.together import all_of
from lmpool.producer.within import Within
from lmpool.prompts import DIGEST_SIZE, Prompt, decode_ids, digest_of
from lmpool.rowcache import Row
from lmpool.rows import check_logprobs, check_row

T = TypeVar("T")

_MOST_READ_IN_PLACE = 128
"""Entries of one row; for more, fetching the row costs the server less than looking each up."""


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
    return [read_targets(own, vocab_size) for own in ids.tolist()], ids.shape[1]


def _read_ids(targets: Any, most_axes: int) -> NDArray[Any]:
    try:
        ids = np.asarray(targets)
        # numpy makes integers of bools that stand among them.
        has_bools = isinstance(targets, (list, tuple)) and any(isinstance(one, (bool, np.bool_)) for one in targets)
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


def read_sampling(temperature: Any, top_p: Any, seed: Any) -> Sampling:
    """Check how a token is to be drawn; the seed is 0 when there is none.

    Raises:
        SettingsError: a value is malformed.
    """
    for name, value, least, most in (("temperature", temperature, 0.0, 1e6), ("top_p", top_p, 0.0, 1.0)):
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (name == "top_p" and value == 0):
            wanted = "above 0 and at most 1" if name == "top_p" else f"from 0 to {most:g}"
            raise SettingsError(f"{name}: {shown(value)} must be a number {wanted}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise SettingsError(f"seed: {shown(seed)} must be a whole number, or None")
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise SettingsError(f"seed: {shown(seed)} must be from 0 to {MOST_SEED}")
    return Sampling(float(temperature), float(top_p), int(seed or 0))


async def ask_entries(session: Session, prompt: Prompt, targets: list[int], within: Within) -> Row:
    """Some entries of a row, float32 (k,)."""
    row = session.kept(prompt)
    if row is None and len(targets) <= _MOST_READ_IN_PLACE:
        wanted = WantedEntries(prompt.digest, targets)
        found = await session.read_entries(wanted, within)
        if found is None:
            await session.answer(prompt, within, touch=True)
            found = await session.read_entries(wanted, within)
        elif not isinstance(found, CorruptRow):
            session.count_hit(within)
        if found is not None and not isinstance(found, CorruptRow):
            return found
    if row is None:
        # Many entries, or none could be read: fetching a damaged row has it computed anew.
        row = await session.answer(prompt, within)
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
    session: Session, prompt: Prompt, within: Within, read: Callable[[Row], T], *, private: bool = False
) -> T:
    """Ask, and read the answer; one that is damaged in the cache is replaced.

    Args:
        session: whom.
        prompt: what.
        within: for how long.
        read: reads it, or raises ProtocolError.
        private: as `Session.answer`.

    Raises:
        CorruptRow: it is damaged again.
    """
    answer = await session.answer(prompt, within, private=private)
    try:
        return read(answer)
    except ProtocolError:
        pass
    try:
        return read(await session.answer(prompt, within, private=private, damaged=True))
    except ProtocolError as error:
        raise CorruptRow(f"the cached answer for prompt {prompt.digest.hex()} is damaged: {error}") from error


async def ask_top(session: Session, prompt: Prompt, k: int, within: Within) -> TopK:
    """The `k` largest entries of a row."""
    row = session.kept(prompt)
    if row is not None:
        return top(row, k)
    asking = prompt.asking(TopAsk(k).pack(), 2 * k)
    return await _answer(session, asking, within, lambda answer: unpack_top(answer, session.card.vocab_size))


async def ask_sample(session: Session, prompt: Prompt, how: Sampling, within: Within, *, private: bool) -> int:
    """A token drawn from a row."""
    row = session.kept(prompt)
    if row is not None:
        return sample(row, how)
    asking = prompt.asking(SampleAsk(how).pack(), 1)
    read = partial(unpack_token, vocab_size=session.card.vocab_size)
    return await _answer(session, asking, within, read, private=private)


async def ask_scores(session: Session, prompt: Prompt, continuation: Prompt, within: Within) -> Row:
    """The log-probability of each token of a continuation, float32 (m,)."""
    card, ids = session.card, prompt.ids + continuation.ids
    start, end = len(prompt.ids) // 4, len(ids) // 4
    if end > card.max_prompt_tokens:
        raise PromptTooLong(
            f"the prompt and its continuation have {end} tokens: this model takes at most {card.max_prompt_tokens}"
        )
    if card.scores:
        whole = Prompt(ids, digest_of(ids, prompt.adapter), prompt.adapter)
        try:
            asking = whole.asking(ScoreAsk(start).pack(), end - start)
            return await _answer(session, asking, within, check_logprobs)
        except SourceMissing:
            pass  # Another worker of this model does not score.
    # One after the other would be slow; workers keep what prefixes have in common.
    prefixes = [ids[: 4 * at] for at in range(start, end)]
    prompts = [Prompt(one, digest_of(one, prompt.adapter), prompt.adapter) for one in prefixes]
    wanted = decode_ids(continuation.ids).tolist()
    pairs = zip(prompts, wanted, strict=True)
    found = await all_of([ask_entries(session, one, [token], within) for one, token in pairs])
    return np.concatenate(found)


async def ask_fresh(session: Session, prompt: Prompt, within: Within) -> Row:
    """A row that is computed now, whatever caches hold."""
    ask = FreshAsk(secrets.token_bytes(DIGEST_SIZE)).pack()
    return await _answer(session, prompt.asking(ask, session.card.vocab_size), within, check_row, private=True)


async def ask_entries_of_all(
    session: Session, prompts: Sequence[Prompt], targets: Sequence[list[int]], count: int, within: Within
) -> NDArray[np.float32]:
    """Some entries of each of several rows, `count` each: float32 (n, count)."""
    out = np.empty((len(prompts), count), np.float32)

    async def ask(at: int) -> None:
        out[at] = await ask_entries(session, prompts[at], targets[at], within)

    await all_of([ask(at) for at in range(len(prompts))])
    return out
