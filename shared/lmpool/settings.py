"""Checks of settings: each failure names the field, the value and what would be right."""

from __future__ import annotations

import re
from typing import Any

from lmpool.errors import SettingsError

CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
"""Control characters and line breaks, for a set of characters in a regular expression."""

# Redis keys carry names as UTF-8, which lone surrogates have none of, and braces would decide their cluster slot.
_NAME = re.compile(rf"[^{{}}{CONTROLS}\ud800-\udfff]{{1,200}}")


def shown(value: object, most: int = 300) -> str:
    """A value for an error message, cut to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An integer of over 4,300 digits, or lists in lists without end.
        return f"<{type(value).__name__}, too long to print>"
    return text if len(text) <= most else text[: most - 3] + "..."


def check_number(name: str, value: Any, least: float, most: float | None = None, *, whole: bool = True) -> None:
    """Refuse a value that is not a number from `least` to `most`, a whole one unless `whole` is off.

    Raises:
        SettingsError: with the field's name.
    """
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right_type or not least <= value or (most is not None and value > most):
        upper = f" and at most {most:g}" if most is not None else ""
        kind = "a whole number" if whole else "a number"
        raise SettingsError(f"{name}: {shown(value)} must be {kind} of at least {least:g}{upper}")


def check_texts(name: str, value: Any) -> None:
    """Refuse a value that is not a list of texts; a single text would be read letter by letter.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SettingsError(f"{name}: {shown(value)} is not a list of texts")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        SettingsError: with the field's name.
    """
    if value not in choices:
        raise SettingsError(f"{name}: {shown(value)} is not one of {', '.join(choices)}")


def check_name(name: str, value: Any) -> None:
    """Refuse a name that is empty, too long, no UTF-8, with control characters, or that Redis keys cannot carry.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise SettingsError(
            f"{name}: {shown(value)} must be 1 to 200 characters of UTF-8 without braces and control characters"
        )
