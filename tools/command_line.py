"""Generates the reference of the command line, a Markdown page, from the installed commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from lmpool import cli


def all_commands() -> Iterator[tuple[str, Any]]:
    """All commands, each as a pair of its words and typer's object, such as ("lmpool dead list", object)."""
    if not cli.app.registered_commands:  # Register the commands only once per process.
        cli.add_commands()
    yield from _below("lmpool", typer.main.get_command(cli.app))


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name in sorted(command.commands):
        yield from _below(f"{words} {name}", command.commands[name])


def options_of(command: Any) -> list[Any]:
    """The options of a command, including options that only `--help-all` shows."""
    return [param for param in command.params if param.opts[0].startswith("-")]


def page() -> str:
    """The page: a section per command, then the options that several commands share.

    `lmpool up` and `lmpool worker` share panels of options in their help. The page lists each panel once, at the end of
    the page, and the commands link to the panels.
    """
    shared: dict[str, list[str]] = {}
    parts = []
    for words, command in all_commands():
        arguments = [param for param in command.params if not param.opts[0].startswith("-")]
        shown = [param.metavar or param.name.upper() for param in arguments]
        usage = " ".join([words, "[OPTIONS]", *shown])
        parts += [f"## {words}", "", _text(command.help), "", f"```\n{usage}\n```", ""]
        panels: dict[str, list[str]] = {}
        for param in options_of(command):
            panels.setdefault(param.rich_help_panel or "", []).append(_row(_names(param), param))
        rows = [_row(f"`{name}`", param) for name, param in zip(shown, arguments, strict=True)]
        parts += _table(rows + panels.pop("", []))
        for panel, listed in panels.items():
            title = panel.removeprefix("Options: ")
            known = shared.setdefault(title, [])
            known += [row for row in listed if row not in known]
            parts += [f"Also the options of [{title}](#options-of-{_anchor(title)}).", ""]
    for title, rows in shared.items():
        parts += [f"(options-of-{_anchor(title)})=", f"## Options: {title}", "", *_table(rows)]
    return "\n".join(parts)


def _names(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    return names if getattr(param, "is_flag", False) else f"{names} {_kind(param)}"


def _kind(param: Any) -> str:
    kind = param.type_descriptor.annotation
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else _text(str(kind))


def _row(names: str, param: Any) -> str:
    default = param.default
    is_shown = param.show_default and not param.required and default not in (None, "", False, [])
    end = f" (default: {default})" if is_shown else ""
    return f"| {names} | {_text(param.help)}{end} |"


def _table(rows: list[str]) -> list[str]:
    return ["| option | |", "|---|---|", *rows, ""] if rows else []


def _text(text: str | None) -> str:
    """Escape a text for a table cell and format its options as code."""
    escaped = re.sub(r"([|<*])", r"\\\1", " ".join((text or "").split()))
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"`\1`", escaped)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())
