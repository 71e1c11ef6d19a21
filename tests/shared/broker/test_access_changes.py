"""Only some Redis users may change adapters and publish weights; workers load both with the rights of a worker."""

# ruff: noqa: F811  pytest passes the imported fixtures by name.
from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmpool.errors import AuthenticationFailed
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.shared.broker.secure_server import SecureServer
from tests.shared.broker.test_access import PATIENT, SYNTHETIC, V, Workers, command, server, workers  # noqa: F401
from tests.support.pool import run_lmpool


async def test_only_users_with_the_right_may_change_adapters(
    server: SecureServer,
    workers: Workers,
    tmp_path: Path,
) -> None:
    worker = workers.start("worker", "worker", "syn", *SYNTHETIC)
    await asyncio.to_thread(worker.until_says, "serving ")
    (tmp_path / "weights").write_text("1")
    added = command(server, "adapters", "adapters", "add", "poet", str(tmp_path), "--model", "syn")
    assert "poet" in added
    for role in ("producer", "operator"):
        async with Producer("syn", redis=server.url(role), **PATIENT) as producer:
            before = await producer.adapters()
            for change in (producer.add_adapter("poet", tmp_path), producer.add_adapter("judge", tmp_path),
                           producer.remove_adapter("poet")):  # fmt: skip
                with pytest.raises(AuthenticationFailed, match="a right of its own: name the server as the user `adap"):
                    await change
            assert list(before) == ["poet"]
            assert await producer.adapters() == before
    remove = ("adapters", "remove", "poet", "--model", "syn")
    done = run_lmpool(*remove, LMPOOL_REDIS_URL=server.url("producer"))
    assert done.returncode != 0
    assert "name the server as the user `adapters`" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


async def test_only_users_with_the_right_may_publish_weights(
    server: SecureServer,
    workers: Workers,
    tmp_path: Path,
) -> None:
    with server.client("admin") as admin:
        admin.acl_log_reset()
    started = [workers.start("worker", "worker", "syn", *SYNTHETIC) for _ in range(2)]
    for worker in started:
        await asyncio.to_thread(worker.until_says, "serving ")
    place = tmp_path / "model.safetensors"
    async with (
        Producer("syn", redis=server.url("producer"), **PATIENT) as producer,
        Producer("syn", redis=server.url("weights"), **PATIENT) as publisher,
    ):
        save_file({"seed": np.array(5)}, place)
        assert await publisher.publish_weights(place) == 1
        assert await publisher.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([6])}) == 2
        for asking in (producer, publisher):
            row = await asking.logprobs([1, 2], min_version=2)
            assert np.array_equal(row, synthetic_row([1, 2], vocab_size=V, seed=6))
        for worker in started:  # Both change: the second worker has its turn when the first one serves the version.
            await asyncio.to_thread(worker.until_says, "serving 'syn@2' ")
        assert not (refused := server.refusals()), "\n".join(refused)
        for role in ("producer", "adapters", "operator"):
            async with Producer("syn", redis=server.url(role), **PATIENT) as asking:
                for weights in (place, {"seed": np.array(7)}):
                    with pytest.raises(AuthenticationFailed, match="is a right of its own: name .* the user `w"):
                        await asking.publish_weights(weights)
                assert await asking.versions() == {1: "served", 2: "served"}
