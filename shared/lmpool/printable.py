"""Text that somebody else may have written, fit to be printed: no terminal obeys it, and no line of a log is forged."""

from __future__ import annotations

import json
import logging
from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""A text with an escape, such as `\x1b` or `\u202e`, for each character that is not seen.

    Those are control characters, line breaks, what changes the direction of a text, spaces but for " ", surrogates.

    Args:
        text: any text.
        keep: characters that stay as they are all the same.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def to_json(value: Any, **options: Any) -> str:
    """A value as JSON in ASCII, as `json.dumps` makes it; no control character is left in it."""
    return json.dumps(value, **options).replace("\x7f", r"\u007f")


class LogFormatter(logging.Formatter):
    """Formats entries whose first line alone begins at the margin: no text in one passes for an entry of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry, with its traceback if it has one."""
        return printable(super().format(record), keep="\n").replace("\n", "\n  ")
