"""A worker's log: lines for people, or one JSON object a line for machines; no line twenty times a second."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Protocol

from lmpool.errors import SettingsError
from lmpool.printable import LogFormatter, to_json

_PAUSE_S = 5.0
_MOST_KINDS = 1000


_DIGITS = re.compile(r"\d+")


class LogFormat(Protocol):
    """Where what all lines tell is kept: the fields of `static_fields` are added to each."""

    static_fields: dict[str, object]


def start_log(log_format: str, model: str) -> LogFormat | None:
    """Have this process log to standard error.

    Args:
        log_format: "text" or "json".
        model: what the worker serves.

    Returns:
        for JSON, what the worker's id is to be added to.

    Raises:
        SettingsError: JSON is wanted, and python-json-logger is not installed.
    """
    logging.getLogger("lmpool.worker").addFilter(Repeats())
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "text":
        handler.setFormatter(LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        return None
    try:
        from pythonjsonlogger.json import JsonFormatter
    except ImportError as error:
        raise SettingsError(
            "log_format: json needs the package python-json-logger: pip install 'lmpool[worker]'"
        ) from error
    formatter = JsonFormatter(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"model": model},
        timestamp="time",
        json_serializer=to_json,
    )
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # What libraries warn of would otherwise be lines that are no JSON.
    logging.captureWarnings(True)
    return formatter


class Repeats(logging.Filter):
    """Lets a warning through when it is the first of its kind for some seconds, and then with how many were left out.

    Of one kind are those with the same text before its values are put in, and the same texts and errors among these:
    the parts of a worker that wait for the same server say the same, about two adapters they do not.

    Args:
        pause_s: seconds between two of a kind.
    """

    def __init__(self, pause_s: float = _PAUSE_S) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._shown_at: dict[object, float] = {}
        self._left_out: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; says in it how many were not."""
        if record.levelno != logging.WARNING:
            return True
        values = record.args if isinstance(record.args, tuple) else ()
        kind = (record.msg, *map(_kind, values))
        now = time.monotonic()
        if now - self._shown_at.get(kind, -self._pause_s) < self._pause_s:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        if len(self._shown_at) >= _MOST_KINDS:
            self._shown_at.clear()
            self._left_out.clear()
        self._shown_at[kind] = now
        if count := self._left_out.pop(kind, 0):
            record.msg, record.args = f"{record.msg} (%d more like this were not shown)", (*values, count)
        return True


def _kind(value: object) -> str:
    """What of a value tells one kind from another: of an error its words, for its numbers change."""
    return _DIGITS.sub("", str(value)) if isinstance(value, Exception) else value if isinstance(value, str) else ""
