"""If a model's files change while a worker runs, the worker logs this, and serves on without other effects."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmpool.admin.survey import file_notices, survey
from lmpool.broker.server import Server
from lmpool.synthetic import synthetic_row
from lmpool.web.tables import Tables
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend
from lmpool.workers.membership.heartbeat import CheckpointWatch
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, V, until_async

WEIGHTS = "model.safetensors"


class OfFolder:
    """Settings of a backend that names a folder as the source of its model."""

    served_as = "syn"

    def __init__(self, folder: Path, gguf_file: str | None = None) -> None:
        self.model = str(folder)
        self.gguf_file = gguf_file

    def open(self) -> Backend:
        return SyntheticBackend(SyntheticSettings("syn", vocab_size=V))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (WEIGHTS, "config.json", "tokenizer.json", "README.md"):
        (folder / name).write_text("as it was")
    return folder


def replaced(path: Path) -> None:
    """Replace a file by a new one (another inode) as editors and save_pretrained do, here with equal size and time."""
    state = path.stat()
    other = path.with_name("other")
    other.write_text("something")
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "overwritten": (lambda folder: (folder / WEIGHTS).write_text("as it is now"), WEIGHTS),
    "replaced": (lambda folder: replaced(folder / WEIGHTS), WEIGHTS),
    "touched": (lambda folder: os.utime(folder / WEIGHTS, ns=(1, 1)), WEIGHTS),
    "removed": (lambda folder: removed(folder / WEIGHTS), WEIGHTS),
    "config": (lambda folder: (folder / "config.json").write_text("{}"), "config.json"),
    "all": (lambda folder: shutil.rmtree(folder), f"config.json, {WEIGHTS}, tokenizer.json"),
    "added": (lambda folder: (folder / "more.safetensors").touch(), ""),
    "another": (lambda folder: (folder / "README.md").write_text("new"), ""),
    "nothing": (lambda folder: None, ""),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_file_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    watch = CheckpointWatch(OfFolder(folder))
    change, names = CHANGES[how]
    change(folder)
    for _ in range(2):
        watch.check()
        assert watch.changed == names
    lines = [record.getMessage() for record in caplog.records if "have changed" in record.getMessage()]
    assert lines == [line for line in lines if f"loaded them: {names}. It continues" in line]
    assert len(lines) == bool(names)


def test_only_the_named_file_of_a_gguf_model_counts(folder: Path) -> None:
    (folder / "q4.gguf").touch()
    watch = CheckpointWatch(OfFolder(folder, "q4.gguf"))
    (folder / WEIGHTS).unlink()
    watch.check()
    assert watch.changed == ""
    (folder / "q4.gguf").write_text("more")
    watch.check()
    assert watch.changed == "q4.gguf"


def test_many_changed_files_are_counted(folder: Path) -> None:
    for number in range(5):
        (folder / f"part-{number}.safetensors").touch()
    watch = CheckpointWatch(OfFolder(folder))
    for number in range(5):
        (folder / f"part-{number}.safetensors").unlink()
    watch.check()
    assert watch.changed == "part-0.safetensors, part-1.safetensors, part-2.safetensors and 2 more"


@pytest.mark.parametrize("model", ["", "org/name-on-the-hub", "~no-such-user/model", "/no/such/folder"])
def test_a_model_without_a_folder_is_not_watched(model: str) -> None:
    watch = CheckpointWatch(SimpleNamespace(served_as="x", model=model, open=None))
    watch.start_check()
    watch.check()
    assert watch.changed == ""


async def test_a_worker_whose_files_change_reports_it_and_serves_on(pool: Pool, folder: Path) -> None:
    settings = WorkerSettings(prefix=pool.prefix, lease_s=1.0, shm_bytes=0)
    worker = Worker(Server(pool.url), OfFolder(folder), settings)
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda info: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)

    async def shown() -> list[str]:
        return file_notices(await survey(Server(pool.url), pool.keys))

    assert await shown() == []
    replaced(folder / WEIGHTS)
    (notice,) = await until_async(shown, "the heartbeat has it")
    assert f"files of its model have changed since it loaded them ({WEIGHTS})" in notice

    async def listed() -> Any:
        """The live workers; none while a busy machine delays the heartbeat for a lease."""
        return Tables(await survey(Server(pool.url), pool.keys)).workers()["listed"]

    (shown_worker,) = await until_async(listed, "the worker is live")
    assert shown_worker["changed_files"] == WEIGHTS
    async with pool.producer() as producer:
        assert np.array_equal(await producer.logprobs([1, 2]), synthetic_row([1, 2], vocab_size=V))
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)
