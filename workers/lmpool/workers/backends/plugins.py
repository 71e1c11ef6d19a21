"""What others have installed that an engine loads by itself, found without importing it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoint, entry_points

from lmpool.errors import SettingsError

_logger = logging.getLogger(__name__)


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
    found = list(entry_points(group=group))
    option = f"--{field.replace('_', '-')}"
    for entry in found:
        if entry.name not in named:
            raise SettingsError(
                f"{field}: {_described(entry)} is installed, and the engine would let it change rows: uninstall it, or "
                f"name it with {option} {entry.name}, which makes it part of the model's fingerprint"
            )
    if missing := [name for name in named if name not in {entry.name for entry in found}]:
        raise SettingsError(f"{field}: no entry point {missing[0]!r} of {group} is installed")
    return [_described(entry) for entry in found]


def other_plugins(group: str, own: Collection[str], chosen: Collection[str] | None) -> list[str]:
    """The plugins of a group that the engine runs when it starts, which may change anything; the log tells them.

    Args:
        group: of entry points.
        own: distributions whose plugins are the engine's own.
        chosen: names of those that the engine loads; None for all.

    Returns:
        as `named_plugins`.
    """
    found = [
        _described(entry)
        for entry in entry_points(group=group)
        if (chosen is None or entry.name in chosen) and (entry.dist is None or entry.dist.name not in own)
    ]
    if found:
        _logger.warning("plugins of others run inside the engine and are part of the fingerprint: %s", ", ".join(found))
    return found


def _described(entry: EntryPoint) -> str:
    whose = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}{whose})"
