"""The tokens of texts with their most likely alternatives, and their JSON in the format of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.http.models import TokenTexts
from lmpool.protocol.picks import TopK

T = TypeVar("T")

FLOOR = -9999.0
"""The number that vLLM and OpenAI's clients read as −∞, which JSON does not have."""

ENTRY_BYTES = 100
"""Estimated bytes of one token with its log-probability in a JSON response."""

TARGET_BYTES = 12
"""Bytes of one target of a position: its int64 id and its float32 value."""

_MAX_ENTRIES_IN_LOOP = 50_000  # Max tokens of a response that is made in the event loop: this takes about 20 ms.


async def by_size(entries: int, make: Callable[..., T], *args: Any) -> T:
    """Call a function that makes a part of a response; in a thread if it is large, so that other requests go on."""
    if entries < _MAX_ENTRIES_IN_LOOP:
        return make(*args)
    return await asyncio.to_thread(make, *args)


class Ranked(NamedTuple):
    """For n positions, the token that really follows and the k most likely tokens.

    Attributes:
        ids: int64 (n, k + 1): the token that follows, then the most likely tokens, the most likely first.
        logprobs: float32 (n, k + 1), the log-probabilities of these tokens.
        ranks: int64 (n, k + 1), from 1. The rank of the token that follows is k + 1 if it is not among the k others,
            and 0, for unknown, if k is 0.
        is_new: bool (n, k + 1); False where one of the most likely tokens is the token that follows.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    is_new: NDArray[np.bool_]


def rank(follows: NDArray[np.int64], logprobs: NDArray[np.float32], top: TopK | None) -> Ranked:
    """Combine the tokens that follow n positions, (n,), and their log-probabilities, with the most likely tokens."""
    n = len(follows)
    values, ids = (np.empty((n, 0), np.float32), np.empty((n, 0), np.int64)) if top is None else top
    k = ids.shape[1]
    is_same = ids == follows[:, None]
    own_rank = np.where(is_same.any(1), is_same.argmax(1) + 1, k + 1) if k else np.zeros(n, np.int64)
    return Ranked(
        np.concatenate((follows[:, None], ids), 1),
        np.maximum(np.concatenate((logprobs[:, None], values), 1), np.float32(FLOOR)),
        np.concatenate((own_rank[:, None], np.broadcast_to(np.arange(1, k + 1), (n, k))), 1),
        np.concatenate((np.ones((n, 1), bool), ~is_same), 1),
    )


def prompt_logprobs_json(ranked: Ranked, texts: TokenTexts) -> msgspec.Raw:
    """The field `prompt_logprobs` of vLLM's responses, for a text of n + 1 tokens.

    The entries are joined from bytes that are made once per token: dicts would take most of the request's time.
    """
    if not len(ranked.ids):
        return msgspec.Raw(b"[null]")
    kept = ranked.is_new.ravel()
    ids = ranked.ids.ravel()[kept].tolist()
    # float64 numbers, so that the JSON has all digits of the float32 numbers.
    numbers = msgspec.json.encode(ranked.logprobs.ravel()[kept].tolist())[1:-1].split(b",")
    separators = np.zeros(ranked.ids.shape, object)
    separators[:, 0], separators[:, 1:] = b'},{"', b',"'
    opened = separators.ravel()[kept].tolist()
    opened[0] = b'{"'
    names = [b"null", *(b"%d" % place for place in range(1, ranked.ids.shape[1] + 1))]
    middles = [b',"rank":%b,"decoded_token":' % name for name in names]
    ranks = [middles[place] for place in ranked.ranks.ravel()[kept].tolist()]
    keys = [b'%d":{"logprob":' % token for token in ids]
    closed = [b"%b}" % texts.json(token) for token in ids]
    joined = b"".join(chain.from_iterable(zip(opened, keys, numbers, ranks, closed, strict=True)))
    return msgspec.Raw(b"[null," + joined + b"}]")
