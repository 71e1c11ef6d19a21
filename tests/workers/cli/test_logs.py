"""A worker's log: JSON with one object per line, and bounded repetition of warnings."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lmpool.broker.server import Server
from lmpool.workers.cli.serve import RepeatFilter
from lmpool.workers.membership.heartbeat import loading
from lmpool.workers.settings import WorkerSettings
from tests.support.pool import Pool, WorkerProcess, lmpool_command, until_async


def entries(worker: WorkerProcess) -> list[dict[str, Any]]:
    """The entries of a worker's log; each line must be a JSON object."""
    return [json.loads(line) for line in worker.text.splitlines()]


def test_every_line_of_a_json_log_is_an_object_with_worker_and_time(pool: Pool) -> None:
    began = datetime.now(UTC)
    worker = pool.start("--log-format", "json")
    worker.process.terminate()
    assert worker.wait() == 0
    logged = entries(worker)
    (serving,) = [entry for entry in logged if entry["message"].startswith("serving ")]
    assert serving["message"].endswith(str(serving["worker"]))
    for entry in logged:
        assert entry["level"] == "INFO"
        assert entry["logger"] == "lmpool.worker"
        assert entry["model"] == "syn"
        assert entry["worker"] == serving["worker"]
        assert began <= datetime.fromisoformat(entry["time"]) <= datetime.now(UTC)
        assert datetime.fromisoformat(entry["time"]).utcoffset() is not None
    assert logged[-1]["message"] == "stopped; nothing was left unfinished"


def test_the_error_that_ends_a_worker_is_only_in_its_json_log(pool: Pool) -> None:
    pool.start()
    other = pool.start("--seed", 1, "--log-format", "json", wait=False)
    assert other.wait() == 2
    *_, last = entries(other)
    assert last["level"] == "CRITICAL"
    assert "served by" in last["message"]
    assert "ModelMismatch" in last["exception"]
    assert last["exception"].startswith("Traceback")


def test_a_password_is_in_no_line_of_a_json_log(tmp_path: Path) -> None:
    url = "redis://worker:hunter2@127.0.0.1:1/0"
    worker = WorkerProcess(
        [*lmpool_command(), "worker", "syn", "--backend", "synthetic", "--redis", url, "--log-format", "json"],
        tmp_path / "log",
    )
    assert worker.wait() == 2
    (entry,) = entries(worker)
    assert "no Redis server answers at redis://127.0.0.1:1" in entry["message"]
    assert "exception" not in entry, "the message is enough"
    assert "hunter2" not in worker.text


def test_an_unknown_format_is_one_clear_error(pool: Pool) -> None:
    worker = pool.start("--log-format", "xml", wait=False)
    assert worker.wait() == 2
    assert worker.text == "lmpool: --log-format: 'xml' is not one of text, json\n"


async def test_a_worker_logs_that_it_loads_and_repeats_it(
    pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="lmpool.worker")
    monkeypatch.setattr("lmpool.workers.membership.heartbeat.LOG_EVERY_S", 0.0)

    async def has_logged_it() -> bool:
        return any(record.getMessage().startswith("still loading 'syn' after ") for record in caplog.records)

    async with loading(Server(pool.url), WorkerSettings(pool.prefix, lease_s=1), "w0", "syn"):
        assert caplog.messages[0] == "loading 'syn'"
        await until_async(has_logged_it, "the worker logs again that it loads")


async def test_a_worker_logs_that_others_serve_the_model_already(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lmpool.worker")

    async def load() -> list[str]:
        caplog.clear()
        async with loading(Server(pool.url), WorkerSettings(pool.prefix), "w0", "syn"):
            return list(caplog.messages)

    assert await load() == ["loading 'syn'"]
    await asyncio.to_thread(pool.start)
    assert await load() == ["loading 'syn'", "1 worker serves 'syn' already: this one is added"]


# A script that runs `lmpool`, and sends itself a second signal after the command has finished.
AGAIN_WHEN_FINISHED = """
import logging, os, signal
from lmpool.cli import main
class Again(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("stopped; "):
            os.kill(os.getpid(), signal.SIGINT)
logging.getLogger("lmpool.worker").addHandler(Again())
main()
"""


def test_a_signal_after_the_drain_does_not_log_that_work_was_stopped(pool: Pool) -> None:
    worker = pool.start(command=lambda: [sys.executable, "-c", AGAIN_WHEN_FINISHED])
    worker.signal(signal.SIGINT)
    assert worker.wait() in (0, 130)
    assert "stopped; nothing was left unfinished" in worker.text
    assert "stopped at once" not in worker.text


# Repeated warnings


class Shown(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> tuple[logging.Logger, Shown]:
    logger, shown = logging.Logger("of a test"), Shown()
    logger.addHandler(shown)
    return logger, shown


def test_a_warning_is_shown_at_once_and_its_repeats_are_counted(log: tuple[logging.Logger, Shown]) -> None:
    logger, shown = log
    repeats = RepeatFilter(pause_s=1e9)
    logger.addFilter(repeats)
    for i in range(5):
        logger.warning("will try again: %s", OSError(i))
        logger.info("not a warning")
    assert shown.lines == ["will try again: 0", *["not a warning"] * 5]
    repeats._pause_s = 0.0  # Make the pause between repeated warnings end now.
    logger.warning("will try again: %s", OSError(6))
    logger.warning("will try again: %s", OSError(7))
    assert shown.lines[-2:] == ["will try again: 6 (4 more like this were not shown)", "will try again: 7"]


def test_warnings_about_different_things_do_not_hide_each_other(log: tuple[logging.Logger, Shown]) -> None:
    logger, shown = log
    logger.addFilter(RepeatFilter(pause_s=1e9))
    for name in ("poet", "judge", "poet"):
        logger.warning("cannot load the adapter %r: %s", name, OSError("gone"))
    logger.error("the backend broke")
    logger.error("the backend broke")
    assert shown.lines == [
        "cannot load the adapter 'poet': gone",
        "cannot load the adapter 'judge': gone",
        "the backend broke",
        "the backend broke",
    ]


def test_the_number_of_remembered_kinds_is_limited(log: tuple[logging.Logger, Shown]) -> None:
    logger, shown = log
    repeats = RepeatFilter(pause_s=1e9)
    logger.addFilter(repeats)
    for i in range(5000):
        logger.warning("about %s", str(i))
    assert len(shown.lines) == 5000
    assert sys.getsizeof(repeats._seen) < 200_000
