"""The perplexity of a text, in windows that overlap: every token but the first is scored once, after many before it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import NamedTuple

from lmpool.aio import gather
from lmpool.batch.progress import Progress
from lmpool.errors import SettingsError
from lmpool.producer import Producer
from lmpool.producer.tokenizer import find_tokenizer

_AT_ONCE = 64
_DEFAULT_WINDOW = 2048


class Perplexity(NamedTuple):
    """What a model makes of a text.

    Attributes:
        tokens: that were scored.
        nats_per_token: minus the mean of their log-probabilities.
        perplexity: its exponential.
        bits_per_byte: of the text in UTF-8, which makes models with other tokenizers comparable.
    """

    tokens: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float


def windows(ids: list[int], window: int, overlap: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a text into (context, continuation), each pair at most `window` tokens; the first context is one token."""
    start = 1
    while start < len(ids):
        first = max(0, start - overlap)
        end = min(len(ids), first + window)
        yield ids[first:start], ids[start:end]
        start = end


async def perplexity_of(
    producer: Producer, text: str, window: int, overlap: int, adapter: str, progress: Progress
) -> Perplexity:
    """Score a text.

    Args:
        producer: to ask with.
        text: what is scored.
        window: most tokens of one forward; 0 for 2,048, or what the model takes.
        overlap: tokens before those that are scored, where the text has them; 0 for half a window.
        adapter: of the model; "" for none.
        progress: counts tokens.

    Raises:
        SettingsError: the text has less than two tokens, or the windows do not fit the model.
        LMPoolError: as `Producer.score`.
    """
    await producer.open()
    most = producer.model.max_prompt_tokens
    window = window or min(_DEFAULT_WINDOW, most)
    overlap = overlap or max(1, window // 2)
    if not 1 <= overlap < window <= most:
        raise SettingsError(f"window: {window} must be more than the overlap, {overlap}, and at most {most}")
    tokenizer = await find_tokenizer(producer, "file", "there is no other way for a text")
    ids = await asyncio.to_thread(tokenizer.encode, text)
    if len(ids) < 2:
        raise SettingsError("file: it has less than two tokens: there is nothing to score")
    pairs = windows(ids, window, overlap)
    sums: list[float] = []

    async def ask() -> None:
        for context, continuation in pairs:
            scores = await producer.score(context, continuation, adapter=adapter)
            sums.append(-float(scores.sum(dtype="float64")))
            progress.advance(len(scores), len(scores))

    with progress:
        progress.begin(len(ids) - 1, 0)
        await gather([ask() for _ in range(_AT_ONCE)])
    nats = math.fsum(sums)
    mean = nats / (len(ids) - 1)
    bits = nats / math.log(2) / len(text.encode("utf-8"))
    return Perplexity(len(ids) - 1, mean, math.exp(mean) if mean < 700 else math.inf, bits)
