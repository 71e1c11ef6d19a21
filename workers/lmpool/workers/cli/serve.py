"""Runs a worker as a process: sets up its event loop, signal handlers, memory allocator and log."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from lmpool.broker.server import Server
from lmpool.cli import INTERRUPTED, report_ready, say
from lmpool.errors import AuthenticationFailed, LMPoolError, LogFormatter, ServerUnreachable, SettingsError, to_json
from lmpool.metrics import is_traced
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.backends.settings import require
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.execution.watchdogs import watching_process
from lmpool.workers.metrics.counters import monitoring
from lmpool.workers.metrics.tracing import exporting
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker

# Name of the environment variable with the prefix of each log line, for workers that share a log.
LABEL_VARIABLE = "LMPOOL_LOG_LABEL"
_log = logging.getLogger("lmpool.worker")

_PLAIN = (SettingsError, ServerUnreachable, AuthenticationFailed)  # Errors that need no traceback.
_FAILED = 2  # Exit code after an error, and after the backend hangs.
_SWITCH_INTERVAL_S = 0.0005  # Seconds between thread switches: a step can take less than Python's default of 5 ms.
_REPEAT_S = 5.0  # Seconds between two log lines of one kind of warning: often enough to show that a problem persists.
_MAX_KINDS = 1000  # Max kinds of warnings that the filter remembers, because clients can cause new kinds.
_DIGITS = re.compile(r"\d+")
# Parameters of mallopt, from <malloc.h>, and their values: no mmap for rows, no trimming, 64 MiB per growth.
_MALLOPT = ((-4, 0), (-1, 2**31 - 1), (-2, 64 * 1024 * 1024))


def serve(server: Server, backend: BackendSettings, settings: WorkerSettings) -> None:
    """Run one worker in this process until SIGTERM, Ctrl-C or SIGHUP; a second signal stops it at once.

    SIGUSR1 makes the worker claim the jobs of crashed workers at once. If the backend hangs, the process ends with code
    2, or with `watchdogs.EXIT_CODE` if the backend holds the interpreter lock.

    Raises:
        SystemExit: `Worker.run` failed and the log is JSON: the error is only in the log.
        LMPoolError: `Worker.run` failed and the log is text.
    """
    log = start_log(settings.log_format, backend.served_as)
    # Until the event loop runs, end the process at once: a KeyboardInterrupt would wait for a loading backend.
    for number in _signals():
        signal.signal(number, _exit_now)
    # Make glibc keep the freed memory of rows: mapping it again costs a page fault per 4 KB of every row.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOPT:
            mallopt(parameter, value)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    new_event_loop: Any = None
    try:
        from uvloop import new_event_loop
    except ImportError:
        _log.warning("uvloop is not installed: rows are stored more slowly")  # uvloop stores 2 to 4 times faster.
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:  # Log the error before the runner ends, because its end waits for threads such as downloads.
            follow: Callable[[Callable[[], None]], bool] = getattr(backend, "follow", lambda _: False)
            if follow(_outlast_signal):  # The worker of this model is on another machine.
                return
            runner.run(_serve(server, backend, settings, log))
        except LMPoolError as error:
            if log is None:
                raise
            _log.critical("%s", error, exc_info=None if isinstance(error, _PLAIN) else error)
            raise SystemExit(_FAILED) from error


async def _serve(server: Server, backend: BackendSettings, settings: WorkerSettings, log: Any) -> None:
    if is_traced(settings.tracing or None):
        settings = replace(settings, tracing=True)
    worker = Worker(server, backend, settings)
    if log is not None:
        log.static_fields["worker"] = worker.worker_id
    is_ready = is_stopping = False

    def on_ready(info: ModelInfo) -> None:
        nonlocal is_ready
        is_ready = True
        if info.is_trie:
            _log.info("serving tries of any vocabulary on %s as worker %s", server, worker.worker_id)
        else:
            _log.info(
                "serving %r (%s, %s, V = %d, up to %d tokens, rows as %s%s) on %s as worker %s",
                info.name, info.backend, info.dtype, info.vocab_size, info.max_prompt_tokens, info.encoding,
                ", with tries" if info.answers_tries else "", server, worker.worker_id,
            )  # fmt: skip
        report_ready(worker.worker_id)

    def on_signal(number: int) -> None:
        nonlocal is_stopping
        if is_stopping and number == signal.SIGHUP:  # A closed terminal can cause two SIGHUP.
            return
        if is_stopping or not is_ready:
            _exit_now()
        is_stopping = True
        worker.stop()

    loop = asyncio.get_running_loop()
    for number in _signals():
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR1, worker.claim_now)
    tracing = exporting(backend.served_as, worker.worker_id) if settings.tracing else contextlib.nullcontext()
    with monitoring(settings, worker.snapshot, worker.health), tracing:
        try:
            await worker.run(on_ready, watching_process(settings.step_timeout_s))
        except LMPoolError as error:
            if not worker.is_hung:
                raise
            say(f"lmpool: {error}", err=True)
        if worker.is_hung:  # Exit at once: an ordinary exit might wait for a lock of the backend's thread.
            logging.shutdown()
            os._exit(_FAILED)
    for number in _signals():  # Let a signal end the process now: a thread, such as a download, may still run.
        loop.add_signal_handler(number, os._exit, 0)
    _log.info("stopped; nothing was left unfinished")


def _signals() -> list[signal.Signals]:
    """The signals that stop a worker: SIGHUP is not among them under `nohup`."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def _outlast_signal() -> None:
    """Have the first signal only log a line: a worker on another machine needs this process until it has stopped."""

    def on_signal(*_: object) -> None:
        _log.info("this process ends with the worker on the other machine; a second signal ends it at once")
        for number in _signals():  # A closed terminal can cause two SIGHUP.
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else _exit_now)

    for number in _signals():
        signal.signal(number, on_signal)


def _exit_now(*_: object) -> NoReturn:
    _log.info("stopped at once")
    os._exit(INTERRUPTED)


def start_log(log_format: str, model: str) -> Any:
    """Make this process log to standard error, as "text" or "json".

    Returns the formatter of JSON, whose `static_fields` are in each line; None for text.
    """
    logging.getLogger("lmpool.worker").addFilter(RepeatFilter())
    handler = logging.StreamHandler(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if log_format == "text":
        label = os.environ.get(LABEL_VARIABLE, "")
        handler.setFormatter(LogFormatter(f"{label}%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        return None
    require("log_format", "lmpool[worker]", "pythonjsonlogger")
    from pythonjsonlogger.json import JsonFormatter

    formatter = JsonFormatter(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"model": model},
        timestamp="time",
        json_serializer=to_json,
    )
    handler.setFormatter(formatter)
    logging.captureWarnings(True)  # Without this call, warnings of libraries would be lines that are not JSON.
    return formatter


class RepeatFilter(logging.Filter):
    """Passes a first warning, and then a repeat at most every `pause_s` seconds, with the number of omitted repeats.

    Two warnings are of one kind if they have the same format string and the same strings and errors as values. So
    warnings of several tasks about the same server are of one kind, and warnings about two adapters are not.
    """

    def __init__(self, pause_s: float = _REPEAT_S) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._seen: dict[object, tuple[float, int]] = {}  # Kind of warning -> time when last logged, and repeats since.

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record; adds the number of omitted repeats to its text."""
        if record.levelno != logging.WARNING:
            return True
        values = record.args if isinstance(record.args, tuple) else ()
        # Ignore numbers in errors, which change between repeats of a warning.
        errors = (_DIGITS.sub("", str(value)) if isinstance(value, Exception) else value for value in values)
        kind, now = (record.msg, *(value if isinstance(value, str) else "" for value in errors)), time.monotonic()
        shown_at, left_out = self._seen.get(kind, (now - self._pause_s, 0))
        if now - shown_at < self._pause_s:
            self._seen[kind] = shown_at, left_out + 1
            return False
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.msg} (%d more like this were not shown)", (*values, left_out)
        return True
