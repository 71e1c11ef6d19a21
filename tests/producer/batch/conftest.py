"""Fixtures of the batch tests: an S3 store, buckets, a pool for jobs. Tests of jobs need arq (`make test-smoke`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmpool.embedded import EmbeddedServer
from tests.producer.batch.buckets import TestBucket
from tests.support.pool import Pool

collect_ignore = [] if find_spec("arq") else ["test_jobs.py", "test_nightly.py"]

# Program of an S3 store (moto), which ends when its standard input is closed.
_STORE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def store() -> Iterator[str]:
    """Start an S3 store; yield its address."""
    command = [sys.executable, "-c", _STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        process.kill()


@pytest.fixture
def bucket(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestBucket:
    """A new bucket; environment variables give this process and its children access, and a cache of their own."""
    for name, value in {
        "AWS_ENDPOINT_URL": store,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "LMPOOL_BATCH_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return TestBucket(tmp_path)


@pytest.fixture
def jobs_pool(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pool]:
    """A pool on its own server: on a shared server the jobs of several tests would be in one queue."""
    pool = Pool(own_server.url, "jobs", tmp_path)
    yield pool
    pool.end()
