"""Settings: checks whose errors name the field, the value and what would be right; and how many cores there are."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError

CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
"""Control characters and line breaks, for a set of characters in a regular expression."""

_WAIT_POLICY, _THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
# Redis keys carry names as UTF-8, which lone surrogates have none of, and braces would decide their cluster slot.
_NAME = re.compile(rf"[^{{}}{CONTROLS}\ud800-\udfff]{{1,200}}")


def shown(value: object, most: int = 300) -> str:
    """A value for an error message, cut to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An integer of over 4,300 digits, or lists in lists without end.
        return f"<{type(value).__name__}, too long to print>"
    return text if len(text) <= most else text[: most - 3] + "..."


def check_number(name: str, value: Any, least: float, most: float | None = None, *, whole: bool = True) -> None:
    """Refuse a value that is not a number from `least` to `most`, a whole one unless `whole` is off.

    Raises:
        SettingsError: with the field's name.
    """
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right_type or not least <= value or (most is not None and value > most):
        upper = f" and at most {most:g}" if most is not None else ""
        kind = "a whole number" if whole else "a number"
        raise SettingsError(f"{name}: {shown(value)} must be {kind} of at least {least:g}{upper}")


def check_texts(name: str, value: Any) -> None:
    """Refuse a value that is not a list of texts; a single text would be read letter by letter.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SettingsError(f"{name}: {shown(value)} is not a list of texts")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        SettingsError: with the field's name.
    """
    if value not in choices:
        raise SettingsError(f"{name}: {shown(value)} is not one of {', '.join(choices)}")


def check_name(name: str, value: Any) -> None:
    """Refuse a name that is empty, too long, no UTF-8, with control characters, or that Redis keys cannot carry.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise SettingsError(
            f"{name}: {shown(value)} must be 1 to 200 characters of UTF-8 without braces and control characters"
        )


def count_cores() -> int:
    """Cores that this process may run on: those of its affinity, or fewer where its container may use less time."""
    allowed, limit = _affinity(), cpu_limit()
    return allowed if limit is None else max(1, min(allowed, math.ceil(limit)))


def count_threads() -> int:
    """Threads that compute at once: one for each core, or fewer where OMP_NUM_THREADS says so."""
    given = os.environ.get(_THREADS, "").split(",")[0].strip()
    return min(count_cores(), int(given)) if given.isdecimal() and int(given) else count_cores()


def set_openmp_defaults() -> None:
    """Have OpenMP threads sleep while they wait, and be no more than there are cores for.

    Threads that spin take the time of whoever else is on their cores. OpenMP knows a process's affinity, and nothing of
    the limit of its container. Both are defaults: what the environment says stays. It is read when a library of OpenMP
    is loaded, torch's or another's, so this comes first; what this process starts has it from here.
    """
    os.environ.setdefault(_WAIT_POLICY, "PASSIVE")
    if (cores := count_cores()) < _affinity():
        os.environ.setdefault(_THREADS, str(cores))


def cpu_limit(root: Path = Path("/")) -> float | None:
    """How many cores' time the control groups of this process allow, as a container's `--cpus` says; None for any.

    Args:
        root: where /proc and /sys are.
    """
    limits: list[float] = []
    with suppress(OSError):  # Not on Linux.
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # The group's files are under its path, or, as a container sees them, above it.
            if not controllers:
                limits += _quotas(root / "sys/fs/cgroup", path, "cpu.max")
            elif "cpu" in controllers.split(","):
                limits += _quotas(root / "sys/fs/cgroup/cpu", path, "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min(limits, default=None)


def _quotas(mount: Path, path: str, *names: str) -> Iterator[float]:
    """The limits of a group and of those above it, each the time of a period that the files of these names tell."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        with suppress(OSError, ValueError):  # No such file, or "max" instead of a number.
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            if quota > 0 and period > 0:
                yield quota / period
        group = group.parent


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
