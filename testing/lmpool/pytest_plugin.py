"""Pytest fixtures for programs that use a pool: one in-memory pool per test.

pytest loads this module in every environment that has lmpool, so the module imports lmpool only in its fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmpool.testing import MemoryPool, SyntheticModel


@pytest.fixture
def lmpool_models() -> Sequence[SyntheticModel]:
    """The models of `lmpool_pool`: one `SyntheticModel()`. Override this fixture to serve other models."""
    from lmpool.testing import SyntheticModel

    return [SyntheticModel()]


@pytest.fixture
def lmpool_pool(lmpool_models: Sequence[SyntheticModel]) -> Iterator[MemoryPool]:
    """An open in-memory pool (`lmpool.testing.MemoryPool`) for one test, which serves `lmpool_models`."""
    from lmpool.testing import pool

    with pool(*lmpool_models) as opened:
        yield opened


@pytest.fixture
def lmpool_environment(lmpool_pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> MemoryPool:
    """The pool `lmpool_pool`; its URL is set as LMPOOL_REDIS_URL, so that code that names no server uses this pool."""
    monkeypatch.setenv("LMPOOL_REDIS_URL", lmpool_pool.url)
    return lmpool_pool
