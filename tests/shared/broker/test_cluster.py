"""A pool on a Redis Cluster: each model's queue on one master, rows on all; slots move and masters restart."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.asyncio.cluster import RedisCluster
from redis.crc import key_slot

from lmpool.broker.server import Server
from lmpool.errors import ServerError, ServerUnreachable, SettingsError
from lmpool.producer import Producer
from lmpool.protocol.keys import Keys
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, is_held, until_async
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.cluster_fixtures import cluster_pool, local_cluster  # noqa: F401

USERS = Path(__file__).parents[3] / "docker/redis/users.acl"


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Request many prompts at once and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


def masters(cluster: LocalCluster) -> list[redis.Redis]:
    return [redis.Redis(port=port) for port in cluster.ports]


def keys_of(master: redis.Redis, pattern: str) -> list[bytes]:
    return list(master.scan_iter(match=pattern, count=1000))


async def test_rows_lie_on_all_masters_and_the_queue_on_one(cluster: LocalCluster, pool: Pool) -> None:
    pool.start("--step-ms", 5)
    async with pool.producer() as producer:
        await ask_all(producer, [[i] for i in range(60)])
        nodes = masters(cluster)
        assert all(len(keys_of(node, f"{pool.prefix}:row:*")) >= 8 for node in nodes)
        assert sum(bool(keys_of(node, f"{pool.prefix}:{{syn}}:*")) for node in nodes) == 1
        assert sum(len(keys_of(node, f"{pool.prefix}:row:*")) for node in nodes) == 60


async def test_a_prompt_is_computed_once_for_all_clients(pool: Pool) -> None:
    pool.start("--step-ms", 5, "--lease-s", 10)
    async with pool.producer(cache_bytes=0) as producer, pool.producer(cache_bytes=0) as other:
        prompts = [[i, j] for i in range(8) for j in range(50)]
        await asyncio.gather(ask_all(producer, prompts), ask_all(other, prompts), ask_all(producer, prompts[::-1]))

        async def counted() -> bool:
            return await pool.rows_computed() >= 400

        await until_async(counted, "the heartbeats count the rows")
        assert await pool.rows_computed() <= 404


async def test_users_with_few_rights_work_on_a_cluster(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "acl") as cluster:
        for node in masters(cluster):
            for line in USERS.read_text("utf-8").splitlines():
                name = line.split()[1]
                if name != "default":
                    run(node, "ACL", "SETUSER", name, "reset", *rules(line, f"pw-{name}"))
        host = cluster.url.rpartition("/")[2]
        urls = {name: f"redis+cluster://{name}:pw-{name}@{host}" for name in ("producer", "worker")}
        pool = Pool(urls["worker"], "lmpool", tmp_path)
        try:
            for _ in range(2):  # They serve two partitions of the queue.
                pool.start("--with-trie")
            async with Producer(redis=urls["producer"], cache_bytes=0) as producer:
                await ask_all(producer, [[i] for i in range(60)])
                await ask_all(producer, [[i] for i in range(60)])
                targets = await producer.batch_logprobs([[i] for i in range(20)], targets=[3])
                wanted = [synthetic_row([i], vocab_size=V)[3] for i in range(20)]
                assert np.array_equal(targets[:, 0], np.array(wanted, np.float32))
                await producer.warm([70])
                assert await producer.sample([71], temperature=0) == synthetic_row([71], vocab_size=V).argmax()
                trie = await producer.trie()
                assert abs(float((await trie.weight_sum(prompt=[5], nodes=[0]))[0]) - 1) < 1e-3
            refused = [str(entry) for node in masters(cluster) for entry in run(node, "ACL", "LOG")]
            # The test's own client sends CLIENT SETINFO, whose refusal does not count.
            assert [entry for entry in refused if "client|setinfo" not in entry] == []
            with pytest.raises(redis.exceptions.NoPermissionError):
                redis.RedisCluster.from_url(urls["producer"].replace("+cluster", "")).set("lmpool:row:x:y", b"")
        finally:
            pool.end()


def rules(line: str, password: str) -> list[str]:
    """Split a line of `users.acl` into rules, with a password added; a text in parentheses is one rule."""
    words = re.findall(r"\([^)]*\)|\S+", line.split(maxsplit=2)[2])
    return [f">{password}" if word.startswith("#") else word for word in words]


async def test_requests_survive_the_move_of_the_queue_to_another_master(
    cluster: LocalCluster, pool: Pool, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start("--step-ms", 50, "--max-batch", 8, "--lease-s", 2, command=gate.command)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, [[i % 500, i // 500] for i in range(300)]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        gate.open()
        await asyncio.to_thread(move_slot, cluster, key_slot(pool.keys.model("syn").jobs))
        await asyncio.wait_for(asked, DEADLINE_S)
        await ask_all(producer, [[7, 7, i] for i in range(40)])


def run(node: redis.Redis, *words: Any) -> Any:
    """Run a command for which redis-py has no method."""
    return node.execute_command(*words)  # type: ignore[no-untyped-call]


def move_slot(cluster: LocalCluster, slot: int) -> None:
    """Move a slot and its keys from one master to another, as `redis-cli --cluster reshard` does."""
    nodes = masters(cluster)
    ids = [run(node, "CLUSTER", "MYID") for node in nodes]
    (source,) = [at for at, node in enumerate(nodes) if _serves(node, ids[at], slot)]
    target = (source + 1) % len(nodes)
    run(nodes[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    run(nodes[source], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    while keys := run(nodes[source], "CLUSTER", "GETKEYSINSLOT", slot, 100):
        command: list[Any] = ["MIGRATE", "127.0.0.1", cluster.ports[target], "", 0, 5000, "KEYS", *keys]
        run(nodes[source], *command)
    for node in (nodes[target], nodes[source], *nodes):
        run(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def _serves(node: redis.Redis, node_id: bytes, slot: int) -> bool:
    ranges: Any = run(node, "CLUSTER", "SLOTS")
    entries = ranges.items() if isinstance(ranges, dict) else (((entry[0], entry[1]), entry[2:]) for entry in ranges)
    for (first, last), rest in entries:
        if first <= slot <= last:
            return node_id in str(rest).encode()
    return False


async def test_requests_survive_the_restart_of_a_master(cluster: LocalCluster, pool: Pool, tmp_path: Path) -> None:
    """Each master restarts without its keys, also the master with the queue; clients request lost prompts again."""
    gate = Gate(tmp_path / "gate")
    # With one partition, the worker does not move to another master.
    options = ("--step-ms", 30, "--max-batch", 8, "--lease-s", 2, "--partitions", 1)
    pool.start(*options, command=gate.command)
    async with pool.producer(when_absent="wait") as producer:
        for number in range(len(cluster.ports)):
            gate.shut()
            asked = asyncio.create_task(ask_all(producer, [[number, i] for i in range(150)]))
            await until_async(lambda: is_held(pool), "the worker holds prompts")
            gate.open()
            await asyncio.to_thread(cluster.restart, number)
            await asyncio.wait_for(asked, DEADLINE_S)


async def test_requests_wait_for_a_frozen_master(cluster: LocalCluster, pool: Pool) -> None:
    pool.start("--lease-s", 2)
    async with pool.producer() as producer:
        await ask_all(producer, [[1]])
        cluster.signal(1, signal.SIGSTOP)
        asked = asyncio.create_task(ask_all(producer, [[2, i] for i in range(60)]))
        await asyncio.sleep(0)
        done, _ = await asyncio.wait([asked], timeout=1)
        cluster.signal(1, signal.SIGCONT)
        assert not done
        await asyncio.wait_for(asked, DEADLINE_S)


@pytest.mark.parametrize("kind", [redis.RedisCluster, RedisCluster])
async def test_a_cluster_client_can_be_passed_instead_of_a_url(pool: Pool, kind: Any) -> None:
    pool.start()
    client = kind.from_url(pool.url.replace("+cluster", ""))
    if kind is RedisCluster:
        await client.initialize()
    async with Producer(redis=client, prefix=pool.prefix) as producer:
        await ask_all(producer, [[4]])
    assert (await client.ping()) if kind is RedisCluster else client.ping()
    await client.aclose() if kind is RedisCluster else client.close()


async def test_one_node_that_answers_is_enough(cluster: LocalCluster, pool: Pool) -> None:
    pool.start()
    host = pool.url.rpartition("/")[2]
    async with Producer(redis=f"redis+cluster://127.0.0.1:1,{host}", prefix=pool.prefix) as producer:
        await ask_all(producer, [[4]])


async def test_the_url_of_one_node_without_cluster_is_explained(cluster: LocalCluster, pool: Pool) -> None:
    pool.start()
    plain = pool.url.replace("+cluster", "")
    told = []
    for port in cluster.ports:
        producer = Producer(redis=plain.rpartition(":")[0] + f":{port}", prefix=pool.prefix, timeout=30)
        try:
            await ask_all(producer, [[i] for i in range(10)])
        except ServerError as error:
            told.append(str(error))
        await producer.close()
    assert len(told) == len(cluster.ports)
    assert [
        text for text in told if "one node of a Redis Cluster: name it as redis+cluster://HOST:PORT" not in text
    ] == []


async def test_a_node_with_the_info_but_without_the_queue_is_explained(cluster: LocalCluster, pool: Pool) -> None:
    nodes: Any = redis.cluster.RedisCluster.from_url(cluster.url.replace("+cluster", ""))
    queue = nodes.get_node_from_key(pool.keys.model("syn").jobs.decode())
    names = (f"{pool.prefix}-{number}" for number in itertools.count())
    pool.prefix = next(name for name in names if nodes.get_node_from_key(Keys(name).models().decode()) != queue)
    info = nodes.get_node_from_key(Keys(pool.prefix).models().decode())
    nodes.close()
    await asyncio.to_thread(pool.start)
    with pytest.raises(ServerError, match=r"one node of a Redis Cluster: name it as redis\+cluster://HOST:PORT"):
        await Producer(redis=f"redis://{info.host}:{info.port}", prefix=pool.prefix).logprobs([1])


def test_a_server_without_cluster_mode_is_explained() -> None:
    # redis-py raises this error for the reply "This instance has cluster support disabled".
    refused = ConnectionError("the cluster cannot be used: … Cluster mode is not enabled on this node")
    told = Server("redis+cluster://h:7000").explain(refused)
    assert str(told) == "redis+cluster://h:7000 is no Redis Cluster: name it as redis://HOST:PORT"


async def test_an_unreachable_cluster_is_explained(cluster: LocalCluster) -> None:
    with pytest.raises(ServerUnreachable, match="127.0.0.1:1"):
        await Producer(redis="redis+cluster://127.0.0.1:1", timeout=5).open()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+cluster://h:7000/3", "one database only"),
        ("redis+cluster://h:x", "host or port is malformed"),
        ("redis+cluster://user:geheim@h:7000,i:y", "host or port is malformed"),
        ("unix+cluster:///tmp/s", "must begin with"),
    ],
)
def test_a_malformed_cluster_url_is_reported_without_its_password(url: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        Server(url)
    assert "geheim" not in str(caught.value)


def test_a_cluster_is_shown_without_its_password() -> None:
    server = Server("rediss+cluster://user:geheim@h:7000,i:7001")
    assert str(server) == "rediss+cluster://h:7000"
    assert "geheim" not in repr(server)
