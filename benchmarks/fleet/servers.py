"""The server of a simulated fleet: an embedded server, a cluster on this machine, or a running server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.cluster import LocalCluster

from benchmarks.harness.testbed import Testbed, open_testbed

_MEMORY_BYTES = 2**31  # The memory limit of each server: rows of some seconds.


@contextmanager
def open_server(url: str | None, masters: int) -> Iterator[Testbed]:
    """Open a testbed on a server.

    Args:
        url: address of a running server or cluster; None to start one.
        masters: number of masters of the cluster to start; 0 for an embedded server.
    """
    if url is None and not masters:
        with open_testbed(1, quick=False, memory_bytes=_MEMORY_BYTES) as testbed:
            yield testbed
        return
    with tempfile.TemporaryDirectory(prefix="lmpool-fleet-") as name:
        folder = Path(name)
        if url is not None:
            yield Testbed(url, folder, 1, False, 0, 0)
            return
        with LocalCluster(folder / "cluster", _MEMORY_BYTES, masters) as cluster:
            yield Testbed(cluster.url, folder, 1, False, 0, _MEMORY_BYTES)
