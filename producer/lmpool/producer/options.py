"""The options of a producer's calls, and checks of the calls' arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import NotTokenIds, PromptTooLong, ProtocolError, SettingsError, TokenOutOfRange
from lmpool.producer.client.queries import Allowed, Expected, Mode, Wanted
from lmpool.protocol.job import Prompt
from lmpool.protocol.query import MAX_SEED, MAX_STOP_NUMBERS, Sampling
from lmpool.protocol.token_set import TokenSet, tokens_of_bits
from lmpool.settings import check_choice, check_kind, check_known, check_number, shown


class QueryOptions(TypedDict, total=False):
    """Options of most calls.

    Attributes:
        mode: "logits" for logits in place of log-probabilities ("logprobs", the default).
        adapter: name of an adapter, as for `Producer.logprobs`.
        timeout: seconds of the call, as for `Producer.logprobs`.
    """

    mode: Mode
    adapter: str
    timeout: float | None


class DrawOptions(TypedDict, total=False):
    """Options of all calls that sample tokens.

    Attributes:
        temperature: divides the log-probabilities (default 1); 0 selects the most likely token.
        top_p: sample only from the smallest set of most likely tokens with at least this total probability (default 1:
            all tokens).
        seed: the same seed samples the same tokens from the same rows on every machine; a seed of None, the default,
            samples different tokens in every call (`lmpool.protocol.query.sample`).
        adapter: name of an adapter, as for `Producer.logprobs`.
        timeout: seconds of the call, as for `Producer.logprobs`.
    """

    temperature: float
    top_p: float
    seed: int | None
    adapter: str
    timeout: float | None


class SampleOptions(DrawOptions, total=False):
    """Options of `Producer.sample` and `Producer.batch_sample`: the options of `DrawOptions`, and `allowed`.

    Attributes:
        allowed: sample only from the given tokens (see `Producer.topk`), whose probabilities are scaled to a sum of 1.
    """

    allowed: Any


class GenerateOptions(DrawOptions, total=False):
    """Options of `Producer.generate` and `Producer.batch_generate`: the options of `DrawOptions`, and `stop`.

    The token at index i of a continuation is the token that `Producer.sample` returns with `seed` + i. `timeout` limits
    the whole continuation.

    Attributes:
        stop: token ids, or sequences of token ids, that end a continuation, which includes the stop tokens.
    """

    stop: Sequence[int | Sequence[int]]


class PositionOptions(QueryOptions, total=False):
    """Options of `Producer.positions`, `batch_positions` and `stream_positions`, in addition to `QueryOptions`.

    Exactly one of `top`, `targets`, `full` and `logz` selects the values.

    Attributes:
        top: return this number of most likely tokens, 1 to V.
        targets: return the entries of these token ids.
        full: True to return the whole row at every position.
        logz: True to return logZ, the logarithm of the sum of the exponentials of the logits, float32 (n,).
    """

    top: int
    targets: Any
    full: bool
    logz: bool


class Positions(NamedTuple):
    """A part of the result of `Producer.stream_positions`: the values at the positions from `start` on."""

    start: int
    values: Expected


check_mode = partial(check_choice, "mode", choices=get_args(Mode))
check_flag = partial(check_kind, kind=bool, what="True or False")


def _plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python number; return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def check_whole(name: str, value: Any, low: int, high: int | None = None, note: str = "") -> int:
    """Check that `value` is a whole number, of Python or numpy, from `low` to `high`, and return it as an int."""
    return int(check_number(name, _plain(value), low, high, note=note))


def check_k(k: Any, vocab_size: int, name: str = "k") -> int:
    return check_whole(name, k, 1, vocab_size, ", the model's V")


def check_start(start: Any, text: Prompt) -> Prompt:
    check_whole("start", start, 0, len(text.ids) // 4 - 1, ", the last position")
    return text


def read_options(options: QueryOptions) -> tuple[Mode, str, float | None]:
    """Return the mode, adapter and timeout of a call."""
    check_known(options, QueryOptions.__annotations__)
    return check_mode(options.get("mode", "logprobs")), options.get("adapter", ""), options.get("timeout")


def read_wanted(options: PositionOptions, vocab_size: int) -> Wanted:
    """Convert the options of `Producer.positions` to the values that are requested at every position."""
    check_known(options, PositionOptions.__annotations__)
    top, targets, mode = options.get("top"), options.get("targets"), check_mode(options.get("mode", "logprobs"))
    full, logz = (check_flag(name, options.get(name, False)) for name in ("full", "logz"))
    if (top is not None) + (targets is not None) + full + logz != 1:
        raise SettingsError("positions: give just one of top=k, targets=[ids], full=True and logz=True")
    if top is not None:
        return Wanted(check_k(top, vocab_size, "top"), values=mode)
    if targets is not None:
        return Wanted(targets=tuple(read_targets(targets, vocab_size)), values=mode)
    return Wanted(values="logz" if logz else mode)


def read_targets(targets: Any, vocab_size: int, name: str = "targets") -> list[int]:
    """Return the token ids in `targets`, whose entries a caller requests."""
    # Check a list of ids, the usual case, without numpy: numpy would take several times as long.
    if type(targets) is not list or not targets or set(map(type, targets)) != {int}:
        targets = _read_ids(targets, 1, name).tolist()
    low, high = min(targets), max(targets)
    if low < 0 or high >= vocab_size:
        wrong = shown(low if low < 0 else high)
        raise TokenOutOfRange(f"{name}: token id {wrong} is out of range: this model's go from 0 to {vocab_size - 1}")
    return list(targets)


def read_batch_targets(targets: Any, count: int, vocab_size: int) -> tuple[list[list[int]], int]:
    """Return the targets of each of `count` prompts, and the number of targets per prompt.

    `targets` are ids for all prompts, or one list of ids for each prompt; all lists have the same length.
    """
    ids = _read_ids(targets, 2, "targets")
    if ids.ndim == 1:
        return [read_targets(ids.tolist(), vocab_size)] * count, len(ids)
    if len(ids) != count:
        raise SettingsError(f"targets: {len(ids)} lists for {count} prompts; give one for each, or one for all")
    return [read_targets(listed, vocab_size) for listed in ids.tolist()], ids.shape[1]


def _read_ids(targets: Any, max_axes: int, name: str) -> NDArray[Any]:
    try:
        ids = np.asarray(targets)
        # Refuse bools here, because numpy would convert bools among integers to integers.
        has_bools = isinstance(targets, (list, tuple)) and {bool, np.bool_} & set(map(type, targets))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise NotTokenIds(f"{name}: {shown(targets)} are no token ids: {error}") from error
    if has_bools or not 1 <= ids.ndim <= max_axes or ids.size == 0 or ids.dtype.kind not in "iu":
        raise NotTokenIds(f"{name}: {shown(targets)} must be a list of at least 1 token id")
    return ids


def read_allowed(allowed: Any, vocab_size: int, k: int = 1) -> Allowed:
    """Return the tokens that a query may return; refuses a set of fewer than `k` members, if this process has the set.

    `allowed` is None for all tokens; a `TokenSet` or its name, 32 hexadecimal digits; bools (V,); bits as in
    `TokenSet.bits`; or token ids.
    """
    if allowed is None:
        return Allowed()
    if isinstance(allowed, str):
        if not re.fullmatch("[0-9a-f]{32}", allowed):
            raise SettingsError(f"allowed: {shown(allowed)} names no set of tokens: expected 32 hexadecimal digits")
        return Allowed(TokenSet.packed_name(bytes.fromhex(allowed)))
    tokens = allowed if isinstance(allowed, TokenSet) else _read_set(allowed, vocab_size)
    if tokens.vocab_size != vocab_size:
        sizes = f"{tokens.vocab_size}: this model's V is {vocab_size}"
        raise SettingsError(f"allowed: a set of tokens of a vocabulary of {sizes}")
    if not len(tokens.ids) or not 0 <= tokens.ids[0] <= tokens.ids[-1] < vocab_size:
        raise SettingsError(f"allowed: not all of the {len(tokens.ids)} tokens are of this model")
    check_whole("k", k, 1, len(tokens.ids), ", the number of allowed tokens")
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
    elif hasattr(allowed, "__len__") and not len(allowed):
        ids = np.empty(0, np.int64)
    else:
        ids = np.unique(read_targets(allowed, vocab_size, "allowed"))
    if not len(ids):
        raise SettingsError("allowed: the set of tokens is empty; give at least one token")
    return TokenSet(ids, vocab_size)


def for_one(allowed: Any) -> Any:
    """Convert the argument `allowed` of a call for one prompt to its form in a batch call with one prompt."""
    return allowed if allowed is None or isinstance(allowed, (int, np.integer)) else [allowed]


def read_batch_allowed(allowed: Any, count: int, vocab_size: int, k: int = 1) -> list[Allowed]:
    """Apply `read_allowed` for `count` prompts: one set for all prompts, or a list or bools (n, V), a set for each."""
    is_list = isinstance(allowed, (list, tuple)) and bool(allowed) and not isinstance(allowed[0], (int, np.integer))
    if not is_list and getattr(allowed, "ndim", 1) != 2:
        return [read_allowed(allowed, vocab_size, k)] * count
    if len(allowed) != count:
        raise SettingsError(f"allowed: {len(allowed)} sets for {count} prompts; give one for each, or one for all")
    return [read_allowed(some, vocab_size, k) for some in allowed]


def read_stops(stop: Any, vocab_size: int) -> list[list[int]]:
    """Return the token sequences that end a continuation."""
    if isinstance(stop, (str, bytes)) or not hasattr(stop, "__iter__"):
        raise NotTokenIds(f"stop: {shown(stop)} must be a list of token ids, or of lists of them")
    wanted = [[item] if isinstance(item, (int, np.integer)) else item for item in stop]
    stops = [read_targets(item, vocab_size, "stop") for item in wanted]
    if (numbers := sum(1 + len(item) for item in stops)) > MAX_STOP_NUMBERS:
        found = f"{len(stops)} sequences with {numbers - len(stops)} tokens are too many"
        raise SettingsError(f"stop: {found}; sequences and tokens together may be {MAX_STOP_NUMBERS}")
    return stops


def check_room(max_tokens: Any, prompt: Prompt, max_prompt_tokens: int) -> int:
    """Return the number of tokens to generate; raises PromptTooLong if the prompt leaves too few tokens."""
    count, length = check_whole("max_tokens", max_tokens, 1), len(prompt.ids) // 4
    if (room := max_prompt_tokens - length + 1) < count:
        raise PromptTooLong(f"max_tokens: {count} after a prompt of {length} tokens: this model has room for {room}")
    return count


def read_sampling(temperature: Any, top_p: Any, seed: Any) -> Sampling:
    """Check and return the sampling options; the returned seed is 0 if `seed` is None."""
    check_number("temperature", temperature := _plain(temperature), 0, 1_000_000, whole=False)
    check_number("top_p", top_p := _plain(top_p), 0, 1, whole=False)
    if top_p == 0:
        raise SettingsError("top_p: 0 must be a number above 0 and at most 1")
    seed = 0 if seed is None else check_whole("seed", seed, 0, MAX_SEED, ", or None")
    return Sampling(float(temperature), float(top_p), seed)


def read_drawing(options: DrawOptions, kind: Any) -> Sampling:
    """Check the options of a call against the TypedDict `kind`, and return its sampling options."""
    check_known(options, kind.__annotations__)
    return read_sampling(options.get("temperature", 1.0), options.get("top_p", 1.0), options.get("seed"))
