"""Checks of settings, with errors that name the setting, its value and the limit; and the number of usable cores."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError

# Control characters and line breaks, as part of a character set in a regular expression.
CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"

_WAIT_POLICY, _THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
# Redis keys contain names as UTF-8, which cannot encode lone surrogates; braces would choose the key's cluster slot.
_NAME = re.compile(rf"[^{{}}{CONTROLS}\ud800-\udfff]{{1,200}}")


def shown(value: object, most: int = 300) -> str:
    """A value for an error message, cut to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # `repr` refuses integers of over 4,300 digits and deeply nested lists.
        return f"<{type(value).__name__}, too long to print>"
    return text if len(text) <= most else text[: most - 3] + "..."


def check_number(
    name: str, value: Any, least: float, most: float | None = None, *, whole: bool = True, note: str = ""
) -> Any:
    """Return a number from `least` to `most` (None: no limit), an integer if `whole`; otherwise raise SettingsError.

    `note` ends the sentence of the error, for example ", or None".
    """
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SettingsError(f"{name}: {shown(value)} must be a {'whole ' * whole}number {limits}{note}")
    return value


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Return an instance of `kind`; for another value raise SettingsError, which says that it must be `what`."""
    if not isinstance(value, kind):
        raise SettingsError(f"{name}: {shown(value)} must be {what}")
    return value


def check_texts(name: str, value: Any) -> None:
    """Refuse a value that is not a list of strings. A single string would be read as a list of its characters."""
    for text in check_kind(name, value, list, "a list of texts"):
        check_kind(name, text, str, "a text")


def check_choice(name: str, value: Any, choices: Collection[str]) -> Any:
    """Return a value that is one of `choices`; raise SettingsError for another value."""
    if value not in choices:
        raise SettingsError(f"{name}: {shown(value)} is not one of {', '.join(choices)}")
    return value


def check_known(given: Iterable[str], known: Iterable[str], what: str = "an option") -> None:
    """Raise SettingsError for the alphabetically first of the `given` names that is not among the `known` names."""
    if unknown := set(given).difference(known):
        raise SettingsError(f"{min(unknown)}: not {what}; there are {', '.join(known)}")


def check_name(name: str, value: Any) -> None:
    """Refuse a name that is empty, longer than 200 characters, or has characters that Redis keys must not contain."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise SettingsError(f"{name}: {shown(value)} must be 1 to 200 characters without braces and control characters")


def option(description: str, default: Any = MISSING, least: float | None = None, most: float | None = None) -> Any:
    """A field of a settings class, with the help text of its command-line option, its default, and a number's limits.

    A default that is a list is copied for each instance.
    """
    metadata = {"help": description, "least": least, "most": most}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_numbers(settings: Any) -> None:
    """Refuse numbers outside the limits of their fields in a settings class. A field's default None is always valid.

    A field whose default is a whole number, or None, accepts whole numbers only.

    Raises:
        SettingsError: a number is invalid; the text begins with the name of the setting.
    """
    for each in fields(settings):
        value, least = getattr(settings, each.name), each.metadata.get("least")
        if least is not None and not (value is None and each.default is None):
            check_number(each.name, value, least, each.metadata["most"], whole=not isinstance(each.default, float))


def count_cores() -> int:
    """The number of cores that this process may use, by its CPU affinity and by its container's limit of CPU time."""
    allowed, limit = _affinity(), cpu_limit()
    return allowed if limit is None else max(1, min(allowed, math.ceil(limit)))


def count_threads() -> int:
    """The number of threads that compute concurrently: one per core, or OMP_NUM_THREADS if that is lower."""
    given = os.environ.get(_THREADS, "").split(",")[0].strip()
    return min(count_cores(), int(given)) if given.isdecimal() and int(given) else count_cores()


def set_openmp_defaults() -> None:
    """Make waiting OpenMP threads sleep, and start at most one OpenMP thread per usable core.

    Threads that spin take CPU time from other processes on their cores. OpenMP respects a process's affinity, but not
    the CPU limit of its container. Variables that are already set stay unchanged. Call this function before importing
    a library that uses OpenMP: it reads the variables when it is loaded. Child processes inherit the variables.
    """
    os.environ.setdefault(_WAIT_POLICY, "PASSIVE")
    if (cores := count_cores()) < _affinity():
        os.environ.setdefault(_THREADS, str(cores))


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The number of cores that this process's control groups allow (set by `docker run --cpus`); None for no limit."""
    limits: list[float] = []
    with suppress(OSError):  # Only Linux has the files of control groups.
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            group = mount / path.lstrip("/")  # In a container, its own group's files are in the mount itself.
            while group.is_relative_to(mount):
                with suppress(OSError, ValueError):  # The file does not exist, or contains "max" instead of a number.
                    quota, period = (int(word) for name in names for word in (group / name).read_text().split())
                    if quota > 0 and period > 0:
                        limits.append(quota / period)
                group = group.parent
    return min(limits, default=None)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
