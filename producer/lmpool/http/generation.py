"""Continuations of prompts: sampling parameters, stop strings, and text that arrives piece by piece."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError, UnknownTokenizer
from lmpool.http.models import Target
from lmpool.producer.options import check_room, read_sampling
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.query import MAX_SEED, Continuation

# Tokens of the first request for a text that is checked for stop strings, or that is streamed. The number doubles with
# each request, up to the max: small requests show the first tokens early, large requests cost less per token.
_FIRST_STEP, _MAX_STEP = 1, 16
_MAX_STOPS = 16  # Max stop texts of a request: each new piece of text is searched for each of them.
_MAX_STOP_LENGTH = 1024  # Max characters of a stop text, because a stream holds back as many characters.


class TextSampling(NamedTuple):
    """How to continue a prompt.

    Attributes:
        max_tokens: max tokens of a continuation; 0 for none.
        temperature: as in `lmpool.producer.options.DrawOptions`, and so are `top_p` and `seed`.
        stop: texts that end a continuation.
        stop_ids: tokens that end a continuation, as the request names them.
        end_ids: the model's end tokens.
        keep_stop: whether the text includes the stop text or the text of the stop token.
        skip_special: whether the text leaves out special tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    skip_special: bool = True

    @classmethod
    async def of(cls, target: Target, fields: Any, max_tokens: int, seed: int | None, *, keep_stop: bool) -> Self:
        """How to continue a prompt according to the fields of a request, whose names are the same in all dialects.

        The other arguments are the values of fields with different names.
        """
        stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
        return cls(
            max_tokens, fields.temperature, fields.top_p, seed, tuple(filter(None, stop)),
            frozenset(fields.stop_token_ids), frozenset() if fields.ignore_eos else await target.model.end_ids(),
            keep_stop, fields.skip_special_tokens,
        )  # fmt: skip

    @property
    def is_one_greedy_token(self) -> bool:
        """Whether the continuation is the most likely token, as clients request it that need only the prompt."""
        return self.max_tokens == 1 and self.temperature == 0

    def check(self, target: Target, prompt: list[int]) -> None:
        """Check the parameters and the prompt before any request is sent; raises as `Producer.generate`.

        Stop texts raise UnknownTokenizer if the model has no tokenizer.
        """
        info, seed = target.info, self.seed if self.seed is None else self.seed & MAX_SEED
        read_sampling(self.temperature, self.top_p, seed)
        encoded = encode_prompt(prompt, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
        if self.max_tokens:
            check_room(self.max_tokens, encoded, info.max_prompt_tokens)
        if len(self.stop) > _MAX_STOPS or max(map(len, self.stop), default=0) > _MAX_STOP_LENGTH:
            raise SettingsError(f"stop: give at most {_MAX_STOPS} texts of at most {_MAX_STOP_LENGTH} characters")
        if self.stop and target.texts.tokenizer is None:
            raise UnknownTokenizer("stop: the model's workers publish no tokenizer: send stop_token_ids")
        if wrong := [token for token in self.stop_ids if not 0 <= token < info.vocab_size]:
            raise SettingsError(f"stop_token_ids: {wrong[0]} must be from 0 to {info.vocab_size - 1}")


class NextTokens(NamedTuple):
    """The next tokens of a continuation.

    Attributes:
        ids: the new tokens.
        logprobs: their log-probabilities.
        text: the new text.
        reason: "stop" or "length" in the last piece, else None.
        matched: the stop text or the stop token that ended the continuation; None for others.
    """

    ids: list[int]
    logprobs: list[float]
    text: str
    reason: str | None = None
    matched: int | str | None = None


@dataclass(slots=True)
class Choice:
    """A whole continuation; the attributes are as in `NextTokens`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    matched: int | str | None = None

    def add(self, piece: NextTokens) -> None:
        """Append a piece."""
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.text += piece.text
        self.reason, self.matched = piece.reason, piece.matched


async def generate(
    target: Target, prompt: list[int], how: TextSampling, number: int = 0, known: Continuation | None = None
) -> Choice:
    """Continue a prompt.

    Args:
        target: the model.
        prompt: the token ids.
        how: how to continue the prompt.
        number: number of the continuation in its request, so that each has its own seed.
        known: the tokens of the continuation, if the caller knows them.
    """
    choice = Choice()
    if known is not None:
        choice.add(_Writer(target, prompt, how).add(*known))
        return choice
    async for piece in pieces(target, prompt, how, number, is_streamed=False):
        choice.add(piece)
    return choice


async def pieces(
    target: Target, prompt: list[int], how: TextSampling, number: int = 0, *, is_streamed: bool = True
) -> AsyncGenerator[NextTokens, None]:
    """Continue a prompt piece by piece. The tokens are those of `Producer.generate` with seed + number * 2**32."""
    is_stepwise = is_streamed or bool(how.stop)
    seed = how.seed
    if seed is None and is_stepwise:
        seed = secrets.randbits(64)
    elif seed is not None:
        seed = seed + (number << 32) & MAX_SEED
    writer = _Writer(target, prompt, how)
    step = _FIRST_STEP if is_stepwise else how.max_tokens
    while (left := how.max_tokens - len(writer.ids)) > 0:
        # The token at index i depends on seed + i, so several requests draw the tokens of one request.
        from_seed = None if seed is None else seed + len(writer.ids) & MAX_SEED
        (found,) = await target.producer.generate(
            prompt + writer.ids,
            min(step, left),
            temperature=how.temperature,
            top_p=how.top_p,
            seed=from_seed,
            stop=sorted(how.stop_ids | how.end_ids),
            **target.options,
        )
        piece = writer.add(found.ids, found.logprobs)
        yield piece
        if piece.reason is not None:
            return
        step = min(_MAX_STEP, 2 * step)
    if how.max_tokens == 0:
        yield NextTokens([], [], "", "length")


class _Writer:
    """Turns the tokens of a continuation into text, and finds its end."""

    def __init__(self, target: Target, prompt: list[int], how: TextSampling) -> None:
        self._target = target
        self._prompt = prompt
        self._how = how
        self._written = 0  # Characters of the text that have been returned.
        self.ids: list[int] = []
        # The longest beginning of a stop text that the end of a text may be; these characters are returned later.
        self._held = max(map(len, how.stop), default=1) - 1

    def add(self, new: NDArray[np.int64], logprobs: NDArray[np.float32]) -> NextTokens:
        """Append tokens; return the piece, whose tokens end where a stop text ends."""
        how, ids, values = self._how, new.tolist(), logprobs.tolist()
        before = len(self.ids)
        self.ids += ids
        reason, matched = self._ending()
        text = self._text(len(self.ids), is_ended=reason == "stop")
        if how.stop and (found := self._find_stop(text)):
            start, matched = found
            count = self._tokens_until(before, start + len(matched))
            del self.ids[count:]
            ids, values, reason = ids[: count - before], values[: count - before], "stop"
            text = text[: start + len(matched) * how.keep_stop]
        end = len(text)
        if reason is None:
            end -= self._held
            if text.endswith("\ufffd"):  # The next token may complete a character.
                end = min(end, len(text.rstrip("\ufffd")))
        end = max(end, self._written)
        shown, self._written = text[self._written : end], end
        return NextTokens(ids, values, shown, reason, matched)

    def _ending(self) -> tuple[str | None, int | str | None]:
        how, last = self._how, self.ids[-1]
        if last in how.stop_ids:
            return "stop", last
        if last in how.end_ids:
            return "stop", None
        return ("length" if len(self.ids) >= how.max_tokens else None), None

    def _text(self, count: int, *, is_ended: bool = False) -> str:
        """The text of the first `count` tokens, by default without the token that ended the continuation."""
        ids = self.ids[: count - (is_ended and not self._how.keep_stop)]
        return self._target.texts.after(self._prompt, ids, skip_special=self._how.skip_special)

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """The first stop text in a text: where it starts, and the stop text."""
        places = [(at, stop) for stop in self._how.stop if (at := text.find(stop, self._written)) >= 0]
        return min(places, default=None)

    def _tokens_until(self, count: int, length: int) -> int:
        """The least number of tokens, above `count`, whose text has `length` characters."""
        while count < len(self.ids) and len(self._text(count)) < length:
            count += 1
        return count
