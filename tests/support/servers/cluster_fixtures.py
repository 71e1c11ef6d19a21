"""Fixtures for tests of a pool on a Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.servers.cluster import LocalCluster


@pytest.fixture(scope="module", name="cluster")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster for the tests of one module."""
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(name="pool")
def cluster_pool(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool on the cluster, with keys of its own."""
    pool = Pool(cluster.url, f"c{abs(hash((request.module.__name__, request.node.name))) % 10**6}", tmp_path)
    yield pool
    pool.end()
