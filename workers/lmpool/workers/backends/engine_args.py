"""Options of an engine that are handed on to it: `key=value`, or a TOML file."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lmpool.checks import shown
from lmpool.errors import SettingsError


def parse_engine_args(given: Sequence[str]) -> dict[str, Any]:
    """Read engine options.

    Args:
        given: texts of `key=value` pairs divided by spaces, or paths of TOML files (`….toml`). A value is read as
            TOML (`true`, `0.9`, `[1, 2]`, `{a = 1}`) and, where it is none, as text. Later ones win.

    Raises:
        SettingsError: a text is not of this form, or a file cannot be read.
    """
    found: dict[str, Any] = {}
    for text in given:
        if text.endswith(".toml") and "=" not in text:
            found.update(_read_file(text))
            continue
        try:
            pairs = shlex.split(text)
        except ValueError as error:
            raise SettingsError(f"engine_args: {shown(text)} cannot be read: {error}") from error
        for pair in pairs:
            name, equals, value = pair.partition("=")
            name = name.lstrip("-").replace("-", "_")
            if not equals or not name.isidentifier():
                raise SettingsError(f"engine_args: {shown(pair)} is not key=value, nor a TOML file (….toml)")
            found[name] = _value(value)
    return found


def check_engine_args(given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str], where: str) -> None:
    """Refuse options that the engine does not have, and those that this backend must set itself.

    Args:
        given: option -> value.
        known: the engine's options.
        refused: option -> what to do instead.
        where: the engine with its version.

    Raises:
        SettingsError: with the option and what it might be meant to be.
    """
    for name in given:
        if name in refused:
            raise SettingsError(f"engine_args: {name} cannot be set here: {refused[name]}")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            raise SettingsError(f"engine_args: {where} has no option {name!r}{hint}")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"engine_args: {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"engine_args: {path} is not TOML: {error}") from error
