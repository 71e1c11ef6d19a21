"""From lines to texts: token ids within the model's limits, and the positions that are asked about; or why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmpool.batch.kinds import Ids, Kind, Text
from lmpool.batch.lines import Fields, Line
from lmpool.errors import InvalidPrompt
from lmpool.producer.tokenizer import Tokenizer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.model_info import ModelInfo


class Failed(NamedTuple):
    """A line that has no answer: its number, its custom id, and why."""

    line: int
    custom_id: str | None
    reason: str


class Preparer:
    """Makes texts of lines; in a thread, for tokenizing takes its time.

    Args:
        kind: what is asked.
        start: the first position; a negative one counts from the end of each text.
        info: the model's.
        find_tokenizer: the model's tokenizer; asked for with the first text.
        is_duplicate: whether the custom id of a line has come before.
    """

    def __init__(
        self,
        kind: Kind,
        start: int,
        info: ModelInfo,
        find_tokenizer: Callable[[], Tokenizer],
        is_duplicate: Callable[[int], bool],
    ) -> None:
        self._kind = kind
        self._start = start
        self._info = info
        self._find_tokenizer = find_tokenizer
        self._is_duplicate = is_duplicate
        self._tokenizer: Tokenizer | None = None

    def prepare(self, line: Line) -> Text | Failed:
        """What is to be asked about a line, or why nothing can be.

        Raises:
            SettingsError: it is text, and the model's tokenizer cannot be loaded here.
        """
        fields = line.fields
        if fields is None:
            return Failed(line.number, line.custom_id, line.reason)
        custom_id = None if fields.custom_id is None else str(fields.custom_id)
        if self._is_duplicate(line.number):
            return Failed(line.number, custom_id, "its custom_id has come before: each line needs one of its own")
        try:
            ids, start = self._ids(fields)
            info = self._info
            encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
            return Text(line.number, custom_id, ids, self._span(len(ids), start))
        except InvalidPrompt as error:
            return Failed(line.number, custom_id, str(error))

    def _ids(self, fields: Fields) -> tuple[Ids, int]:
        """The token ids, and from where on they are asked about."""
        body = fields.body
        given: dict[str, str | Ids | None] = {
            "text": fields.text,
            "ids": fields.ids,
            "prompt": fields.prompt,
            "body.prompt": None if body is None else body.prompt,
            "body.input": None if body is None else body.input,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            there = f"it has {' and '.join(named)}" if named else "it has none of them"
            raise InvalidPrompt(f"a line needs one of {', '.join(given)}: {there}")
        prompt = given[named[0]]
        assert prompt is not None
        ids = self._encoded(prompt)
        if fields.continuation is None:
            return ids, self._start
        if not self._kind.has_continuations or named != ["prompt"]:
            raise InvalidPrompt("continuation: only --what scores reads it, beside a prompt")
        continued = self._encoded(fields.continuation, is_continuation=True)
        for name, some in (("prompt", ids), ("continuation", continued)):
            if not some:
                raise InvalidPrompt(f"the {name} is empty: scores are of tokens that have one before them")
        return ids + continued, len(ids)

    def _encoded(self, text: str | Ids, *, is_continuation: bool = False) -> Ids:
        if isinstance(text, list):
            return text
        if self._tokenizer is None:
            self._tokenizer = self._find_tokenizer()
        try:
            # What a tokenizer puts before a text is not to stand in the middle of one.
            return self._tokenizer.encode(text, add_special_tokens=not is_continuation)
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the text cannot be encoded: {error}") from error

    def _span(self, length: int, start: int) -> range:
        if start >= length:
            raise InvalidPrompt(f"start {start} is beyond the text, which has {length} tokens")
        span = self._kind.span(length, start)
        if not span:
            raise InvalidPrompt(f"a text of {length} token has nothing to score: the first has none before it")
        return span
