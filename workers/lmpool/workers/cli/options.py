"""Command-line options made from settings classes, so that each setting is named and described once.

What a field's metadata has under "help" describes it; a field without is an option without a description.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lmpool.errors import SettingsError

T = TypeVar("T")


def option_parameters(classes: dict[str, type], leave_out: set[str]) -> list[inspect.Parameter]:
    """Parameters of a typer command for the fields of settings classes.

    Args:
        classes: label shown in the help -> settings class. A field that several have becomes one option, which
            the first of them describes that has a description.
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
    hint = _hints(next(iter(owners.values())))[name]
    described = (_field(kind, name).metadata.get("help", "") for kind in owners.values())
    option = typer.Option(
        help=f"{next(filter(None, described), '')}{_told_defaults(name, owners)}".strip(),
        show_default=False,
        rich_help_panel=f"Options: {', '.join(owners)}",
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint if hint is bool else hint | None, option],
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    # All hints of a class are evaluated together, and it has dozens of fields.
    return get_type_hints(kind)


def _field(kind: type, name: str) -> Field[Any]:
    return next(field for field in fields(kind) if field.name == name)


def _told_defaults(name: str, owners: dict[str, type]) -> str:
    """The defaults that are worth telling, with their owners where these differ."""
    told: dict[Any, list[str]] = {}
    for label, kind in owners.items():
        default = _field(kind, name).default
        # Not `in (None, "", False)`: 0 equals False, and a zero is worth telling.
        if default is not False and default not in (None, "", MISSING):
            told.setdefault(default, []).append(label)
    if not told:
        return ""
    if len(told) == 1 and len(next(iter(told.values()))) == len(owners):
        return f" (default: {next(iter(told))})"
    texts = [f"{value} for {', '.join(labels)}" for value, labels in told.items()]
    return f" (default: {'; '.join(texts)})"


def check_options(label: str, kind: type, taken: Collection[str]) -> None:
    """See that a settings class can be options of a command.

    Args:
        label: shown in the help.
        kind: the class.
        taken: options that the command has already.

    Raises:
        SettingsError: a field has the name of one of these.
        TypeError, NameError, RuntimeError: it is no dataclass, or a field's type cannot be read or is no type of an
            option.
    """
    options = option_parameters({label: kind}, set())
    for option in options:
        if option.name in taken:
            raise SettingsError(f"{option.name}: the command has an option of this name; call the field otherwise")

    def command(**given: Any) -> None: ...

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app)


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
