"""Command-line options made from settings classes, so that each setting is named and described once."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lmpool.errors import SettingsError

T = TypeVar("T")


def option_parameters(classes: dict[str, type], leave_out: set[str]) -> list[inspect.Parameter]:
    """Parameters of a typer command for the fields of settings classes.

    Args:
        classes: label shown in the help -> settings class. A field that several have becomes one option, which
            the first of them describes.
        leave_out: fields that are no options.

    Returns:
        keyword-only parameters whose default None means "not given".
    """
    owners: dict[str, list[str]] = {}
    for label, kind in classes.items():
        for field in fields(kind):
            if field.name not in leave_out:
                owners.setdefault(field.name, []).append(label)
    return [_parameter(name, {label: classes[label] for label in labels}) for name, labels in owners.items()]


def _parameter(name: str, owners: dict[str, type]) -> inspect.Parameter:
    """The option for one field of the classes that have it."""
    first = next(iter(owners.values()))
    hint = get_type_hints(first)[name]
    option = typer.Option(
        help=f"{_attribute_texts(first)[name]}{_told_defaults(name, owners)}",
        show_default=False,
        rich_help_panel=f"Options: {', '.join(owners)}",
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint if hint is bool else hint | None, option],
    )


def _told_defaults(name: str, owners: dict[str, type]) -> str:
    """The defaults that are worth telling, with their owners where these differ."""
    told: dict[Any, list[str]] = {}
    for label, kind in owners.items():
        default = next(field.default for field in fields(kind) if field.name == name)
        # Not `in (None, "", False)`: 0 equals False, and a zero is worth telling.
        if default is not False and default not in (None, "", MISSING):
            told.setdefault(default, []).append(label)
    if not told:
        return ""
    if len(told) == 1 and len(next(iter(told.values()))) == len(owners):
        return f" (default: {next(iter(told))})"
    texts = [f"{value} for {', '.join(labels)}" for value, labels in told.items()]
    return f" (default: {'; '.join(texts)})"


def build(kind: type[T], given: dict[str, Any], where: str) -> T:
    """Make settings from the options that were given.

    Raises:
        SettingsError: an option is not a setting of this class, or its value is malformed.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise SettingsError(f"{name}: not a setting of {where}")
    return kind(**given)


def _attribute_texts(kind: type) -> dict[str, str]:
    """The descriptions in the "Attributes:" sections of the docstrings of a class and of those it inherits from."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        section = inspect.cleandoc(owner.__dict__.get("__doc__") or "").partition("Attributes:")[2]
        name = ""
        for line in re.split(r"\n\s*(?:Raises|Returns|Args):", section)[0].splitlines():
            if match := re.match(r" {4}(\w+): (.*)", line):
                name, texts[match[1]] = match[1], match[2]
            elif name and line.strip():
                texts[name] += " " + line.strip()
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}
