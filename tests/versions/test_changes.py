"""Versions of a model's weights: they are published, served, refused, pinned and followed."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmpool.broker.scripts import read_alive
from lmpool.broker.server import Server
from lmpool.errors import DeadlineExceeded, ModelMismatch, SettingsError, UnknownModel, WeightsRefused
from lmpool.producer import Producer
from lmpool.producer.client import versions as client_versions
from lmpool.producer.client.requests import Deadline
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.version import Version
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import Pool, V, is_held, until_async
from tests.versions.traffic import Seeds, Traffic, weights

PROMPT = [1, 2, 3]
CHANGES = 5


async def is_of_seed(producer: Producer, seed: int, prompt: list[int] = PROMPT, **options: Any) -> bool:
    """Whether the row of a prompt is the one that weights with this seed compute."""
    row = await producer.logprobs(prompt, **options)
    return np.array_equal(row, synthetic_row(prompt, vocab_size=V, seed=seed))


async def test_each_answer_is_of_the_version_that_it_names(pool: Pool) -> None:
    for _ in range(2):
        pool.start()
    traffic = Traffic(Seeds({version: 100 + version if version else 0 for version in range(CHANGES + 1)}))
    async with traffic.running(pool, 4), pool.producer("syn") as publisher:
        for version in range(1, CHANGES + 1):
            assert await publisher.publish_weights(weights(100 + version)) == version
        await traffic.until_used(CHANGES)


async def test_a_producer_follows_versions_and_can_use_older_ones(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as publisher, pool.producer("syn") as other:
        assert await is_of_seed(other, 0)
        assert (other.model.name, other.model.version) == ("syn", 0)
        for version in (1, 2):
            assert await publisher.publish_weights(weights(10 * version)) == version
        assert (publisher.model.name, publisher.model.version) == ("syn@2", 2)
        assert await is_of_seed(publisher, 20)
        entry, version = await publisher.versioned(publisher.logprobs, PROMPT, targets=[1])
        assert (entry.shape, version) == ((1,), 2)
        assert await is_of_seed(other, 20, min_version=2)
        # The rows of older versions are cached, and nobody computes others.
        assert await is_of_seed(other, 0, version=0)
        with pytest.raises(DeadlineExceeded, match="no live worker"):
            await other.logprobs([7, 7], version=0, timeout=0.2)
        with pytest.raises(UnknownModel, match="'syn@9' is not served"):
            await other.logprobs(PROMPT, version=9)
        with pytest.raises(DeadlineExceeded, match="no worker has served version 9 of 'syn'"):
            await other.logprobs(PROMPT, min_version=9, timeout=0.2)
        assert await other.versions() == {1: "served", 2: "served"}
    async with pool.producer("syn@2") as pinned, pool.producer() as unnamed:
        assert await is_of_seed(pinned, 20)
        assert unnamed.model.name == "syn@2"


async def test_waiting_for_a_version_and_for_the_row_have_one_deadline(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start("--step-ms", 600_000)
    async with pool.producer("syn") as producer:
        session: Any = producer._sessions.session
        ends: list[float] = []

        async def reach(number: int, deadline: Deadline) -> None:
            ends.append(deadline.end)

        async def untils() -> list[float]:
            return [request.until for request in session._requests]

        monkeypatch.setattr(session, "reach", reach)
        call = asyncio.create_task(producer.logprobs(PROMPT, min_version=1, timeout=50))
        assert await until_async(untils, "the row is requested") == ends
        call.cancel()


async def test_an_info_that_was_read_before_a_change_does_not_replace_the_info_of_the_new_version(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        session: Any = producer._sessions.session
        before: ModelInfo = session.info
        later = before.of_version(Version(1, "0" * 16))

        async def find(_: object) -> ModelInfo:
            return dataclasses.replace(before, partitions=(0, 1))

        async def poll() -> None:  # Another task changes to the new version while this task polls the new partition.
            session._change_model(later)

        monkeypatch.setattr(session._discovery, "find", find)
        monkeypatch.setattr(session._liveness, "poll", poll)
        await session._reload_info()
        assert session.info == later


async def test_refused_versions_do_not_hide_the_served_one(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_versions, "_KEPT", 2)
    pool.start()
    async with pool.producer("syn") as publisher:
        assert await publisher.publish_weights(weights(1)) == 1
        for _ in range(4):
            with pytest.raises(WeightsRefused):
                await publisher.publish_weights(weights(-7))
        assert list(await publisher.versions()) == [1, 4, 5]


async def test_refused_weights_change_nothing(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as publisher:
        assert await is_of_seed(publisher, 0)
        with pytest.raises(WeightsRefused, match="no worker serves version 1: weights: the seed: -7 must be"):
            await publisher.publish_weights(weights(-7))
        assert publisher.model.version == 0
        assert await is_of_seed(publisher, 0, [4])
        assert await publisher.publish_weights(weights(5)) == 2
        with pytest.raises(WeightsRefused):
            await publisher.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([-1])})
        assert await is_of_seed(publisher, 5, [4])
        # The changes are relative to version 2, the last one that was not refused.
        assert await publisher.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([6])}) == 4
        assert await is_of_seed(publisher, 6, [4])


BAD: list[tuple[Any, str]] = [
    ({"other": np.array(1)}, "the tensor 'seed' is missing"),
    ({"seed": np.array(1), "other": np.array(1)}, "'other'"),
    ({"seed": np.array([1])}, r"\(1,\)"),
    ({"seed": np.array(1.0)}, "F64"),
    ({"seed": 5}, "no tensors of numpy or torch"),
    ({"seed.indices": np.array([0])}, "give .indices and .values"),
    (17, "17 is no folder, file or dict of tensors"),
    ("/nowhere", "there is no file or folder '/nowhere'"),
]


async def test_weights_that_do_not_fit_are_refused_before_they_are_sent(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    (tmp_path / "foreign.safetensors").write_bytes(b"no safetensors")
    save_file({"seed": np.array(1)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    files = [(tmp_path / name, "no whole safetensors file") for name in ("foreign.safetensors", "cut.safetensors")]
    async with pool.producer("syn") as publisher:
        for bad, message in BAD + files:
            with pytest.raises(SettingsError, match=message):
                await publisher.publish_weights(bad)
        for number in (0, -1, True, 1.5, "1"):
            with pytest.raises(SettingsError, match="version: "):
                await publisher.publish_weights(weights(1), number)  # type: ignore[arg-type]
        assert await publisher.versions() == {}


async def test_files_and_folders_are_read_by_workers_or_stored_in_the_pool(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    pool.start("--weights-root", str(tmp_path / "allowed"))
    file, outside = tmp_path / "allowed" / "model.safetensors", tmp_path / "outside.safetensors"
    save_file({"seed": np.array(3)}, file)
    save_file({"seed": np.array(4)}, outside)
    async with pool.producer("syn") as publisher:
        for place in (file, str(file.parent)):
            await publisher.publish_weights(place)
            assert await is_of_seed(publisher, 3)
        (tmp_path / "allowed" / "links").mkdir()
        (tmp_path / "allowed" / "links" / "model.safetensors").symlink_to(outside)
        for place in (outside, tmp_path / "allowed" / "links"):
            with pytest.raises(WeightsRefused, match="safetensors' lies outside of .*--weights-root"):
                await publisher.publish_weights(place)
        assert await publisher.publish_weights(outside, stored=True) == 5
        assert await is_of_seed(publisher, 4)
        assert len(pool.names("{syn}:versions:data:*")) == 1
        await publisher.publish_weights(file)
        # A later full version has replaced the stored file, which no worker needs any more.
        assert not pool.names("{syn}:versions:data:*")


SPOILED = """
from lmpool.cli import main
from lmpool.workers.backends.synthetic import SyntheticBackend
draw = SyntheticBackend._draw
def spoiled(backend, jobs):
    block = draw(backend, jobs)
    if backend._seed == 13:
        block.numbers[...] = float("nan")
    return block
SyntheticBackend._draw = spoiled
main()
"""
"""A worker whose rows are NaN with the seed 13, as when the weights of a real model overflow."""


async def test_weights_with_a_wrong_row_are_refused_and_the_earlier_ones_are_loaded_again(pool: Pool) -> None:
    pool.start(command=lambda: [sys.executable, "-c", SPOILED])
    async with pool.producer("syn") as producer:
        assert await producer.publish_weights(weights(1)) == 1
        with pytest.raises(WeightsRefused, match="version 2: weights: the row of a prompt is no row with them"):
            await producer.publish_weights(weights(13))
        assert await is_of_seed(producer, 1)
        assert await producer.publish_weights(weights(3)) == 3
        assert await is_of_seed(producer, 3)


async def test_at_most_so_many_sparse_versions_follow_one_another(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmpool.protocol.version.MAX_SPARSE", 2)
    pool.start()
    async with pool.producer("syn") as producer:
        for seed in (1, 2, 3):
            await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([seed])})
        with pytest.raises(SettingsError, match="2 sparse versions follow one another: publish a full version first"):
            await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([4])})
        assert await producer.publish_weights(weights(5)) == 4
        assert await is_of_seed(producer, 5)


async def test_calls_may_name_many_versions_at_once(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        for version in range(1, 12):
            await producer.publish_weights(weights(version))
            assert await is_of_seed(producer, version, [3])
        rows = await asyncio.gather(*(producer.logprobs([3], version=version) for version in range(1, 12)))
        for version, row in enumerate(rows, 1):
            assert np.array_equal(row, synthetic_row([3], vocab_size=V, seed=version))
        # The producers of earlier versions are closed after the calls.
        assert sorted(producer._called) == [*range(4, 12)]


async def test_a_call_is_repeated_when_the_weights_change_during_it(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        timeouts: list[float] = []
        numbers = iter((7, 8))

        async def ask(prompts: list[list[int]], *, timeout: float) -> Any:
            timeouts.append(timeout)
            rows = await producer.batch_logprobs(prompts, timeout=timeout)
            if (number := next(numbers, None)) is not None:
                await producer.publish_weights(weights(number))
                if number == 8:
                    raise ModelMismatch("the parts of a result are of two versions")
            return rows

        rows, version = await producer.versioned(ask, prompts=iter([PROMPT, [4]]), timeout=50)
        assert (version, len(timeouts)) == (2, 3)
        assert 50 == timeouts[0] > timeouts[1] > timeouts[2]
        expected = [synthetic_row(prompt, vocab_size=V, seed=8) for prompt in (PROMPT, [4])]
        assert np.array_equal(rows, expected)

        async def fail(**_: float) -> None:
            raise ModelMismatch("the vocabulary has another size")

        with pytest.raises(ModelMismatch, match="the vocabulary has another size"):
            await producer.versioned(fail)


async def test_a_closed_producer_of_a_version_is_not_kept(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        first = producer.at(0)
        async with first:
            assert producer.at(0) is first
            kept = producer.at(1)
        assert producer._pinned == {1: kept}
        async with producer.at(0) as second:
            assert second is not first
            await first.close()
            assert producer.at(0) is second
            assert await is_of_seed(second, 0)
        third = producer.at(0)
    for _ in range(2):
        async with producer:
            assert producer.at(0) is third
            assert await is_of_seed(third, 0)
        assert not third._sessions.by_loop, "it is closed with the producer that made it, each time"


@pytest.mark.parametrize("other", ["another block", "another call"])
async def test_the_end_of_a_block_ends_no_calls_of_others(pool: Pool, tmp_path: Path, other: str) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    async with gated_worker(pool, GatedBackend(gate)), pool.producer("syn") as producer:
        await producer.logprobs([1])
        gate.shut()

        async def in_a_block() -> Any:
            async with producer.at(0) as pinned:
                return await pinned.logprobs([2])

        async with producer.at(0):
            call = in_a_block() if other == "another block" else producer.logprobs([2], version=0)
            running = asyncio.create_task(call)
            await until_async(lambda: is_held(pool), "a worker computes the row")
        gate.open()
        assert np.array_equal(await running, synthetic_row([2], vocab_size=V))


async def test_calls_of_a_version_use_the_cache_and_the_counters_of_the_producer(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        for _ in range(2):
            await producer.logprobs(PROMPT, version=0)
        assert (producer.stats().computed, producer.stats().local_hits) == (1, 1)
        producer.clear_cache()
        await producer.logprobs(PROMPT, version=0)
        assert (producer.stats().cache_hits, producer.stats().local_hits) == (1, 1)
        assert producer.at(0).stats().requests == 0


async def test_of_two_publishers_one_gets_the_number(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as one, pool.producer("syn") as two:
        results = await asyncio.gather(
            one.publish_weights(weights(1), 7), two.publish_weights(weights(2), 7), return_exceptions=True
        )
        (refused,) = [result for result in results if result != 7]
        assert "version: 7 must be above 7" in str(refused)
        winner = 1 if results[0] == 7 else 2
        assert await is_of_seed(one, winner)
        assert await is_of_seed(two, winner, min_version=7)
        numbers = await asyncio.gather(one.publish_weights(weights(3)), two.publish_weights(weights(4)))
        assert sorted(numbers) == [8, 9]
        assert await is_of_seed(one, 3 if numbers[0] == 9 else 4, min_version=9)


async def test_workers_that_start_later_serve_the_newest_version(pool: Pool) -> None:
    first = pool.start()
    async with pool.producer("syn") as publisher:
        await publisher.publish_weights(weights(1))
        await publisher.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([2])})
        pool.start().until_says("serving 'syn@2'")
        first.end()
        assert await is_of_seed(publisher, 2, [5])


async def test_a_pool_without_workers_says_so_and_goes_on_with_the_newest_version(pool: Pool) -> None:
    worker = pool.start()
    async with pool.producer("syn") as publisher:
        await publisher.publish_weights(weights(1))
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0
    for name in ("syn", "syn@1"):
        with pytest.raises(UnknownModel, match=f"'{name}' is not served"):
            await pool.producer(name).open()
    pool.start().until_says("serving 'syn@1'")
    async with pool.producer("syn") as producer:
        assert await is_of_seed(producer, 1)


async def test_the_versions_belong_to_one_checkpoint(pool: Pool) -> None:
    first = pool.start("--lease-s", 8)  # The other worker must not take it for dead while it is blocked.
    async with pool.producer("syn") as publisher:
        await publisher.publish_weights(weights(1))
        other = pool.start("--seed", 9, "--lease-s", 1, wait=False)
        other.until_says("version 1 of 'syn', which is of another checkpoint, is served")
        assert await asyncio.to_thread(other.wait) != 0
    first.end()
    async with Server(pool.url).connected() as client:

        async def is_gone() -> bool:
            return not (await read_alive(client, pool.keys.model("syn@1"))).serving

        await until_async(is_gone, "the first worker counts as lost")
    pool.start("--seed", 9, "--lease-s", 1).until_says("serving 'syn'")
    async with pool.producer("syn") as producer:
        assert await is_of_seed(producer, 9)
        assert await producer.versions() == {}


async def test_adapters_stay_in_service(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("some")
    (tmp_path / "own").write_text("own")
    pool.start("--adapters", f"own={tmp_path / 'own'}")
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("added", tmp_path / "weights")
        before = await producer.adapters()
        await producer.publish_weights(weights(8))
        assert await producer.adapters() == before
        for name in ("added", "own"):
            row = await producer.logprobs(PROMPT, adapter=name)
            expected = synthetic_row(PROMPT, vocab_size=V, seed=8, adapter_revision=before[name])
            assert np.array_equal(row, expected)
        assert revision == before["added"]


async def test_a_file_that_was_replaced_after_its_publication_is_not_served(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    file = tmp_path / "model.safetensors"
    save_file({"seed": np.array(1)}, file)
    async with pool.producer("syn") as publisher:
        assert await publisher.publish_weights(file) == 1
        save_file({"seed": np.array(2)}, tmp_path / "other.safetensors")
        (tmp_path / "other.safetensors").replace(file)
        second = pool.start()
        second.until_says("has changed since version 1 was published: write each version to a place of its own")
        assert await is_of_seed(publisher, 1, [9])
        assert await publisher.publish_weights(file) == 2
        await asyncio.to_thread(second.until_says, "serving 'syn@2'")
        assert await is_of_seed(publisher, 2, [9])
