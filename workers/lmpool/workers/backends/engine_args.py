"""Options of an engine that are handed on to it: `key=value`, or a TOML file."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError
from lmpool.settings import shown

_WORDS = {"True": True, "False": False, "None": None}

ONE_PROCESS = "rows are captured inside the worker's process; start one worker a device instead"
"""Why a model cannot be spread over processes."""


def parse_engine_args(given: Sequence[str]) -> dict[str, Any]:
    """Read engine options.

    Args:
        given: texts of `key=value` pairs and paths of TOML files (`….toml`), divided by spaces. A value is read as
            TOML (`true`, `0.9`, `[1, 2]`, `{a = 1}`), else as JSON (`{"a": 1}`), else as text. Later ones win.

    Raises:
        SettingsError: a text is not of this form, or a file cannot be read.
    """
    found: dict[str, Any] = {}
    for text in given:
        for part in [text] if _is_file(text) else _parts(text):
            if _is_file(part):
                found.update({_name(name): value for name, value in _read_file(part).items()})
                continue
            name, equals, value = part.partition("=")
            if not equals or not _name(name).isidentifier():
                raise SettingsError(f"engine_args: {shown(part)} is not key=value, nor a TOML file (….toml)")
            found[_name(name)] = _value(value)
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


def _parts(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"engine_args: {shown(text)} cannot be read: {error}") from error


def _is_file(part: str) -> bool:
    return part.endswith(".toml") and "=" not in part


def _name(text: str) -> str:
    return text.lstrip("-").replace("-", "_")


def check_one_process(given: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse options that spread a model over processes.

    Args:
        given: option -> value.
        names: the options that say over how many.

    Raises:
        SettingsError: one of them is not 1.
    """
    for name in names:
        if given.get(name, 1) != 1:
            raise SettingsError(f"engine_args: {name} must be 1, not {shown(given[name])}: {ONE_PROCESS}")


def _value(text: str) -> Any:
    try:
        # In a table of its own a value cannot be followed by a comment or by other keys.
        table = tomllib.loads(f"value = {{value = {text}}}")["value"]
        if len(table) == 1 and not isinstance(table["value"], (date, time)):  # No option is a date; versions are.
            return table["value"]
    except (ValueError, RecursionError):  # Not only TOMLDecodeError: integers have at most 4,300 digits.
        pass
    try:
        return json.loads(text) if text.startswith(("{", "[")) else _WORDS.get(text, text)
    except (ValueError, RecursionError):
        return text


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, RuntimeError) as error:  # RuntimeError: ~somebody who is not known here.
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"engine_args: {path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"engine_args: {path} is not TOML: {error}") from error
