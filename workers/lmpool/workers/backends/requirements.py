"""What a backend needs of the machine: packages in versions that suit, and plugins that may load."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from lmpool.errors import SettingsError

_MAX_SHOWN = 300
_log = logging.getLogger(__name__)


def require(field: str, extra: str, *packages: str) -> None:
    """Refuse a setting whose packages are not installed; nothing is imported.

    Raises:
        SettingsError: with the packages that are missing and how to install them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SettingsError(f'{field}: needs {" and ".join(missing)}; install them with: pip install "{extra}"')


def require_version(field: str, distributions: tuple[str, ...], least: tuple[int, ...], below: tuple[int, ...]) -> str:
    """The version of an installed engine, which must lie in the range that a backend was made for.

    Args:
        field: the setting that asks for it.
        distributions: names under which the engine is published; the first that is installed counts.
        least: the first version that will do.
        below: the first that will not.

    Raises:
        SettingsError: another version, or none.
    """
    for name in distributions:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not least <= _version_numbers(installed) < below:
            raise SettingsError(
                f"{field}: {name} {installed} is installed; this backend is made for {name} >= {_dotted(least)}, "
                f"< {_dotted(below)}: pip install '{name}>={_dotted(least)},<{_dotted(below)}'"
            )
        return installed
    raise SettingsError(f"{field}: needs {' or '.join(distributions)}, and none is installed")


def named_plugins(field: str, group: str, named: Sequence[str]) -> list[str]:
    """The plugins of a group that change rows, each of which must have been named.

    Args:
        field: the setting that names them.
        group: of entry points, all of which the engine loads.
        named: the names that are allowed.

    Returns:
        what identifies each, with its distribution and version, in the order in which the engine loads them.

    Raises:
        SettingsError: one is installed that was not named, or one was named that is not installed.
    """
    entries = list(entry_points(group=group))
    option = f"--{field.replace('_', '-')}"
    for entry in entries:
        if entry.name not in named:
            raise SettingsError(
                f"{field}: {_described(entry)} is installed, and the engine would let it change rows: uninstall it, or "
                f"name it with {option} {entry.name}, which makes it part of the model's fingerprint"
            )
    if missing := [name for name in named if name not in {entry.name for entry in entries}]:
        raise SettingsError(f"{field}: no entry point {missing[0]!r} of {group} is installed")
    return [_described(entry) for entry in entries]


def other_plugins(group: str, distributions: Collection[str], chosen: Collection[str] | None) -> list[str]:
    """The plugins of a group that the engine runs when it starts, which may change anything; the log tells them.

    Args:
        group: of entry points.
        distributions: those whose plugins are the engine's own.
        chosen: names of those that the engine loads; None for all.

    Returns:
        as `named_plugins`.
    """
    plugins = [
        _described(entry)
        for entry in entry_points(group=group)
        if (chosen is None or entry.name in chosen) and (entry.dist is None or entry.dist.name not in distributions)
    ]
    if plugins:
        _log.warning("plugins of others run inside the engine and are part of the fingerprint: %s", ", ".join(plugins))
    return plugins


def first_line(error: BaseException) -> str:
    """An exception's message, short enough for a log line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"KeyError: {text}"  # Its message is the key alone.
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _version_numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _described(entry: EntryPoint) -> str:
    whose = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}{whose})"
