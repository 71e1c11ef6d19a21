"""How the options of settings classes are written: vLLM's names for them, sizes such as 128k, and the short help."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from lmpool.cli import say
from lmpool.settings import shown

ALIASES = {
    "name": ("--served-model-name",),
    "max_prompt_tokens": ("--max-model-len",),
    "max_batch": ("--max-num-seqs",),
    "max_batch_tokens": ("--max-num-batched-tokens",),
}
"""Setting -> what vLLM calls it."""

SHORT = {
    "name", "dtype", "device", "max_prompt_tokens", "max_batch", "kv_cache_bytes", "adapters", "metrics_port",
    "trie_mb",
}  # fmt: skip
"""The settings that `--help` shows; `--help-all` shows the others too."""

_SIZED = ("_bytes", "_tokens", "_size")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB]|i)?")
_POWERS = "kmgt"


def is_size(name: str, hint: Any) -> bool:
    """Whether a setting is a number of bytes or tokens."""
    return name.endswith(_SIZED) and hint in (int, int | None)


def parse_size(text: str | int) -> int:
    """A number of bytes or tokens as people write it: 4096, 128k, 8g; 8K, 8Ki and 8KiB are of 1,024 each.

    Raises:
        BadParameter: it is none.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        if re.fullmatch(r"-\d+", str(text).strip()):
            return int(text)  # The setting says which numbers it takes.
        raise typer.BadParameter(f"{shown(text)} is no size: write 4096, 128k, 8g, or 8GiB")
    number, unit, suffix = match[1], match[2], match[3] or ""
    base = 1024 if suffix[:1] == "i" or (unit.isupper() and not suffix) else 1000
    value = float(number) * base ** (1 + _POWERS.index(unit.lower()) if unit else 0)
    if value != int(value):
        raise typer.BadParameter(f"{shown(text)} is no whole number")
    return int(value)


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        say_help(context)
        raise typer.Exit


def say_help(context: typer.Context) -> None:
    """Print a command's help."""
    if text := context.get_help():  # With rich it is printed already.
        say(text)


HelpAll = Annotated[
    bool, typer.Option("--help-all", help="Show all options and exit.", callback=_show_all, is_eager=True)
]
