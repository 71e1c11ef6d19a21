"""Command-line options made from settings classes, so that each setting is named and described once."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lmpool.errors import SettingsError

T = TypeVar("T")


def option_parameters(classes: dict[str, type], leave_out: set[str]) -> list[inspect.Parameter]:
    """Parameters of a typer command for the fields of settings classes.

    Args:
        classes: label shown in the help -> settings class. A field that several have becomes one option.
        leave_out: fields that are no options.

    Returns:
        keyword-only parameters whose default None means "not given".
    """
    found: dict[str, inspect.Parameter] = {}
    for label, kind in classes.items():
        hints, texts = get_type_hints(kind), _attribute_texts(kind)
        for field in fields(kind):
            if field.name in found or field.name in leave_out:
                continue
            # Not `in (None, "", False)`: 0 equals False, and a zero is worth telling.
            untold = field.default is False or field.default in (None, "")
            default = "" if untold else f" (default: {field.default})"
            option = typer.Option(
                help=f"{texts[field.name]}{default}", show_default=False, rich_help_panel=f"Options: {label}"
            )
            hint = hints[field.name]
            found[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hint if hint is bool else hint | None, option],
            )
    return list(found.values())


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
    """The descriptions in the "Attributes:" section of a class's docstring."""
    section = re.split(r"\n\s*(?:Raises|Returns|Args):", (inspect.getdoc(kind) or "").partition("Attributes:")[2])[0]
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, texts[match[1]] = match[1], match[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}
