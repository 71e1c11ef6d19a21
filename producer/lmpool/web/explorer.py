"""The routes of the explorer: the tokens of a text with alternatives, one row, and the byte trie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.routing import Route

from lmpool.aio import gather
from lmpool.errors import InvalidPrompt, SettingsError, UnknownModel
from lmpool.producer.options import read_sampling
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.query import kept, top
from lmpool.web.answers import answers, read_body
from lmpool.web.models import ExploredModel, Models, shown_bytes

MAX_ALTERNATIVES = 50  # Max alternatives per token: a page cannot show more.
_MAX_CHILDREN = 64  # Max children shown of a trie node.
_MAX_PREFIX = 256  # Max bytes of a prefix: longer than any token.
_NO_TRIES = "no trie worker is running: start one with `lmpool trie-worker`, or the model's workers with --with-trie"


class TextRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request the tokens of a text (or of token ids), each with its most likely alternatives."""

    model: str
    adapter: str = ""
    text: str = ""
    ids: list[int] | None = None
    top: int = 10


class RowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request the next-token distribution before and after temperature and top-p; `token` is always listed."""

    model: str
    ids: list[int]
    adapter: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top: int = 20
    token: int | None = None


class TrieRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request the byte trie below a prefix, which is given in hexadecimal."""

    model: str
    ids: list[int]
    adapter: str = ""
    under: str = ""


class ExplorerRoutes:
    """The routes of the explorer for the given models."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.routes = [
            Route("/api/text", answers(self._text), methods=["POST"]),
            Route("/api/row", answers(self._row), methods=["POST"]),
            Route("/api/trie", answers(self._trie), methods=["POST"]),
        ]

    async def _text(self, request: Request) -> dict[str, Any]:
        asked = await read_body(request, TextRequest)
        most = _check_top(asked.top)
        async with self._models.use(asked.model) as model:
            ids = await model.encode(asked.text) if asked.ids is None else asked.ids
            model.check_length(ids)
            most = min(most, model.producer.model.vocab_size)
            scores, (values, alternatives) = await gather(
                [_scores(model, ids, asked.adapter), model.producer.positions(ids, top=most, adapter=asked.adapter)]
            )
            texts = await model.texts([*ids, *np.unique(alternatives).tolist()])
            expected = [_listed(values[at], alternatives[at], texts) for at in range(len(ids))]
            return {
                "ids": ids,
                "text": await model.decode(ids),
                "tokens": [
                    # The first token has no log-probability, because no token precedes it.
                    {"text": texts[token], "logprob": score, "top": expected[at - 1] if at else []}
                    for at, (token, score) in enumerate(zip(ids, [None, *map(_number, scores)], strict=True))
                ],
                "next": expected[-1],
            }

    async def _row(self, request: Request) -> dict[str, Any]:
        asked = await read_body(request, RowRequest)
        most, how = _check_top(asked.top), read_sampling(asked.temperature, asked.top_p, None)
        async with self._models.use(asked.model) as model:
            model.check_length(asked.ids)
            row = await model.producer.logprobs(asked.ids, adapter=asked.adapter)
            before, after = np.exp(row.astype(np.float64)), drawn_from(row, how.temperature, how.top_p)
            listed, chosen = top(row, min(most, len(row))).ids.tolist(), None
            if asked.token is not None:
                if not 0 <= asked.token < len(row):
                    raise InvalidPrompt(f"token: {asked.token} must be from 0 to {len(row) - 1}")
                chosen = {"id": asked.token, "rank": 1 + int(np.count_nonzero(row > row[asked.token]))}
                listed += [asked.token] * (asked.token not in listed)
            texts = await model.texts(listed)
            return {
                "tokens": [[i, texts[i], float(before[i]), float(after[i])] for i in listed],
                "token": chosen,
                "entropy": [_entropy(before), _entropy(after)],
                "kept": int(np.count_nonzero(after)),
                "vocab_size": len(row),
            }

    async def _trie(self, request: Request) -> dict[str, Any]:
        asked = await read_body(request, TrieRequest)
        try:
            prefix = bytes.fromhex(asked.under)
        except ValueError:
            raise SettingsError("under: it must be a prefix in hexadecimal, such as 2074") from None
        if len(prefix) > _MAX_PREFIX:
            raise SettingsError(f"under: the prefix has {len(prefix)} bytes; the limit is {_MAX_PREFIX}")
        async with self._models.use(asked.model) as model:
            model.check_length(asked.ids)
            trie = await model.trie()
            structure = trie.structure
            node = structure.node(prefix)
            nodes = [node, *structure.children(node).tolist()]
            try:
                mass = await trie.weight_sum(prompt=asked.ids, adapter=asked.adapter, nodes=nodes)
            except UnknownModel:
                # Most pools have no trie worker: show a note, not an error.
                return {"note": _NO_TRIES}
            children = [(structure.prefix(child), float(mass[at])) for at, child in enumerate(nodes[1:], 1)]
            children.sort(key=lambda child: -child[1])
            return {
                "prefix": shown_bytes(prefix),
                "mass": float(mass[0]),
                # The rest is the mass of the tokens that end here.
                "ends": max(0.0, float(mass[0] - mass[1:].sum(dtype=np.float64))),
                "children": [[whole.hex(), shown_bytes(whole), value] for whole, value in children[:_MAX_CHILDREN]],
                "left_out": max(0, len(children) - _MAX_CHILDREN),
            }


async def _scores(model: ExploredModel, ids: list[int], adapter: str) -> NDArray[np.float32]:
    """Return the log-probability of every token but the first."""
    if len(ids) < 2:
        return np.empty(0, np.float32)
    # Check the whole text: an error must not name a continuation that the user does not know.
    info = model.producer.model
    encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
    return await model.producer.score(ids[:1], ids[1:], adapter=adapter)


def drawn_from(row: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.float64]:
    """Return the probabilities that `Producer.sample` uses, float64 (V,), with sum 1.

    Args:
        row: log-probabilities, float32 (V,).
        temperature: 0 for the most likely token only.
        top_p: above 0, at most 1.
    """
    ids, weights = kept(row, temperature, top_p)
    drawn = np.zeros(len(row))
    drawn[slice(None) if ids is None else ids] = weights
    drawn /= drawn.sum()
    return drawn


def _entropy(probabilities: NDArray[np.float64]) -> float:
    """Return the entropy in bits."""
    some = probabilities[probabilities > 0]
    return float(-(some * np.log2(some)).sum())


def _check_top(count: int) -> int:
    if not 1 <= count <= MAX_ALTERNATIVES:
        raise SettingsError(f"top: {count} is not from 1 to {MAX_ALTERNATIVES}")
    return count


def _listed(values: Iterable[float], ids: Iterable[int], texts: dict[int, str]) -> list[list[Any]]:
    return [[int(token), texts[int(token)], _number(value)] for value, token in zip(values, ids, strict=True)]


def _number(value: float) -> float | None:
    """Return a log-probability for JSON: null for −inf, which JSON does not have."""
    return round(float(value), 5) if math.isfinite(value) else None
