"""The kinds of request that `--what` names: how each kind sends requests, and the columns of its results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.batch.shards import Columns, Text
from lmpool.errors import BatchError, SettingsError
from lmpool.producer import Producer
from lmpool.producer.options import check_k, read_sampling, read_stops, read_targets, read_wanted
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import MAX_ANSWER, MAX_SEED
from lmpool.protocol.row import Encoding, narrow_to_bf16, widen_bf16
from lmpool.settings import check_number, shown

Request = Callable[[Producer, Text, range, str], Awaitable[Columns]]
"""A function that requests the result for some positions of a text, with an adapter ("" for none)."""

_TOP = {"logprobs": "top.values", "top_ids": "top.ids"}  # Column of the top tokens -> attribute of `Positions`.


def positions_from(length: int, start: int) -> range:
    """The positions of a text from `start` on; a negative start counts from the end."""
    return range(start if start >= 0 else max(0, length + start), length)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    what: str  # The value of `--what`, with defaults filled in.
    columns: Callable[[ModelInfo], dict[str, str]]  # Returns column -> type, shape and meaning of its values.
    request: Request
    # Returns how many numbers a result has per position, or raises an error if the model does not support the kind.
    width: Callable[[ModelInfo], int]
    is_wide: bool = False  # If results are too large for text, shards are safetensors and stream their first column.
    span: Callable[[int, int], range] = positions_from  # Returns positions, from a text's length and a start.
    has_continuations: bool = False  # Whether a line may have a continuation; then only its tokens get results.

    def parts(self, span: range, info: ModelInfo) -> list[range]:
        """Split positions into parts whose results have at most 8 MiB each, so that several results fit into memory."""
        size = max(1, MAX_ANSWER // self.width(info))
        return [range(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]


def _request_positions(columns: Mapping[str, str], **options: Any) -> Request:
    """Return a request with `options` of `Producer.positions`; `columns` is column -> attribute of its result."""

    async def request(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        # The log-probability of the next token needs the token after the part, whose own values are dropped.
        ids = text.ids[: part.stop + ("next_token" in options)]
        found = await producer.positions(ids, part.start, adapter=adapter, **options)
        return {name: np.asarray(attrgetter(at)(found))[: len(part)] for name, at in columns.items()}

    return request


def _top_columns(count: object) -> dict[str, str]:
    return {
        "logprobs": f"float32 (n, {count}): log-probabilities, highest first",
        "top_ids": f"int64 (n, {count}): token ids of the log-probabilities",
    }


def _topk(given: str) -> Kind:
    count = _count(given, "topk", "of tokens, such as topk:32")
    columns = _top_columns(count)

    def width(info: ModelInfo) -> int:
        return 2 * check_k(count, info.vocab_size, "what: topk")

    return Kind(f"topk:{count}", lambda _: columns, _request_positions(_TOP, top=count), width)


def _targets(given: str) -> Kind:
    try:
        targets = list(map(int, given.split(",")))
    except ValueError:
        raise SettingsError(f"what: targets:{given} needs token ids, such as targets:260,504") from None
    columns = {"logprobs": f"float32 (n, {len(targets)}): log-probabilities of the targets"}

    def width(info: ModelInfo) -> int:
        return len(read_targets(targets, info.vocab_size, "what: targets"))

    what = f"targets:{','.join(map(str, targets))}"
    return Kind(what, lambda _: columns, _request_positions({"logprobs": "targets"}, targets=targets), width)


def _positions(given: str) -> Kind:
    single = {
        "next_token": "log-probability of the token that follows; NaN at the end of the text",
        "logz": "logarithm of the sum of the exponentials of the logits, divided by the temperature",
        "tail": "log of the probability of all tokens that are neither in top nor in targets",
    }
    readers = {"top=": int, "temperature=": float, "targets=": _ids} | dict.fromkeys(single, lambda _: True)
    options = _options(given, readers, "top=32, targets=260 504, next_token, logz, tail, temperature=2")
    columns = {name: f"float32 (n,): {text}" for name, text in single.items() if name in options}
    if count := len(options.get("targets", ())):
        columns["targets"] = f"float32 (n, {count}): log-probabilities of the targets"
    if "top" in options:
        columns |= _top_columns(check_number("what: positions: top", options["top"], 1))

    attributes = {name: name for name in ("targets", *single) if name in options} | (_TOP if "top" in options else {})

    def width(info: ModelInfo) -> int:
        wanted = read_wanted(options, info.vocab_size, 0, 1)  # type: ignore[arg-type]  # The names are checked above.
        return wanted.query(range(1), 1).width(info.vocab_size)

    return Kind(f"positions:{given}", lambda _: columns, _request_positions(attributes, **options), width)


async def _request_scores(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
    return {"logprobs": await producer.score(text.ids[: part.start], text.ids[part.start : part.stop], adapter=adapter)}


_SCORES = Kind(
    "scores",
    lambda _: {"logprobs": "float32 (n,): log-probability of each token from `start` on, given the tokens before it"},
    _request_scores,
    lambda _: 1,
    # The first token has no score, because there is no token before it.
    span=lambda length, start: range(max(1, positions_from(length, start).start), length),
    has_continuations=True,
)


def _sixteen_bits(info: ModelInfo) -> Encoding | None:
    """The 16-bit encoding that holds every bit of a model's logits; None if no encoding does."""
    is_exact = info.positions and not info.lossy and info.row_encoding is not Encoding.F32
    return info.row_encoding if is_exact else None


def _narrow(values: NDArray[np.float32], encoding: Encoding) -> NDArray[Any]:
    """Convert float32 numbers back to float16, or to the bits of bfloat16; BatchError if a number changes."""
    is_bf16 = encoding is Encoding.BF16
    numbers: NDArray[Any] = narrow_to_bf16(values) if is_bf16 else values.astype(np.float16)
    if not np.array_equal(widen_bf16(numbers) if is_bf16 else numbers.astype(np.float32), values, equal_nan=True):
        raise BatchError(f"the workers returned numbers that do not fit into {encoding.name}, as their model's do")
    return numbers


async def _request_rows(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
    if (encoding := _sixteen_bits(producer.model)) is None:
        return await _request_positions({"logprobs": "full"}, full=True)(producer, text, part, adapter)
    found = await producer.positions(text.ids[: part.stop], part.start, full=True, mode="logits", adapter=adapter)
    logits: NDArray[np.float32] = np.asarray(found.full)

    def narrowed() -> Columns:
        highest = logits.max(axis=1, keepdims=True)
        sums = np.exp(logits - highest).sum(axis=1, dtype=np.float64)
        return {"logits": _narrow(logits, encoding), "log_z": (highest[:, 0] + np.log(sums)).astype(np.float32)}

    return await asyncio.to_thread(narrowed)


def _row_columns(info: ModelInfo) -> dict[str, str]:
    if (encoding := _sixteen_bits(info)) is None:
        return {"logprobs": "float32 (n, V): log-probabilities"}
    name = "bfloat16" if encoding is Encoding.BF16 else "float16"
    return {
        "logits": f"{name} (n, V): every bit as the model computed them",
        "log_z": "float32 (n,): logarithm of the sum of the exponentials; logits minus log_z are log-probabilities",
    }


async def _request_hidden(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
    states = await producer.hidden(text.ids[: part.stop], part.start, adapter=adapter)
    return {"hidden": _narrow(states, Encoding.BF16) if producer.model.dtype == "bfloat16" else states}


def _hidden_columns(info: ModelInfo) -> dict[str, str]:
    return {"hidden": f"{info.dtype} (n, {info.hidden}): last hidden states, for `Producer.head`"}


def _hidden_width(info: ModelInfo) -> int:
    if not info.hidden:
        raise SettingsError(f"what: the backend {info.backend!r} of {info.name!r} does not return hidden states")
    return info.hidden


def _generate(given: str) -> Kind:
    limit, _, options = given.partition(",")
    count = _count(limit, "generate", "of tokens at most, such as generate:64 or generate:64,temperature=0.7,seed=1")
    readers = {"temperature=": float, "top_p=": float, "seed=": int, "stop=": _ids}
    chosen = _options(options, readers, "temperature=0.7, top_p=0.9, seed=1, stop=2") if options else {}
    try:
        seed = read_sampling(chosen.get("temperature", 1.0), chosen.get("top_p", 1.0), chosen.pop("seed", 0)).seed
    except SettingsError as error:
        raise SettingsError(f"what: generate: {error}") from error

    async def request(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        drawn = (seed + ((text.line - 1) << 32)) & MAX_SEED  # The seed in a `batch_generate` of all lines.
        (found,) = await producer.generate(text.ids, count, seed=drawn, adapter=adapter, **chosen)
        return {"new_ids": found.ids, "logprobs": found.logprobs}

    def width(info: ModelInfo) -> int:
        note = ", the tokens of the model's longest prompt"
        check_number("what: generate", count, 1, info.max_prompt_tokens, note=note)
        read_stops(chosen.get("stop", ()), info.vocab_size)
        return 2 * count

    columns = {
        "new_ids": f"int64 (n,): a continuation of at most {count} tokens",
        "logprobs": "float32 (n,): log-probability of each token, at temperature 1",
    }
    what = ",".join([f"generate:{count}", f"seed={seed}", *(f"{name}={chosen[name]}" for name in sorted(chosen))])
    return Kind(what, lambda _: columns, request, width, span=lambda length, _: range(length - 1, length))


_KINDS: dict[str, Kind | Callable[[str], Kind]] = {
    "topk": _topk,
    "targets": _targets,
    "positions": _positions,
    "scores": _SCORES,
    "rows": Kind("rows", _row_columns, _request_rows, lambda info: info.vocab_size, is_wide=True),
    "hidden": Kind("hidden", _hidden_columns, _request_hidden, _hidden_width, is_wide=True),
    "generate": _generate,
}

KINDS_HELP = (
    "topk:32 (the most likely tokens), targets:260,504 (these tokens), scores (the text's own tokens), "
    "positions:top=32,next_token,tail (several values), rows (all tokens), "
    "hidden (last hidden states), generate:64,temperature=0.7 (a continuation)"
)
"""The kinds of request, for the help of the command line."""


def parse_kind(what: str) -> Kind:
    """The kind that `--what` names."""
    name, _, given = what.partition(":")
    kind = _KINDS.get(name)
    if kind is None or (isinstance(kind, Kind) and given):
        raise SettingsError(f"what: {shown(what)} is not one of {KINDS_HELP}")
    return kind if isinstance(kind, Kind) else kind(given)


def _options(given: str, readers: Mapping[str, Any], known: str) -> dict[str, Any]:
    """The values of options such as "top=32,tail"; `readers` convert the text after "top=" and the "" after "tail"."""
    options: dict[str, Any] = {}
    for option in given.split(","):
        name, equals, value = option.strip().partition("=")
        try:
            options[name] = readers[name + equals](value)
        except (KeyError, ValueError):
            raise SettingsError(f"what: {shown(option)} is none of {known}") from None
    return options


def _ids(text: str) -> list[int]:
    return list(map(int, text.split()))


def _count(given: str, name: str, needed: str) -> int:
    if not given.isascii() or not given.isdecimal() or int(given) < 1:
        raise SettingsError(f"what: {name}:{given} needs a number {needed}")
    return int(given)
