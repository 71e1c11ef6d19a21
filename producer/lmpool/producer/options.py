"""What callers may say of what they want of a prompt beside its row, and checks of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import (
    NotTokenIds,
    PromptTooLong,
    ProtocolError,
    SettingsError,
    TokenOutOfRange,
)
from lmpool.producer.client.queries import Allowed, Expected, Mode, Wanted
from lmpool.producer.client.session import Session
from lmpool.protocol.job import Prompt
from lmpool.protocol.query import (
    MAX_SEED,
    MAX_STOP_NUMBERS,
    Sampling,
)
from lmpool.protocol.token_set import TokenSet, tokens_of_bits
from lmpool.settings import check_choice, shown


class DrawOptions(TypedDict, total=False):
    """How tokens are drawn.

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


class SampleOptions(DrawOptions, total=False):
    """Options of `Producer.sample` and `Producer.batch_sample`: those of `DrawOptions`, and one more.

    Attributes:
        allowed: which tokens, as for `Producer.topk`: drawn as if these were all.
    """

    allowed: Any


class GenerateOptions(DrawOptions, total=False):
    """Options of `Producer.generate` and `Producer.batch_generate`: those of `DrawOptions`, and one more.

    The token at place i is what `Producer.sample` draws with `seed` + i; `timeout` is for the whole continuation.

    Attributes:
        stop: what ends a continuation, and is its end then: token ids, or sequences of them.
    """

    stop: Sequence[int | Sequence[int]]


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


def read_targets(targets: Any, vocab_size: int, name: str = "targets") -> list[int]:
    """Check which entries of a row a caller wants.

    Raises:
        NotTokenIds: not a flat sequence of at least one integer.
        TokenOutOfRange: an id is negative or not below `vocab_size`.
    """
    # Ids in a list, as nearly always: numpy would cost several times as much.
    if type(targets) is not list or not targets or set(map(type, targets)) != {int}:
        targets = _read_ids(targets, 1, name).tolist()
    _check_range(min(targets), max(targets), vocab_size, name)
    return list(targets)


def read_batch_targets(targets: Any, count: int, vocab_size: int) -> tuple[list[list[int]], int]:
    """As `read_targets`, for `count` prompts: the same for all of them, or as many lists of equal length.

    Returns:
        the targets of each prompt, and how many each has.
    """
    ids = _read_ids(targets, 2, "targets")
    if ids.ndim == 1:
        return [read_targets(ids.tolist(), vocab_size)] * count, len(ids)
    if len(ids) != count:
        raise SettingsError(f"targets: {len(ids)} lists for {count} prompts; give one for each, or one for all")
    return [read_targets(listed, vocab_size) for listed in ids.tolist()], ids.shape[1]


def _read_ids(targets: Any, most_axes: int, name: str) -> NDArray[Any]:
    try:
        ids = np.asarray(targets)
        # numpy makes integers of bools that stand among them.
        has_bools = isinstance(targets, (list, tuple)) and any(
            isinstance(target, (bool, np.bool_)) for target in targets
        )
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise NotTokenIds(f"{name}: {shown(targets)} are no token ids: {error}") from error
    if has_bools or not 1 <= ids.ndim <= most_axes or ids.size == 0 or ids.dtype.kind not in "iu":
        raise NotTokenIds(f"{name}: {shown(targets)} must be a list of at least 1 token id")
    return ids


def _check_range(low: int, high: int, vocab_size: int, name: str) -> None:
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise TokenOutOfRange(
            f"{name}: token id {shown(wrong)} is out of range: this model's go from 0 to {vocab_size - 1}"
        )


def read_allowed(allowed: Any, vocab_size: int) -> Allowed:
    """Check which tokens are allowed; None for all.

    Args:
        allowed: a `TokenSet`, or its name, 32 hexadecimal digits; or bools (V,); or bits, as `TokenSet.bits`; or ids.
        vocab_size: V.

    Raises:
        SettingsError: none, or a set of another vocabulary.
        NotTokenIds, TokenOutOfRange: as `read_targets`.
    """
    if allowed is None:
        return Allowed()
    if isinstance(allowed, str):
        if not re.fullmatch("[0-9a-f]{32}", allowed):
            raise SettingsError(f"allowed: {shown(allowed)} names no set of tokens: expected 32 hexadecimal digits")
        return Allowed(TokenSet.packed_name(bytes.fromhex(allowed)))
    tokens = allowed if isinstance(allowed, TokenSet) else _read_set(allowed, vocab_size)
    if tokens.vocab_size != vocab_size:
        text = f"of a vocabulary of {tokens.vocab_size}: this model's V is {vocab_size}"
        raise SettingsError(f"allowed: a set of tokens {text}")
    if not len(tokens.ids) or not 0 <= tokens.ids[0] <= tokens.ids[-1] < vocab_size:
        raise SettingsError(f"allowed: a set of {len(tokens.ids)} tokens that are not all of the model")
    return Allowed(tokens.packed, tokens)


def _read_set(allowed: Any, vocab_size: int) -> TokenSet:
    if isinstance(allowed, (bytes, bytearray, memoryview)):
        try:
            return tokens_of_bits(bytes(allowed), vocab_size)
        except ProtocolError as error:
            raise SettingsError(f"allowed: {error}") from error
    if getattr(allowed, "dtype", None) is not None and (mask := np.asarray(allowed)).dtype == bool:
        if mask.shape != (vocab_size,):
            raise SettingsError(f"allowed: bools of shape {mask.shape}: expected {(vocab_size,)}, one for each token")
        ids = np.flatnonzero(mask)
    else:
        if hasattr(allowed, "__len__") and not len(allowed):
            raise SettingsError("allowed: the set of tokens is empty; give at least one token")
        ids = np.unique(_read_ids(allowed, 1, "allowed")).astype(np.int64)
        _check_range(int(ids[0]), int(ids[-1]), vocab_size, "allowed")
    if not len(ids):
        raise SettingsError("allowed: the set of tokens is empty; give at least one token")
    return TokenSet(ids, vocab_size)


def check_members(allowed: Allowed, k: int) -> Allowed:
    """Check that the `k` likeliest can be of a set, as far as its members are known here."""
    if allowed.tokens is not None and k > len(allowed.tokens.ids):
        raise SettingsError(f"k: {k} must be from 1 to {len(allowed.tokens.ids)}: so many tokens are allowed")
    return allowed


def for_one(allowed: Any) -> Any:
    """What a batch of one prompt is given, of what is allowed for that prompt."""
    return allowed if allowed is None or isinstance(allowed, (int, np.integer)) else [allowed]


def read_batch_allowed(allowed: Any, count: int, vocab_size: int) -> list[Allowed]:
    """As `read_allowed`, for `count` prompts: one for all of them, or a list, or bools (n, V), with one for each."""
    is_list = isinstance(allowed, (list, tuple)) and bool(allowed) and not isinstance(allowed[0], (int, np.integer))
    if not is_list and getattr(allowed, "ndim", 1) != 2:
        return [read_allowed(allowed, vocab_size)] * count
    if len(allowed) != count:
        raise SettingsError(f"allowed: {len(allowed)} sets for {count} prompts; give one for each, or one for all")
    return [read_allowed(some, vocab_size) for some in allowed]


def read_stops(stop: Any, vocab_size: int) -> list[list[int]]:
    """Check what is to end a continuation: token ids, or sequences of them.

    Raises:
        NotTokenIds: something else, or an empty sequence.
        TokenOutOfRange: as `read_targets`.
    """
    if isinstance(stop, (str, bytes)) or not hasattr(stop, "__iter__"):
        raise NotTokenIds(f"stop: {shown(stop)} must be a list of token ids, or of lists of them")
    wanted = [[item] if isinstance(item, (int, np.integer)) else item for item in stop]
    stops = [read_targets(item, vocab_size, "stop") for item in wanted]
    if (numbers := sum(1 + len(item) for item in stops)) > MAX_STOP_NUMBERS:
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
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise SettingsError(f"seed: {shown(seed)} must be from 0 to {MAX_SEED}")
    return Sampling(float(temperature), float(top_p), int(seed or 0))
