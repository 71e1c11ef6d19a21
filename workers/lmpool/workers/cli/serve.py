"""A worker as a process: event loop, signals, allocator and log."""

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
from typing import NoReturn, Protocol

from lmpool.broker.server import Server
from lmpool.cli import INTERRUPTED, say
from lmpool.errors import AuthenticationFailed, LMPoolError, LogFormatter, ServerUnreachable, SettingsError, to_json
from lmpool.metrics import is_traced
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.cli.detached import tell_ready
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.execution.watchdogs import ProcessWatchdog
from lmpool.workers.metrics.prometheus import monitoring
from lmpool.workers.metrics.tracing import exporting
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker

_log = logging.getLogger("lmpool.worker")

# Their messages say all there is to say.
_PLAIN = (SettingsError, ServerUnreachable, AuthenticationFailed)
_FAILED = 2
_HUNG = 2
_WITHOUT_SERVER = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_PAUSE_S = 5.0
_MAX_KINDS = 1000
_DIGITS = re.compile(r"\d+")


class LogFormat(Protocol):
    """A formatter of log lines that adds the fields of `static_fields` to each."""

    static_fields: dict[str, object]


def serve(
    server: Server,
    backend: BackendSettings,
    settings: WorkerSettings,
    before_exit: Callable[[], object] = lambda: None,
) -> None:
    """Run one worker in this process until SIGTERM, Ctrl-C or SIGHUP; a second signal stops it at once.

    Args:
        server: the pool's Redis.
        backend: what the backend is told.
        settings: see `WorkerSettings`.
        before_exit: called before the process is ended at once.

    Raises:
        SystemExit: what `Worker.run` raises, where the log is for machines: it is there, and nowhere else.
        As `Worker.run`. When the backend hangs the process ends here instead, with exit code 2; when it holds the
        interpreter lock, with `engine_thread.EXIT_CODE`.
    """
    log = start_log(settings.log_format, backend.served_as)
    _exit_on_signals(before_exit)
    keep_freed_memory()
    # The backend's thread and the event loop hand over many times per batch; the default of 5 ms is a batch.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(_serve(server, backend, settings, before_exit, log))
        except LMPoolError as error:
            if log is None:
                raise
            _log.critical("%s", error, exc_info=None if isinstance(error, _PLAIN) else error)
            raise SystemExit(_FAILED) from error


async def _serve(
    server: Server,
    backend: BackendSettings,
    settings: WorkerSettings,
    before_exit: Callable[[], object],
    log: LogFormat | None,
) -> None:
    if is_traced(settings.tracing or None):
        settings = replace(settings, tracing=True)
    worker = Worker(server, backend, settings)
    if log is not None:
        log.static_fields["worker"] = worker.worker_id
    is_ready = is_stopping = is_finished = False

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
        tell_ready()

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping or not is_ready:
            _exit_now(before_exit, is_finished=is_finished)
        is_stopping = True
        worker.stop()

    def on_hangup() -> None:
        # The shell and the kernel each send one when a terminal closes.
        if not is_stopping:
            on_signal()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if _hears_hangup():
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    tracing = exporting(backend.served_as, worker.worker_id) if settings.tracing else contextlib.nullcontext()
    with monitoring(settings, worker.snapshot, worker.health), tracing:
        try:
            await worker.run(on_ready, ProcessWatchdog(settings.step_timeout_s))
        except LMPoolError as error:
            if worker.is_hung:
                _exit_hung(error, before_exit)
            raise
        if worker.is_hung:
            _exit_hung(None, before_exit)
    is_finished = True
    _log.info("stopped; nothing was left unfinished")


def _exit_on_signals(before_exit: Callable[[], object]) -> None:
    """Until the event loop takes over: a KeyboardInterrupt would wait for a backend that is just being loaded."""
    for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if _hears_hangup() else [])):
        signal.signal(number, lambda *_: _exit_now(before_exit))


def _hears_hangup() -> bool:
    """Whether the end of the terminal is to end this process; under `nohup` it is not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def _exit_now(before_exit: Callable[[], object], *, is_finished: bool = False) -> NoReturn:
    """End although something may be cut off, unless all is finished; then only the end itself is not waited for."""
    if not is_finished:
        _log.info("stopped at once")
    before_exit()
    os._exit(0 if is_finished else INTERRUPTED)


def _exit_hung(error: LMPoolError | None, before_exit: Callable[[], object]) -> NoReturn:
    """End although the backend's thread does not: an ordinary end might wait for what that thread holds."""
    if error is not None:
        say(f"lmpool: {error}", err=True)
    before_exit()
    logging.shutdown()
    os._exit(_HUNG)


def exit_without_server(reason: str) -> NoReturn:
    """End at once, with exit code 1: the jobs in flight can be given to nobody."""
    _log.critical("%s", reason)
    logging.shutdown()
    os._exit(_WITHOUT_SERVER)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: without it storing rows takes two to four times as long."""
    try:
        import uvloop
    except ImportError:
        _log.warning("uvloop is not installed: rows are stored more slowly")
        return None
    return uvloop.new_event_loop


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks of rows: mapping them afresh costs a page fault per 4 KB of every row."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 1024 * 1024)


def start_log(log_format: str, model: str) -> LogFormat | None:
    """Have this process log to standard error.

    Args:
        log_format: "text" or "json".
        model: what the worker serves.

    Returns:
        for JSON, the formatter, so that the worker's id can be added to its fields.

    Raises:
        SettingsError: JSON is wanted, and python-json-logger is not installed.
    """
    logging.getLogger("lmpool.worker").addFilter(RepeatFilter())
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


class RepeatFilter(logging.Filter):
    """Lets a warning through when it is the first of its kind for some seconds, and then with how many were left out.

    Warnings are of one kind that have the same text before its values are put in, and the same texts and errors among
    these: the parts of a worker that wait for the same server say the same, about two adapters they do not.

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
        if len(self._shown_at) >= _MAX_KINDS:
            self._shown_at.clear()
            self._left_out.clear()
        self._shown_at[kind] = now
        if count := self._left_out.pop(kind, 0):
            record.msg, record.args = f"{record.msg} (%d more like this were not shown)", (*values, count)
        return True


def _kind(value: object) -> str:
    """The part of a value that tells one kind from another: of an error its words, for its numbers change."""
    return _DIGITS.sub("", str(value)) if isinstance(value, Exception) else value if isinstance(value, str) else ""
