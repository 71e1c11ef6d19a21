"""What commands print. Names and reasons come from a server that others write to: a terminal shows them, no more."""

from __future__ import annotations

import os
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from lmpool.printable import printable, to_json


def say(text: str, *, err: bool = False) -> None:
    """Print one line.

    Args:
        text: what to say.
        err: on standard error.
    """
    typer.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print a value as one line of JSON, in ASCII."""
    typer.echo(to_json(value))


# Wider than any table.
_WHOLE = 1_000_000


class Terminal(Console):
    """Where tables are printed: in their strings rich sees no markup. What is no terminal gets them whole and plain."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)
        # With FORCE_COLOR in its environment rich sees a terminal, whose width COLUMNS tells.
        is_told = self.is_terminal and "COLUMNS" in os.environ
        if not is_told and not self.file.isatty():
            self.width = _WHOLE

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that a string becomes; every string in what is printed comes through here."""
        return super().render_str(printable(text), **options)
