"""What `--what` may ask of every text: for each kind the request, and the columns of its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import BatchError, SettingsError
from lmpool.producer import Producer, TopK
from lmpool.producer.options import read_sampling, read_stops
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import MAX_ANSWER, MAX_SEED
from lmpool.protocol.row import Encoding, narrow_to_bf16, widen_bf16
from lmpool.settings import shown

Columns = dict[str, NDArray[Any]]
"""The result for some positions of a text: column -> array whose first axis is the positions."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the input.

    Attributes:
        line: its number in the input, from 1.
        custom_id: of the line; None if it has none.
        ids: token ids.
        span: the positions for which results are wanted.
    """

    line: int
    custom_id: str | None
    ids: Ids
    span: range


class ResultWriter:
    """Writes results to a new file: of each text its parts in order, and then that it ends.

    This class keeps the parts until the text ends.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._parts: list[Columns] = []

    def add(self, part: Columns) -> None:
        """Add the result for the next positions of a text."""
        self._parts.append(part)

    def end_text(self, text: Text) -> None:
        """Write the text: all parts were added."""
        parts, self._parts = self._parts, []
        self.write(text, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def drop_text(self) -> None:
        """Drop the parts of a text that has not ended."""
        self._parts = []

    def write(self, text: Text, columns: Columns) -> None:
        """Write the whole result of a text."""

    def close(self) -> None:
        """Write the rest of the file."""


Ask = Callable[[Producer, Text, range, str], Awaitable[Columns]]
"""Requests the result for some positions of a text, with an adapter ("" for none)."""


def positions_from(length: int, start: int) -> range:
    """The positions of a text from `start` on; a negative start counts from the end."""
    return range(start if start >= 0 else max(0, length + start), length)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        what: as given, with defaults filled in.
        columns: of the results of a model: name -> type, shape and meaning; n is the number of positions.
        ask: requests the result for some positions.
        width: numbers for each position. Raises SettingsError if the kind does not fit the model.
        is_wide: whether results are too large for text: shards are safetensors, in which the first column is streamed.
        span: the positions of a text of some length from a start on.
        has_continuations: whether a line may have a prompt and a continuation, whose positions are then wanted.
    """

    what: str
    columns: Callable[[ModelInfo], dict[str, str]]
    ask: Ask
    width: Callable[[ModelInfo], int]
    is_wide: bool = False
    span: Callable[[int, int], range] = positions_from
    has_continuations: bool = False

    def parts(self, span: range, info: ModelInfo) -> list[range]:
        """Positions in parts whose results have at most 8 MiB, so that several fit into memory."""
        size = max(1, MAX_ANSWER // self.width(info))
        return [range(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]


def _topk(given: str) -> Kind:
    count = _whole(given, "topk", "of tokens, such as topk:32")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        best = await producer.positions(text.ids[: part.stop], part.start, top=count, adapter=adapter)
        assert isinstance(best, TopK)
        return {"logprobs": best.values, "top_ids": best.ids}

    def width(info: ModelInfo) -> int:
        if count > info.vocab_size:
            raise SettingsError(f"what: topk:{count} is more than V = {info.vocab_size}, the model's vocabulary")
        return 2 * count

    columns = {
        "logprobs": f"float32 (n, {count}): log-probabilities, highest first",
        "top_ids": f"int64 (n, {count}): token ids of the log-probabilities",
    }
    return Kind(f"topk:{count}", lambda _: columns, ask, width)


def _targets(given: str) -> Kind:
    try:
        targets = [int(part) for part in given.split(",")]
    except ValueError:
        raise SettingsError(f"what: targets:{given} needs token ids, such as targets:260,504") from None

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        values = await producer.positions(text.ids[: part.stop], part.start, targets=targets, adapter=adapter)
        return {"logprobs": np.asarray(values)}

    def width(info: ModelInfo) -> int:
        if wrong := [target for target in targets if not 0 <= target < info.vocab_size]:
            raise SettingsError(
                f"what: the target {wrong[0]} is out of range: this model's ids go from 0 to {info.vocab_size - 1}"
            )
        return len(targets)

    columns = {"logprobs": f"float32 (n, {len(targets)}): log-probabilities of the targets"}
    return Kind(f"targets:{','.join(map(str, targets))}", lambda _: columns, ask, width)


def _scores(given: str) -> Kind:
    _nothing(given, "scores")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        scores = await producer.score(text.ids[: part.start], text.ids[part.start : part.stop], adapter=adapter)
        return {"logprobs": scores}

    def span(length: int, start: int) -> range:  # The first token has no token before it, and so no score.
        return range(max(1, positions_from(length, start).start), length)

    columns = {"logprobs": "float32 (n,): log-probability of each token from `start` on, given the tokens before it"}
    return Kind("scores", lambda _: columns, ask, lambda _: 1, span=span, has_continuations=True)


def _rows(given: str) -> Kind:
    _nothing(given, "rows")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        ids, encoding = text.ids[: part.stop], _sixteen_bits(producer.model)
        if encoding is None:
            return {"logprobs": np.asarray(await producer.positions(ids, part.start, full=True, adapter=adapter))}
        logits = await producer.positions(ids, part.start, full=True, mode="logits", adapter=adapter)
        return await asyncio.to_thread(_narrowed, np.asarray(logits), encoding)

    def columns(info: ModelInfo) -> dict[str, str]:
        encoding = _sixteen_bits(info)
        if encoding is None:
            return {"logprobs": "float32 (n, V): log-probabilities"}
        name = "bfloat16" if encoding is Encoding.BF16 else "float16"
        return {
            "logits": f"{name} (n, V): every bit as the model computed them",
            "log_z": "float32 (n,): logarithm of the sum of the exponentials; logits minus log_z are log-probabilities",
        }

    return Kind("rows", columns, ask, lambda info: info.vocab_size, is_wide=True)


def _hidden(given: str) -> Kind:
    _nothing(given, "hidden")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        states = await producer.hidden(text.ids[: part.stop], part.start, adapter=adapter)
        return {"hidden": _bfloat16(states) if producer.model.dtype == "bfloat16" else states}

    def width(info: ModelInfo) -> int:
        if not info.hidden:
            raise SettingsError(f"what: the backend {info.backend!r} of {info.name!r} does not return hidden states")
        return info.hidden

    def columns(info: ModelInfo) -> dict[str, str]:
        return {"hidden": f"{info.dtype} (n, {info.hidden}): last hidden states, for `Producer.head`"}

    return Kind("hidden", columns, ask, width, is_wide=True)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 numbers that arrived as float32."""
    bits = narrow_to_bf16(values)
    if not np.array_equal(widen_bf16(bits), values, equal_nan=True):
        raise BatchError("the workers returned numbers that do not fit into bfloat16, the dtype of their model")
    return bits


def _sixteen_bits(info: ModelInfo) -> Encoding | None:
    """The 16-bit encoding that holds every bit of a model's logits; None if there is none."""
    is_exact = info.positions and not info.lossy and info.row_encoding is not Encoding.F32
    return info.row_encoding if is_exact else None


def _narrowed(logits: NDArray[np.float32], encoding: Encoding) -> Columns:
    """Logits, float32 (n, V), in 16 bits each, and their logZ, float32 (n,)."""
    numbers: NDArray[Any] = _bfloat16(logits) if encoding is Encoding.BF16 else logits.astype(np.float16)
    if encoding is not Encoding.BF16 and not np.array_equal(numbers.astype(np.float32), logits):
        raise BatchError("the workers returned logits that do not fit into float16, the encoding of their rows")
    most = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - most).sum(axis=1, dtype=np.float64)
    return {"logits": numbers, "log_z": (most[:, 0] + np.log(sums)).astype(np.float32)}


def _generate(given: str) -> Kind:
    most, _, options = given.partition(",")
    count = _whole(most, "generate", "of tokens at most, such as generate:64 or generate:64,temperature=0.7,seed=1")
    chosen = _options(options)
    try:
        read_sampling(chosen.get("temperature", 1.0), chosen.get("top_p", 1.0), chosen.get("seed"))
    except SettingsError as error:
        raise SettingsError(f"what: generate: {error}") from error
    seed = int(chosen.pop("seed", 0))

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        drawn = (seed + ((text.line - 1) << 32)) & MAX_SEED  # As one `batch_generate` of all lines draws.
        (found,) = await producer.generate(text.ids, count, seed=drawn, adapter=adapter, **chosen)
        return {"new_ids": found.ids, "logprobs": found.logprobs}

    def width(info: ModelInfo) -> int:
        if count > info.max_prompt_tokens:
            raise SettingsError(
                f"what: generate:{count} is more than {info.max_prompt_tokens} tokens, the model's longest prompt"
            )
        read_stops(chosen.get("stop", ()), info.vocab_size)
        return 2 * count

    columns = {
        "new_ids": f"int64 (n,): a continuation of at most {count} tokens",
        "logprobs": "float32 (n,): log-probability of each token, at temperature 1",
    }
    what = ",".join([f"generate:{count}", f"seed={seed}", *(f"{name}={chosen[name]}" for name in sorted(chosen))])
    return Kind(what, lambda _: columns, ask, width, span=lambda length, _: range(length - 1, length))


def _options(given: str) -> dict[str, Any]:
    """The options of a generation: name=value, separated by commas; `stop` has token ids separated by spaces."""
    kinds: dict[str, Callable[[str], Any]] = {
        "temperature": float,
        "top_p": float,
        "seed": int,
        "stop": lambda text: [int(part) for part in text.split()],
    }
    chosen = {}
    for option in given.split(",") if given else ():
        name, _, value = option.partition("=")
        try:
            chosen[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise SettingsError(
                f"what: {shown(option)} is none of temperature=0.7, top_p=0.9, seed=1, stop=2"
            ) from None
    return chosen


_KINDS: dict[str, Callable[[str], Kind]] = {
    "topk": _topk,
    "targets": _targets,
    "scores": _scores,
    "rows": _rows,
    "hidden": _hidden,
    "generate": _generate,
}

KINDS_HELP = (
    "topk:32 (the most likely tokens), targets:260,504 (these tokens), scores (the text's own tokens), rows (all "
    "tokens), hidden (last hidden states), generate:64,temperature=0.7 (a continuation)"
)
"""The kinds, for the help of the command line."""


def parse_kind(what: str) -> Kind:
    """The kind that `--what` names.

    Raises:
        SettingsError: there is no such kind, or the part after the colon is malformed.
    """
    name, _, given = what.partition(":")
    if name not in _KINDS:
        raise SettingsError(f"what: {shown(what)} is not one of {KINDS_HELP}")
    return _KINDS[name](given)


def _whole(given: str, name: str, needed: str) -> int:
    if not given.isascii() or not given.isdecimal() or int(given) < 1:
        raise SettingsError(f"what: {name}:{given} needs a number {needed}")
    return int(given)


def _nothing(given: str, name: str) -> None:
    if given:
        raise SettingsError(f"what: {name} takes nothing after the colon, not {shown(given)}")
