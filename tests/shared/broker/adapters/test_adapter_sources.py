"""A worker loads adapters below its roots, from a hub if it accepts hub names, and up to its size limit."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmpool.broker.server import Server
from lmpool.errors import (
    AdapterRefused,
    SettingsError,
)
from lmpool.protocol.adapter import Adapter
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.membership import adapters as workers_adapters
from lmpool.workers.membership.adapters import place_of
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.shared.broker.adapters.adapter_changes import QUICK, V, check, put, revision_in, write
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import DEADLINE_S, Pool


async def test_rows_are_computed_while_an_adapter_is_fetched_from_the_hub(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetch(source: str) -> Path:
        assert source == "org/poet"
        begun.set()
        assert may_end.wait(DEADLINE_S)
        write(tmp_path, "poet", "1")
        return tmp_path / "poet"

    monkeypatch.setattr(workers_adapters, "adapter_folder", fetch)
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    async with serving(pool, FromHub(tmp_path), adapter_hub=True), pool.producer("syn") as producer:
        change = asyncio.create_task(producer.add_adapter("poet", "org/poet"))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        await check(producer, "", "")
        assert not change.done()
        may_end.set()
        await check(producer, "poet", await change)


class FromHub(SyntheticBackend):
    """A backend that finds the adapters of the hub in a local folder."""

    def __init__(self, cache: Path) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V))
        self._cache = cache

    def load_adapter(self, name: str, source: str) -> str:
        return super().load_adapter(name, str(self._cache / source.removeprefix("org/")))


@pytest.mark.usefixtures("short_memory")
async def test_an_adapter_that_lies_outside_of_the_root_is_refused(pool: Pool, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path, "outside", "1")
    root.mkdir()
    inside = write(root, "inside", "1")
    (root / "alias").symlink_to(inside)
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    (root / "linked" / "weights").symlink_to(outside / "weights")
    roots: dict[str, Any] = {"adapter_root": [str(root), str(write(tmp_path, "other", "2"))]}
    plain = SyntheticSettings(name="syn", vocab_size=V)
    message = rf"lies outside of {root}, {tmp_path}/other: .* --adapter-root"
    async with serving(pool, SyntheticBackend(plain), **roots), pool.producer("syn") as producer:
        for source in (outside, root / "link", root / "linked", root / ".." / "outside", "/", tmp_path / "none"):
            with pytest.raises(AdapterRefused, match=message):
                await producer.add_adapter("poet", str(source))
        for source in (inside, root / "alias", tmp_path / "other"):
            await check(producer, "poet", await producer.add_adapter("poet", source))
        await put(pool, producer, "judge", Adapter(str(outside), revision_in(outside)))
        with pytest.raises(AdapterRefused, match=message):
            await producer.logprobs([1], adapter="judge")
    started = SyntheticSettings(name="syn", vocab_size=V, adapters=[f"poet={outside}"])
    with pytest.raises(SettingsError, match=message):
        await Worker(Server(pool.url), started, WorkerSettings(pool.prefix, **roots)).run()


async def test_the_error_names_the_place_of_a_missing_folder(pool: Pool, tmp_path: Path) -> None:
    """The error says where the folder must be, because a client may name a folder on its own machine."""
    plain = SyntheticSettings(name="syn", vocab_size=V)
    async with serving(pool, SyntheticBackend(plain)), pool.producer("syn") as producer:
        for source, of_relative in (("./nowhere/poet", ": the program did not find it"), (str(tmp_path / "none"), "$")):
            text = f"'{source}' must be a folder on the worker's machine{of_relative}"
            with pytest.raises(AdapterRefused, match=text):
                await producer.add_adapter("poet", source)


async def test_hub_names_need_workers_that_accept_them(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, "poet", "1")
    # The worker calls `adapter_folder` if another module has imported the hub's package.
    monkeypatch.setattr(workers_adapters, "adapter_folder", lambda source: folder)
    async with serving(pool, FromHub(tmp_path)), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"'org/poet' is no folder .* or start all workers with --adapter-hub"):
            await producer.add_adapter("poet", "org/poet")
    async with serving(pool, FromHub(tmp_path), adapter_hub=True), pool.producer("syn") as producer:
        await check(producer, "poet", await producer.add_adapter("poet", "org/poet"))


async def test_the_operator_may_name_adapters_on_a_hub(tmp_path: Path) -> None:
    assert place_of(WorkerSettings(), "org/poet", is_own=True) == "org/poet"
    with pytest.raises(SettingsError, match="names on a hub are not taken"):
        place_of(WorkerSettings(), "org/poet")
    missing = str(tmp_path / "none")
    assert place_of(WorkerSettings(), missing) == missing, "the backend reports that the folder does not exist"


async def test_an_adapter_that_is_too_large_is_refused_before_it_is_read(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    os.truncate(folder / "weights", 2_000_000)
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend, adapter_mb=1), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"have 2 MB, and 1 MB are taken: .* --adapter-mb"):
            await producer.add_adapter("poet", folder)
    late = pool.start(*QUICK, "--adapter-mb", 1, "--adapters", f"poet={folder}", wait=False)
    assert late.wait() == 2
    assert "have 2 MB, and 1 MB are taken" in late.text


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"adapter_root: '.*/none' is no folder"):
        WorkerSettings(adapter_root=[str(tmp_path / "none")])
