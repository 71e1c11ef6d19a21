"""What `--what` may ask of every text: a table of kinds, each with the question, and the columns of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.producer import Producer, TopK
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import MOST_ANSWER
from lmpool.settings import shown

Columns = dict[str, NDArray[Any]]
"""The answer for some positions of a text: column -> array whose first axis goes along the positions."""

Ask = Callable[[Producer, list[int], range, str], Awaitable[Columns]]
"""Asks about the positions of a range, of a text's token ids, with an adapter ("" for none)."""

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
        columns: of an answer: name -> what it holds, for people; n is the number of positions.
        ask: asks about some positions.
        width: numbers of each position.
        is_wide: its answers are too large for text: shards are safetensors, and only there. It has one column.
        span: which positions are asked about.
        has_continuations: a line may have a prompt and its continuation, which is what is asked about.
    """

    what: str
    columns: dict[str, str]
    ask: Ask
    width: Callable[[ModelInfo], int]
    is_wide: bool = False
    span: Span = positions_from
    has_continuations: bool = False

    def parts(self, span: range, info: ModelInfo) -> list[range]:
        """Positions in parts whose answers have some MiB at most, so that memory holds a few of them."""
        size = max(1, MOST_ANSWER // self.width(info))
        return [range(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]


def _topk(given: str) -> Kind:
    count = _whole(given, "topk", "of the likeliest tokens, such as topk:32")

    async def ask(producer: Producer, ids: list[int], part: range, adapter: str) -> Columns:
        best = await producer.positions(ids[: part.stop], part.start, top=count, adapter=adapter)
        assert isinstance(best, TopK)
        return {"logprobs": best.values, "top_ids": best.ids}

    columns = {
        "logprobs": f"float32 (n, {count}): log-probabilities, likeliest first",
        "top_ids": f"int64 (n, {count}): whose they are",
    }
    return Kind(f"topk:{count}", columns, ask, lambda info: 2 * _at_most(count, info))


def _targets(given: str) -> Kind:
    try:
        targets = [int(part) for part in given.split(",")]
    except ValueError:
        raise SettingsError(f"what: targets:{given} needs token ids, such as targets:260,504") from None

    async def ask(producer: Producer, ids: list[int], part: range, adapter: str) -> Columns:
        values = await producer.positions(ids[: part.stop], part.start, targets=targets, adapter=adapter)
        return {"logprobs": np.asarray(values)}

    def width(info: ModelInfo) -> int:
        if wrong := [target for target in targets if not 0 <= target < info.vocab_size]:
            raise SettingsError(
                f"what: the target {wrong[0]} is out of range: this model's ids go from 0 to {info.vocab_size - 1}"
            )
        return len(targets)

    what = f"targets:{','.join(map(str, targets))}"
    columns = {"logprobs": f"float32 (n, {len(targets)}): log-probabilities of the targets"}
    return Kind(what, columns, ask, width)


def _scores(given: str) -> Kind:
    _nothing(given, "scores")

    async def ask(producer: Producer, ids: list[int], part: range, adapter: str) -> Columns:
        scores = await producer.score(ids[: part.start], ids[part.start : part.stop], adapter=adapter)
        return {"logprobs": scores}

    columns = {"logprobs": "float32 (n,): log-probability of each token from `start` on, after those before it"}
    return Kind("scores", columns, ask, lambda _: 1, span=scored_from, has_continuations=True)


def _rows(given: str) -> Kind:
    _nothing(given, "rows")

    async def ask(producer: Producer, ids: list[int], part: range, adapter: str) -> Columns:
        return {
            "logprobs": np.asarray(await producer.positions(ids[: part.stop], part.start, full=True, adapter=adapter))
        }

    columns = {"logprobs": "float32 (n, V): log-probabilities of all tokens, as the pool sends them for positions"}
    return Kind("rows", columns, ask, lambda info: info.vocab_size, is_wide=True)


_KINDS: dict[str, Callable[[str], Kind]] = {"topk": _topk, "targets": _targets, "scores": _scores, "rows": _rows}

KINDS_HELP = "topk:32 (likeliest tokens), targets:260,504 (these tokens), scores (the text's own tokens), rows (all)"
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
