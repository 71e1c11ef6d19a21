"""Pytest fixtures for all tests: one embedded server for the whole test run, and one pool for each test."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("LMPOOL_REDIS_URL", None)

import pytest

from lmpool.embedded import EmbeddedServer
from tests.support.models.hf_fixtures import smollm2_folder  # noqa: F401
from tests.support.pool import Pool
from tests.support.servers.clocks import clock, clocked  # noqa: F401
from tests.support.servers.cluster import LocalCluster

with suppress(ImportError):  # The engines' environments have no hypothesis; their tests do not need it.
    import hypothesis

    # No deadline for hypothesis: on a busy machine an example may take any time.
    hypothesis.settings.register_profile("lmpool", deadline=None)
    hypothesis.settings.load_profile("lmpool")

_numbers = itertools.count()
_BEGAN = pytest.StashKey[tuple[float, float]]()

# Restore default handlers: a background job of a shell ignores SIGINT, and under nohup a process ignores SIGHUP.
# The processes that tests start would inherit these settings.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _clock() -> float:
    return time.time() - time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record when a test begins; the report of a failed test contains the time."""
    item.stash[_BEGAN] = (time.monotonic(), _clock())
    return (yield)


def _standing_still() -> str:
    """List the stopped processes, the zombies and the processes that wait for a disk, one line for each process."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text(errors="replace").rpartition(")")
            if (state := rest.split()[0]) in "TtDZ":
                lines.append(f"\n{name}) {state}")
    return "".join(sorted(lines))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the machine's state to the report of a failed test: leases can expire on a busy machine."""
    report = yield
    if report.failed:
        began, clock = item.stash[_BEGAN]
        seconds, step, load = time.monotonic() - began, _clock() - clock, os.getloadavg()[0]
        text = f"it took {seconds:.1f} s, the clock was set by {step:+.2f} s, load {load:.1f}{_standing_still()}"
        report.sections.append(("The machine during this test", text))
    return report


@pytest.fixture(scope="session", autouse=True)
def _private_runtime_dir() -> Iterator[None]:
    """Hide the embedded servers of the user who runs the tests: use a private runtime folder."""
    folder = tempfile.mkdtemp(prefix="lmp")
    os.environ["LMPOOL_RUNTIME_DIR"] = f"{folder}/run"
    shared = tempfile.mkdtemp(prefix="lmp", dir="/dev/shm")
    os.environ["LMPOOL_SHM_DIR"] = shared
    yield
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a short path, because the path of a Unix socket may have only about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """URL of an embedded server that all tests share, or of a cluster if LMPOOL_TEST_CLUSTER is set."""
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    if os.environ.get("LMPOOL_TEST_CLUSTER"):
        with LocalCluster(folder / "c", memory_bytes=1 << 29) as cluster:
            yield cluster.url
    else:
        with EmbeddedServer(memory_bytes=1 << 30, folder=folder / "s") as server:
            yield server.url
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pool(server_url: str, tmp_path: Path) -> Iterator[Pool]:
    """A pool without workers on the shared server, with a key prefix for this test alone."""
    pool = Pool(server_url, f"test{next(_numbers)}", tmp_path)
    yield pool
    pool.end()


@pytest.fixture
def own_server(short_dir: Path) -> Iterator[EmbeddedServer]:
    """A server that only this test uses, so the test may stop the server."""
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s") as server:
        yield server
