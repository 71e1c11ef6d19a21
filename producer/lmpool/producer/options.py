"""The options of a producer's calls, and checks of the calls' arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import NotTokenIds, PromptTooLong, ProtocolError, SettingsError, TokenOutOfRange
from lmpool.producer.client.queries import Allowed, Mode, Wanted
from lmpool.protocol.job import Prompt
from lmpool.protocol.picks import Sampling
from lmpool.protocol.query import MAX_SEED, MAX_STOP_NUMBERS, NO_TOKEN
from lmpool.protocol.token_set import TokenSet, tokens_of_bits
from lmpool.settings import check_choice, check_kind, check_known, check_number, shown


class QueryOptions(TypedDict, total=False):
    """Options of most calls.

    Attributes:
        mode: "logits" for logits in place of log-probabilities ("logprobs", the default).
        temperature: divides the logits before the log-softmax (default 1); only for log-probabilities.
        adapter: name of an adapter, as for `Producer.logprobs`.
        timeout: seconds of the call, as for `Producer.logprobs`.
    """

    mode: Mode
    temperature: float
    adapter: str
    timeout: float | None


class DrawOptions(TypedDict, total=False):
    """Options of all calls that sample tokens.

    Attributes:
        temperature: divides the log-probabilities (default 1); 0 selects the most likely token.
        top_p: sample only from the smallest set of most likely tokens with at least this total probability (default 1:
            all tokens).
        seed: the same seed samples the same tokens from the same rows on every machine; a seed of None, the default,
            samples different tokens in every call (`lmpool.protocol.picks.sample`).
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
        keep_row: True to put the row into the pool's cache too, as `Producer.logprobs` does.
    """

    allowed: Any
    keep_row: bool


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

    At least one of the options below is required; one forward pass answers all of them.

    Attributes:
        top: return this number of most likely tokens, 1 to V.
        targets: return the entries of these token ids: a list for all positions, an array (n, m) with the ids of each
            position, padded with -1, or n lists. `batch_positions` also takes one such value for each text.
        next_token: True to return the entry of the token that follows each position in the text.
        logz: True to return logZ, the logarithm of the sum of the exponentials of the logits.
        tail: True to return the logarithm of the probability of all tokens but those in `top` and `targets`.
        full: True to return whole rows.
    """

    top: int
    targets: Any
    next_token: bool
    logz: bool
    tail: bool
    full: bool


_MIN_TEMPERATURE = 1e-6  # Smaller temperatures would overflow all entries but the largest.

check_mode = partial(check_choice, "mode", choices=get_args(Mode))
check_flag = partial(check_kind, kind=bool, what="True or False")


def repeatable(args: Iterable[Any], options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with lists in place of iterators, which can be read only once."""

    def read(value: Any) -> Any:
        return list(value) if isinstance(value, Iterator) else value

    return list(map(read, args)), {name: read(value) for name, value in options.items()}


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


class Read(NamedTuple):
    """The checked `QueryOptions` of a call."""

    mode: Mode
    temperature: float
    adapter: str
    timeout: float | None


def read_options(options: QueryOptions, kind: Any = QueryOptions) -> Read:
    """Check the options of a call against the TypedDict `kind`, and return those that all calls have."""
    check_known(options, kind.__annotations__)
    mode, temperature = check_mode(options.get("mode", "logprobs")), check_temperature(options.get("temperature", 1.0))
    if mode == "logits" and temperature != 1:
        raise SettingsError("temperature: of log-probabilities only: not with mode='logits'")
    return Read(mode, temperature, options.get("adapter", ""), options.get("timeout"))


def check_temperature(temperature: Any) -> float:
    """Check and return a temperature that divides logits."""
    check_number("temperature", temperature := _plain(temperature), _MIN_TEMPERATURE, 1_000_000, whole=False)
    return float(temperature)


def read_wanted(options: PositionOptions, vocab_size: int, start: int, count: int | None = None) -> Wanted:
    """Convert the options of `Producer.positions` to the values of `count` positions; None leaves the targets out."""
    read = read_options(options, PositionOptions)
    top, targets = options.get("top"), options.get("targets")
    names = ("next_token", "logz", "tail", "full")
    next_token, logz, tail, full = (check_flag(name, options.get(name, False)) for name in names)
    if top is None and targets is None and not (next_token or logz or full):
        raise SettingsError("positions: give at least one of top=k, targets=ids, next_token, logz and full=True")
    if tail and top is None and targets is None:
        raise SettingsError("tail: True, of the tokens that are not in top or targets: give top=k or targets=ids")
    wanted = Wanted(
        next_token=next_token, logz=logz, tail=tail, full=full, values=read.mode, temperature=read.temperature,
        start=start,
    )  # fmt: skip
    if top is not None:
        wanted = wanted._replace(top=check_k(top, vocab_size, "top"))
    if targets is not None and count is not None:
        wanted = wanted._replace(targets=read_position_targets(targets, vocab_size, count))
    return wanted


def _is_nested(targets: Any) -> bool:
    """Whether targets have an item for each text or position, and are not ids themselves."""
    if isinstance(targets, (list, tuple)) and targets:
        return not isinstance(targets[0], (int, np.integer))
    return getattr(targets, "ndim", 1) > 1


def targets_of_texts(targets: Any, count: int) -> list[Any]:
    """Return the argument `targets` of `batch_positions` for each of `count` texts."""
    if not _is_nested(targets):
        return [targets] * count
    if len(targets) != count:
        raise SettingsError(f"targets: {len(targets)} for {count} texts: give ids for all texts, or one item for each")
    return list(targets)


def read_position_targets(targets: Any, vocab_size: int, count: int) -> NDArray[np.int64]:
    """Return target ids for all positions, int64 (m,), or for each of `count` positions, (count, m) with `NO_TOKEN`."""
    if not _is_nested(targets):
        return np.array(read_targets(targets, vocab_size), np.int64)
    if len(targets) != count:
        raise SettingsError(f"targets: {len(targets)} lists for {count} positions; give one for each, or one for all")
    none = np.empty(0, np.int64)
    lists = [none if hasattr(ids, "__len__") and not len(ids) else _read_ids(ids, 1, "targets") for ids in targets]
    tokens = np.concatenate(lists).astype(np.int64)
    if not len(tokens):
        raise NotTokenIds("targets: no position has a token id")
    lengths = np.array([len(ids) for ids in lists])
    made = np.full((count, lengths.max()), NO_TOKEN, np.int64)
    made[np.arange(made.shape[1]) < lengths[:, None]] = np.where(tokens == -1, NO_TOKEN, tokens)
    if (tokens != -1).any():
        read_targets(tokens[tokens != -1].tolist(), vocab_size)
    return made


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
