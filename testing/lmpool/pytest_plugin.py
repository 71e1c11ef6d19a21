"""Fixtures of pytest for programs that use a pool: an in-memory pool a test.

pytest loads this module in every environment that has lmpool, so nothing is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmpool.testing import MemoryPool, SyntheticModel


@pytest.fixture
def lmpool_models() -> Sequence[SyntheticModel]:
    """What `lmpool_pool` serves: one `SyntheticModel()`. Define a fixture of this name to have others."""
    from lmpool.testing import SyntheticModel

    return [SyntheticModel()]


@pytest.fixture
def lmpool_pool(lmpool_models: Sequence[SyntheticModel]) -> Iterator[MemoryPool]:
    """An open in-memory pool (`lmpool.testing.MemoryPool`) of the test's own, which serves `lmpool_models`."""
    from lmpool.testing import pool

    with pool(*lmpool_models) as opened:
        yield opened


@pytest.fixture
def lmpool_environment(lmpool_pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> MemoryPool:
    """`lmpool_pool`, with LMPOOL_REDIS_URL naming it: for code that says nothing of a server."""
    monkeypatch.setenv("LMPOOL_REDIS_URL", lmpool_pool.url)
    return lmpool_pool
