"""The routes of the explorer page, which shows a text's tokens with alternatives, one row, and the byte trie.

`explorer_routes` makes the routes of the page; `Models` holds one producer per model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.routing import Route

from lmpool import errors
from lmpool.producer.options import read_sampling
from lmpool.producer.tokenizer import TOKENIZERS
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.picks import kept, top
from lmpool.web.guard import answers, read_body
from lmpool.web.models import Models, OpenModel

MAX_ALTERNATIVES = 50  # Max alternatives listed per token: a page cannot show more alternatives.

MAX_TOKENS = 4096
"""Max tokens of a text: a page with more tokens is unusable."""

_MAX_CHILDREN = 64  # Max children of a trie node that a page shows.
_MAX_PREFIX = 256  # Max bytes of a requested prefix; no token is longer.
_MAX_TEXT = 60  # Max characters of a token that a page shows.
_ENCODE_S = 10.0  # Max seconds to encode a text: only a hostile tokenizer needs more than milliseconds.
_NO_TRIES = "no trie worker is running: start one with `lmpool trie-worker`, or the model's workers with --with-trie"

_Top = Annotated[int, Meta(ge=1, le=MAX_ALTERNATIVES)]


class _ModelRequest(Struct, forbid_unknown_fields=True):
    model: str
    adapter: str = ""
    ids: list[int] = []


class _TextRequest(_ModelRequest):
    """Request the tokens of a text, or else of token ids, each with its most likely alternatives."""

    text: str = ""
    top: _Top = 10


class _RowRequest(_ModelRequest):
    """Request the next-token distribution before and after temperature and top-p; `token` is always listed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top: _Top = 20
    token: int | None = None


class _TrieRequest(_ModelRequest):
    """Request the byte trie below a prefix, which is given in hexadecimal."""

    under: Annotated[str, Meta(pattern="^([0-9a-fA-F]{2})*$", max_length=2 * _MAX_PREFIX)] = ""


class ExploredModel(OpenModel):
    """A model with the trie over its vocabulary, and texts for the page."""

    async def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of token ids, or None if the model has no tokenizer."""
        try:
            return (await self.tokenizer()).decode(list(ids))
        except errors.LMPoolError:
            return None

    def check_length(self, ids: Sequence[int]) -> None:
        """Raise `PromptTooLong` for a text that is too long for a page or for the model."""
        if len(ids) > (limit := min(MAX_TOKENS, self.producer.model.max_prompt_tokens)):
            raise errors.PromptTooLong(f"the text has {len(ids)} tokens; this page accepts at most {limit}. Shorten it")

    async def trie(self) -> PooledTrie:
        """Return the trie over the model's vocabulary; raises as `Producer.trie`."""
        trie: PooledTrie = await self.once("trie", self.producer.trie)
        return trie

    async def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Return printable texts of tokens, from the vocabulary or else the tokenizer; without both, empty texts."""
        wanted = set(ids)
        try:
            vocabulary = (await self.trie()).structure.vocabulary
        except errors.UnknownVocabulary:
            if await self.decode([]) is None:  # Without a tokenizer, do not search again for each token.
                return dict.fromkeys(wanted, "")
            return {token: shown_text(await self.decode([token]) or "") for token in wanted}
        # A row may have more entries than the vocabulary has tokens.
        return {token: shown_bytes(vocabulary[token]) if token < len(vocabulary) else "" for token in wanted}


def explorer_routes(models: Models[ExploredModel]) -> list[Route]:
    """Return the routes of the explorer."""

    async def show_text(request: Request) -> dict[str, Any]:
        wanted = await read_body(request, _TextRequest)
        async with models.use(wanted.model) as model:
            producer, adapter, ids = model.producer, wanted.adapter, wanted.ids
            if wanted.text:
                ids = await TOKENIZERS.encode(await model.tokenizer(), wanted.text, _ENCODE_S)
            model.check_length(ids)
            # Check the whole text before splitting it: the user must not get an error about a continuation.
            info = producer.model
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
            # The first token has no log-probability, because no token precedes it.
            top = min(wanted.top, info.vocab_size)
            found = await producer.positions(ids, top=top, next_token=True, adapter=adapter)
            assert found.top is not None
            assert found.next_token is not None
            values, alternatives = found.top
            logprobs = [None, *(_number(value) for value in found.next_token[:-1])]
            texts = await model.texts([*ids, *np.unique(alternatives).tolist()])
            # For each position, the most likely tokens after it.
            expected = [
                [[token, texts[token], _number(value)] for value, token in zip(*listed, strict=True)]
                for listed in zip(values.tolist(), alternatives.tolist(), strict=True)
            ]
            return {
                "ids": ids,
                "text": await model.decode(ids),
                "tokens": [
                    {"text": texts[token], "logprob": score, "top": before}
                    for token, score, before in zip(ids, logprobs, [[], *expected[:-1]], strict=True)
                ],
                "next": expected[-1],
            }

    async def show_row(request: Request) -> dict[str, Any]:
        wanted = await read_body(request, _RowRequest)
        how = read_sampling(wanted.temperature, wanted.top_p, None)
        async with models.use(wanted.model) as model:
            model.check_length(wanted.ids)
            row = await model.producer.logprobs(wanted.ids, adapter=wanted.adapter)
            before, after = np.exp(row.astype(np.float64)), drawn_from(row, how.temperature, how.top_p)
            listed, chosen = top(row, min(wanted.top, len(row))).ids.tolist(), None
            if wanted.token is not None:
                if not 0 <= wanted.token < len(row):
                    raise errors.InvalidPrompt(f"token: {wanted.token} must be from 0 to {len(row) - 1}")
                chosen = {"id": wanted.token, "rank": 1 + int(np.count_nonzero(row > row[wanted.token]))}
                listed += [wanted.token] * (wanted.token not in listed)
            texts = await model.texts(listed)
            return {
                "tokens": [[i, texts[i], float(before[i]), float(after[i])] for i in listed],
                "token": chosen,
                "entropy": [_entropy(before), _entropy(after)],
                "kept": int(np.count_nonzero(after)),
                "vocab_size": len(row),
            }

    async def show_trie(request: Request) -> dict[str, Any]:
        wanted = await read_body(request, _TrieRequest)
        prefix = bytes.fromhex(wanted.under)
        async with models.use(wanted.model) as model:
            model.check_length(wanted.ids)
            trie = await model.trie()
            node = trie.structure.node(prefix)
            nodes = [node, *trie.structure.children(node).tolist()]
            try:
                mass = await trie.weight_sum(prompt=wanted.ids, adapter=wanted.adapter, nodes=nodes)
            except errors.UnknownModel:
                # Show a note and no error, because most pools have no trie worker.
                return {"note": _NO_TRIES}
            children = list(zip(mass[1:].tolist(), map(trie.structure.prefix, nodes[1:]), strict=True))
            children.sort(key=lambda child: -child[0])
            return {
                "prefix": shown_bytes(prefix),
                "mass": float(mass[0]),
                # Probability of the tokens that end at this prefix: the part that no child has.
                "ends": max(0.0, float(mass[0] - mass[1:].sum(dtype=np.float64))),
                "children": [[whole.hex(), shown_bytes(whole), value] for value, whole in children[:_MAX_CHILDREN]],
                "left_out": max(0, len(children) - _MAX_CHILDREN),
            }

    handlers = {"/api/text": show_text, "/api/row": show_row, "/api/trie": show_trie}
    return [Route(path, answers(handler), methods=["POST"]) for path, handler in handlers.items()]


def drawn_from(row: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.float64]:
    """Return the probabilities with which `Producer.sample` draws from a row, float64 (V,), with sum 1."""
    ids, weights = kept(row, temperature, top_p)
    drawn = np.zeros(len(row))
    drawn[slice(None) if ids is None else ids] = weights
    drawn /= drawn.sum()
    return drawn


def shown_bytes(data: bytes) -> str:
    r"""Return bytes as text; invalid UTF-8 becomes `\xff`."""
    return shown_text(data.decode("utf-8", "backslashreplace"))


def shown_text(text: str) -> str:
    """Return a token for a page: keep line breaks and tabs, escape invisible characters, cut long texts."""
    return errors.printable(text[: _MAX_TEXT + 1], keep="\n\t")[: 6 * _MAX_TEXT]


def _entropy(probabilities: NDArray[np.float64]) -> float:
    """Return the entropy of a distribution in bits."""
    some = probabilities[probabilities > 0]
    return float(-(some * np.log2(some)).sum())


def _number(value: float) -> float | None:
    """Return a log-probability for JSON: null for −inf, which JSON does not have."""
    return round(float(value), 5) if math.isfinite(value) else None
