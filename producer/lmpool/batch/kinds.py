"""What `--what` may ask of every text: a table of kinds, each with the question, and the columns of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

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
"""The answer for some positions of a text: column -> array whose first axis goes along the positions."""

Ids = list[int]

_BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked about one line.

    Attributes:
        line: its number, from 1.
        custom_id: of the line; None where it has none.
        ids: the token ids.
        span: the positions that are asked about.
    """

    line: int
    custom_id: str | None
    ids: Ids
    span: range


Ask = Callable[[Producer, Text, range, str], Awaitable[Columns]]
"""Asks about some positions of a text, with an adapter ("" for none)."""

Span = Callable[[int, int], range]
"""The positions that are asked about, of a text of so many tokens from a start that may count from the end."""


def positions_from(length: int, start: int) -> range:
    """The positions from `start` on, or the last -`start` as far as there are so many."""
    return range(start if start >= 0 else max(0, length + start), length)


def scored_from(length: int, start: int) -> range:
    """The same of tokens that have one before them."""
    return range(max(1, positions_from(length, start).start), length)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked of every text.

    Attributes:
        what: as it was given.
        columns: of a model's answers: name -> what it holds, for people; n is the number of positions.
        ask: asks about some positions.
        width: numbers of each position.
        is_wide: its answers are too large for text: shards are safetensors, where the first column has one.
        span: which positions are asked about.
        has_continuations: a line may have a prompt and its continuation, which is what is asked about.
    """

    what: str
    columns: Callable[[ModelInfo], dict[str, str]]
    ask: Ask
    width: Callable[[ModelInfo], int]
    is_wide: bool = False
    span: Span = positions_from
    has_continuations: bool = False

    def parts(self, span: range, info: ModelInfo) -> list[range]:
        """Positions in parts whose answers have some MiB at most, so that memory holds a few of them."""
        size = max(1, MAX_ANSWER // self.width(info))
        return [range(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]


def _topk(given: str) -> Kind:
    count = _whole(given, "topk", "of the likeliest tokens, such as topk:32")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        best = await producer.positions(text.ids[: part.stop], part.start, top=count, adapter=adapter)
        assert isinstance(best, TopK)
        return {"logprobs": best.values, "top_ids": best.ids}

    columns = {
        "logprobs": f"float32 (n, {count}): log-probabilities, likeliest first",
        "top_ids": f"int64 (n, {count}): whose they are",
    }
    return Kind(f"topk:{count}", lambda _: columns, ask, lambda info: 2 * _at_most(count, info))


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

    what = f"targets:{','.join(map(str, targets))}"
    columns = {"logprobs": f"float32 (n, {len(targets)}): log-probabilities of the targets"}
    return Kind(what, lambda _: columns, ask, width)


def _scores(given: str) -> Kind:
    _nothing(given, "scores")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        scores = await producer.score(text.ids[: part.start], text.ids[part.start : part.stop], adapter=adapter)
        return {"logprobs": scores}

    columns = {"logprobs": "float32 (n,): log-probability of each token from `start` on, after those before it"}
    return Kind("scores", lambda _: columns, ask, lambda _: 1, span=scored_from, has_continuations=True)


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
        name = {Encoding.BF16: "bfloat16", Encoding.F16: "float16"}[encoding]
        return {
            "logits": f"{name} (n, V): as the model computed them, every bit",
            "log_z": "float32 (n,): logarithm of the sum of their exponentials; logits less this are log-probabilities",
        }

    return Kind("rows", columns, ask, lambda info: info.vocab_size, is_wide=True)


def _hidden(given: str) -> Kind:
    _nothing(given, "hidden")

    async def ask(producer: Producer, text: Text, part: range, adapter: str) -> Columns:
        states = await producer.hidden(text.ids[: part.stop], part.start, adapter=adapter)
        return {"hidden": _bfloat16(states) if producer.model.dtype == _BFLOAT16 else states}

    def width(info: ModelInfo) -> int:
        if not info.hidden:
            raise SettingsError(f"what: the backend {info.backend!r} of {info.name!r} does not tell hidden states")
        return info.hidden

    def columns(info: ModelInfo) -> dict[str, str]:
        return {"hidden": f"{info.dtype} (n, {info.hidden}): last hidden states, for `Producer.head`"}

    return Kind("hidden", columns, ask, width, is_wide=True)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 numbers that came in float32."""
    bits = narrow_to_bf16(values)
    if not np.array_equal(widen_bf16(bits), values, equal_nan=True):
        raise BatchError("the workers told numbers that bfloat16 cannot hold, which is their model's dtype")
    return bits


def _sixteen_bits(info: ModelInfo) -> Encoding | None:
    """The encoding that has every bit of a model's logits in two bytes; None where there is none."""
    is_exact = info.positions and not info.lossy and info.row_encoding is not Encoding.F32
    return info.row_encoding if is_exact else None


def _narrowed(logits: NDArray[np.float32], encoding: Encoding) -> Columns:
    """Logits, float32 (n, V), in two bytes each, and their logZ."""
    if encoding is Encoding.BF16:
        numbers: NDArray[Any] = _bfloat16(logits)
    else:
        numbers = logits.astype(np.float16)
        if not np.array_equal(numbers.astype(np.float32), logits):
            raise BatchError("the workers told logits that float16 cannot hold, which is their rows' encoding")
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
        # As one `batch_generate` of all lines would draw.
        drawn = (seed + ((text.line - 1) << 32)) & MAX_SEED
        (found,) = await producer.generate(text.ids, count, seed=drawn, adapter=adapter, **chosen)
        return {"new_ids": found.ids, "logprobs": found.logprobs}

    columns = {
        "new_ids": f"int64 (n,): a continuation of {count} tokens at most",
        "logprobs": "float32 (n,): log-probability of each, whatever the temperature",
    }
    what = ",".join([f"generate:{count}", f"seed={seed}", *(f"{name}={chosen[name]}" for name in sorted(chosen))])

    def width(info: ModelInfo) -> int:
        if count > info.max_prompt_tokens:
            text = f"is more than {info.max_prompt_tokens} tokens, the model's longest prompt"
            raise SettingsError(f"what: generate:{count} {text}")
        read_stops(chosen.get("stop", ()), info.vocab_size)
        return 2 * count

    return Kind(what, lambda _: columns, ask, width, span=lambda length, _: range(length - 1, length))


def _options(given: str) -> dict[str, Any]:
    """The options of a generation: name=value, with commas between them; of `stop` several, with spaces."""
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
    "topk:32 (likeliest tokens), targets:260,504 (these tokens), scores (the text's own tokens), rows (all tokens), "
    "hidden (last hidden states), "
    "generate:64,temperature=0.7 (a continuation)"
)
"""What the command line says of them."""


def parse_kind(what: str) -> Kind:
    """The kind that `--what` names.

    Raises:
        SettingsError: there is no such kind, or what is behind the colon is malformed.
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
        raise SettingsError(f"what: {name} takes nothing behind it, not {shown(given)}")


def _at_most(count: int, info: ModelInfo) -> int:
    if count > info.vocab_size:
        raise SettingsError(f"what: topk:{count} is more than V = {info.vocab_size}, the model's vocabulary")
    return count
