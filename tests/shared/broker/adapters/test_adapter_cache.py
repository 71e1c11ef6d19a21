"""Adapters are loaded when requests first need them, and evicted when others need their slots."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.shared.broker.adapters.adapter_changes import QUICK, check, two_clients, write
from tests.support.pool import Pool


@pytest.mark.usefixtures("short_memory")
async def test_two_workers_with_8_slots_each_serve_200_adapters(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK, "--max-adapters", 8) for _ in range(2)]
    folders = [write(tmp_path, f"a{number}", str(number)) for number in range(200)]
    async with two_clients(pool) as (client, other):
        added = [client.add_adapter(f"a{number}", folder) for number, folder in enumerate(folders)]
        revisions = await asyncio.gather(*added)
        assert len(set(revisions)) == 200
        assert await other.adapters() == {f"a{number}": revision for number, revision in enumerate(revisions)}
        for producer in (client, other):
            checks = [check(producer, f"a{number}", revision) for number, revision in enumerate(revisions)]
            await asyncio.gather(*checks, check(producer, "", "", *([token] for token in range(64))))
    for worker in workers:
        loads, evictions = worker.text.count("serving the adapter"), worker.text.count("evicting the adapter")
        assert 0 <= loads - evictions <= 8
        assert evictions > 50, "both serve far more adapters than they have slots"
