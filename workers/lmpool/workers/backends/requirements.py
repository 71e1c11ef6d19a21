"""What a backend needs installed, and exceptions of other packages in one line."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from lmpool.errors import SettingsError

_MOST_SHOWN = 300


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
            found = version(name)
        except PackageNotFoundError:
            continue
        if not least <= _numbers(found) < below:
            raise SettingsError(
                f"{field}: {name} {found} is installed; this backend is made for {name} >= {_dotted(least)}, "
                f"< {_dotted(below)}: pip install '{name}>={_dotted(least)},<{_dotted(below)}'"
            )
        return found
    raise SettingsError(f"{field}: needs {' or '.join(distributions)}, and none is installed")


def first_line(error: BaseException) -> str:
    """An exception's message, short enough for a log line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"KeyError: {text}"  # Its message is the key alone.
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
