"""The whole pool runs under the Redis users of docker/redis, and no user can do more than its role needs."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.exceptions import NoPermissionError, ResponseError

from lmpool.broker.registries import look_up_tokenizer, register
from lmpool.broker.server import Server
from lmpool.errors import AuthenticationFailed, NoWorker, QueueCleared, ServerUnreachable
from lmpool.producer import Producer
from lmpool.producer.client.session import Priority
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.synthetic import synthetic_row
from lmpool.web.app import read_demand
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.trie import TrieBackend, TrieSettings
from tests.shared.broker.secure_server import ROLES, SHIPPED, SecureServer, password_of
from tests.support.pool import DEADLINE_S, WorkerProcess, lmpool_command, run_lmpool, until, until_async
from tests.support.trie_answers import answers_of, assert_right, draw_weights, row_weights, words

V = 512
KEYS = Keys()
LEASE = ("--lease-s", "3")
# Options of patient clients: on a busy machine a heartbeat may be late, and the model seems unserved for a moment.
PATIENT: dict[str, Any] = {"when_absent": "wait", "timeout": DEADLINE_S}
SYNTHETIC = ("--backend", "synthetic", "--vocab-size", str(V), *LEASE)

# Commands that neither workers nor producers may run.
FORBIDDEN = (
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "CONFIG SET maxmemory 1", "SCRIPT FLUSH", "SCRIPT LOAD x",
    "DEBUG JMAP", "ACL LIST", "ACL SETUSER x", "SHUTDOWN", "MONITOR", "CLIENT LIST", "CLIENT KILL TYPE normal",
    "REPLICAOF NO ONE", "MODULE LIST", "FUNCTION FLUSH", "SUBSCRIBE x", "PUBLISH x y", "SAVE", "BGREWRITEAOF",
    "RENAME lmpool:models x", "DUMP lmpool:models", "COPY lmpool:models x", "SORT lmpool:models", "INFO",
    "SET other x", "GET other", "EVAL redis.call('FLUSHALL') 0", "EVAL redis.call('SET','other','x') 0",
)  # fmt: skip

# Commands that only users with the right to change adapters may run.
CHANGING_ADAPTERS = (
    "HSET lmpool:{m}:adapters a b", "HDEL lmpool:{m}:adapters a", "PEXPIRE lmpool:{m}:adapters 1",
    "SET lmpool:{m}:adapter_check:n x", "GETRANGE lmpool:{m}:adapter_check:n 0 1", "SET lmpool:{m}:adapter_load:n x",
    "EVAL redis.call('SET',KEYS[1],'a') 1 lmpool:{m}:adapter_check:n",
    "EVAL redis.call('HDEL','lmpool:{m}:adapters','a') 1 lmpool:{m}:jobs", "WAIT 0 1",
)  # fmt: skip

# Commands that only users with the right to publish weights may run.
PUBLISHING = (
    "XADD lmpool:{m}:versions 9-0 v x", "XDEL lmpool:{m}:versions 9-0", "DEL lmpool:{m}:versions",
    "HSET lmpool:{m}:versions:state 9 served", "HDEL lmpool:{m}:versions:state 9",
    "SET lmpool:{m}:versions:data:n:0 x", "GETRANGE lmpool:{m}:versions:data:n:0 0 1",
    "UNLINK lmpool:{m}:versions:data:n:0", "SET lmpool:{m}:versions:turn:0 x",
)  # fmt: skip

# Role -> commands on keys of other roles, which the user of the role must not run.
NOT_THEIRS = {
    "producer": (
        "INFO memory", "SCAN 0", "SET lmpool:row:f:d x", "SET lmpool:tokenizer:d x", "PEXPIRE lmpool:tokenizer:d 1",
        "SET lmpool:row:f:d x NX", "DEL lmpool:row:f:d", "APPEND lmpool:row:f:d x",
        "SETRANGE lmpool:row:f:d 0 x", "EVAL redis.call('SET','lmpool:row:f:d','x') 0", "GETDEL lmpool:row:f:d",
        "EVAL redis.call('DEL',KEYS[1]) 1 lmpool:row:f:d", "PEXPIRE lmpool:row:f:d 1", "MGET lmpool:weights:x",
        "GETRANGE lmpool:weights:x 0 1", "SET lmpool:weights:x x GET", "SETRANGE lmpool:weights:x 0 x",
        "EVAL redis.call('GET',KEYS[1]) 1 lmpool:weights:x",
        "HSET lmpool:models m x", "HDEL lmpool:models m", "UNLINK lmpool:models",
        "HSET lmpool:worker:w state ready", "UNLINK lmpool:worker:w", "DEL lmpool:{m}:jobs", "UNLINK lmpool:{m}:jobs",
        "SET lmpool:{m}:jobs x", "XREADGROUP GROUP workers w STREAMS lmpool:{m}:jobs >",
        "XREAD STREAMS lmpool:{m}:jobs 0",
        "XGROUP CREATE lmpool:{m}:jobs g 0", "XADD lmpool:{m}:reply:c * d x", "XRANGE lmpool:{m}:dead - +",
        "XADD lmpool:{m}:dead * e x", "XDEL lmpool:{m}:dead 1-1", "DEL lmpool:{m}:adapters",
        "SET lmpool:{m}:adapters x", *CHANGING_ADAPTERS, *PUBLISHING,
    ),
    "adapters": (
        "INFO stats", "SCAN 0", "SET lmpool:row:f:d x", "SET lmpool:tokenizer:d x",
        "DEL lmpool:row:f:d", "HSET lmpool:models m x", "UNLINK lmpool:worker:w",
        "XREADGROUP GROUP workers w STREAMS lmpool:{m}:jobs >", "XADD lmpool:{m}:reply:c * d x",
        "XRANGE lmpool:{m}:dead - +", "MGET lmpool:weights:x", "DEL lmpool:{m}:adapters",
        "SET lmpool:{m}:adapter_load:n w", "DEL lmpool:{m}:adapter_load:n", "WAIT 0 1",
    ),
    "weights": (
        "SCAN 0", "SET lmpool:row:f:d x", "HSET lmpool:models m x", "HSET lmpool:models m@ 9",
        "HSET lmpool:{m}:versions:state 9 served", "HSETNX lmpool:{m}:versions:state 9 served",
        "DEL lmpool:{m}:versions", "GETRANGE lmpool:{m}:versions:data:n:0 0 1", "SET lmpool:{m}:versions:turn:0 x",
        "XREADGROUP GROUP workers w STREAMS lmpool:{m}:jobs >", "XADD lmpool:{m}:reply:c * d x", *CHANGING_ADAPTERS,
    ),
    "worker": (
        "DEL lmpool:{m}:versions",
        "SCAN 0", "XREAD STREAMS lmpool:{m}:reply:c 0", "UNLINK lmpool:{m}:reply:c", "XRANGE lmpool:{m}:dead - +",
        "MGET lmpool:weights:x", "SET lmpool:weights:x x", "DEL lmpool:{m}:jobs", "DEL lmpool:models",
        "SET lmpool:models x", "XADD lmpool:{m}:waiting:d * a b", "DEL lmpool:{m}:adapter_check:n",
        "SET lmpool:{m}:wanted x",
    ),
    "trie-worker": (
        "SCAN 0", "SET lmpool:row:f:d x", "DEL lmpool:row:f:d", "SET lmpool:weights:x x", "SET lmpool:trie:x x",
        "SET lmpool:tokenizer:d x",
        "XADD lmpool:{m}:jobs * m x", "XRANGE lmpool:{m}:jobs - +", "XADD lmpool:{m}:reply:c * d x",
        "XREAD STREAMS lmpool:{trie}:reply:c 0", "HSET lmpool:{m}:adapters a b", "UNLINK lmpool:{m}:jobs",
    ),
    "web": (
        "SCAN 0", "INFO all", "SET lmpool:row:f:d x", "HSET lmpool:models m x", "UNLINK lmpool:worker:w",
        "XDEL lmpool:{m}:dead 1-1", "XADD lmpool:{m}:dead * e x", "DEL lmpool:{m}:dead", "XACK lmpool:{m}:jobs g 1-1",
        "XADD lmpool:{m}:reply:c * d x", "MGET lmpool:weights:x", "UNLINK lmpool:{m}:jobs",
        *CHANGING_ADAPTERS, *PUBLISHING,
    ),
    "operator": (
        "SET lmpool:row:f:d x", "DEL lmpool:row:f:d", "HSET lmpool:models m x", "UNLINK lmpool:{m}:jobs", "INFO all",
        "XREADGROUP GROUP workers w STREAMS lmpool:{m}:jobs >", "XRANGE lmpool:{m}:reply:c - +",
        "MGET lmpool:weights:x", "SET lmpool:weights:x x GET", "XADD lmpool:{m}:dead * e x", "UNLINK lmpool:worker:w",
        "HSET lmpool:worker:w state ready", *CHANGING_ADAPTERS, *PUBLISHING,
    ),
    "batch": (
        "INFO all", "INFO stats", "SCAN 0", "SET lmpool:row:f:d x", "HSET lmpool:models m x", "UNLINK lmpool:worker:w",
        "XREADGROUP GROUP workers w STREAMS lmpool:{m}:jobs >", "XADD lmpool:{m}:reply:c * d x",
        "XRANGE lmpool:{m}:dead - +", "MGET lmpool:weights:x", "SORT arq:abort BY nosort GET *", "DEL lmpool:{m}:jobs",
        "RENAME arq:job:a lmpool:models", "WATCH lmpool:models",
        "FLUSHDB", *CHANGING_ADAPTERS, *PUBLISHING,
    ),
}  # fmt: skip
# Only the role "batch" may change jobs of arq, because arq's worker reads and writes the files that jobs name.
OF_BATCH = ("ZADD arq:lmpool:batch 1 a", "SET arq:job:a x", "GET arq:job:a", "DEL arq:result:a")


def add_guest(server: SecureServer, role: str, fingerprint: str) -> str:
    """Add a user with a role's rights on the model "mine" only, as docker/redis/README.md says; return its name."""
    (way,) = re.findall(r"^(sed -n .*MODEL.*)$", (SHIPPED / "README.md").read_text(), re.MULTILINE)
    name = f"guest-{role}"
    for old, new in (("MODEL", "mine"), ("FINGERPRINT", fingerprint), ("user producer", f"user {role}")):
        way = way.replace(old, new)
    way = way.replace("user guest", f"user {name}")
    # users.acl also has the passwords of other users, which the new line must not contain.
    way = way.replace("PASSWORD-OF-guest", f"PASSWORD-OF-{name}")
    done = subprocess.run(["sh", "-c", way], cwd=server.folder, capture_output=True, text=True, check=True)
    line = done.stdout.split()
    assert line[:4] == ["user", name, "on", f"#SHA256-OF-THE-PASSWORD-OF-{name}"]
    rules = [rule for rule in line[2:] if not rule.startswith("#")]
    with server.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", name, *rules, f">{password_of(name)}")
    return name


@pytest.fixture(scope="module", params=["tls", "embedded"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """Debian's Redis with TLS, or the program of the embedded server without TLS but with the same users."""
    folder = tmp_path_factory.mktemp("s")
    with SecureServer(folder, tls=request.param == "tls").running() as running:
        yield running


@pytest.fixture
def workers(server: SecureServer, tmp_path: Path) -> Iterator[Workers]:
    """A starter of workers; at the end of the test the workers are killed and the server is emptied."""
    started = Workers(server, tmp_path)
    yield started
    started.end()
    with server.client("admin") as admin:
        admin.flushall()


class Workers:
    """Worker processes that read the server's URL from the environment, because `ps` would show an argument."""

    def __init__(self, server: SecureServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.all: list[WorkerProcess] = []

    def start(self, role: str, *arguments: str) -> WorkerProcess:
        """Start a worker process without waiting until it serves."""
        log = self._folder / f"worker-{len(self.all)}"
        environment = {"LMPOOL_REDIS_URL": self._server.url(role)}
        self.all.append(WorkerProcess([*lmpool_command(), *arguments], log, environment))
        return self.all[-1]

    def end(self) -> None:
        """Kill the worker processes that still run."""
        for worker in self.all:
            worker.end()


def command(server: SecureServer, role: str, *arguments: str) -> str:
    """Run an `lmpool` command as the user of a role; return the command's output."""
    done = run_lmpool(*arguments, LMPOOL_REDIS_URL=server.url(role))
    assert done.returncode == 0, done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr
    return done.stdout


async def ask_everything(server: SecureServer, tmp_path: Path) -> None:
    """Send every kind of client request and check every value."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    rows = np.stack([synthetic_row(prompt, vocab_size=V) for prompt in prompts])
    async with Producer("syn", redis=server.url("producer"), cache_bytes=0, **PATIENT) as producer:
        assert "s3cr3t" not in repr(producer)
        for _ in range(2):  # The rows are computed first, and then come from the cache.
            assert np.array_equal(await producer.batch_logprobs(prompts), rows)
        many = [[7, i] for i in range(100)]
        assert np.array_equal((await producer.batch_logprobs(many))[99], synthetic_row(many[99], vocab_size=V))
        with server.client("admin") as admin:
            # Damage all rows: junk in place of a row must not reach clients.
            digests = sorted(admin.scan_iter(f"lmpool:row:{producer.model.fingerprint}:*"))
            for key in digests:
                admin.set(key, b"junk", px=60_000)
        assert np.array_equal(await producer.logprobs(prompts[0]), rows[0])
        assert np.array_equal(await producer.logprobs(prompts[1], fresh=True), rows[1])
        assert np.array_equal(await producer.logprobs(prompts[2], targets=[3, 3, V - 1]), rows[2][[3, 3, V - 1]])
        best = await producer.topk(prompts[0], 5)
        assert best.ids[0] == np.argmax(rows[0])
        assert 0 <= await producer.sample(prompts[0]) < V
        assert await producer.sample(prompts[0], seed=1) == await producer.sample(prompts[0], seed=1)
        await producer.warm([9, 9])
        scores = await producer.score(prompts[0], [4])
        assert np.array_equal(scores, rows[0][[4]])
        (tmp_path / "weights").write_text("1")
        async with Producer("syn", redis=server.url("adapters"), **PATIENT) as changing:
            revision = await changing.add_adapter("poet", tmp_path)
            row = synthetic_row([1], vocab_size=V, adapter_revision=revision)
            for asking in (producer, changing):
                assert np.array_equal(await asking.logprobs([1], adapter="poet"), row)
            assert await changing.adapters() == {"poet": revision}
            await changing.remove_adapter("poet")
        abandoned = asyncio.create_task(producer.logprobs([8, 8, 8]))
        await asyncio.sleep(0)
        abandoned.cancel()
        allowed = await producer.token_set([1, 2])
        assert await producer.mass([1], allowed) < 0
        for trie in (await producer.trie(), await producer.trie(words(1, V))):
            weights = draw_weights(1, V, "sum")
            assert_right(await trie.weight_sum(weights), answers_of(trie.structure).of("sum", weights))
            exact = answers_of(trie.structure).of("sum", row_weights([3, 1], V, "sum"))
            assert_right(await trie.weight_sum(prompt=[3, 1]), exact)


async def test_the_whole_pool_runs_under_users_with_few_rights(
    server: SecureServer, workers: Workers, tmp_path: Path
) -> None:
    with server.client("admin") as admin:
        admin.acl_log_reset()
    started = [workers.start("worker", "worker", "syn", *SYNTHETIC)]
    started.append(workers.start("worker", "worker", "fused", *SYNTHETIC, "--with-trie"))
    started.append(workers.start("trie-worker", "trie-worker", *LEASE))
    for worker in started:
        await asyncio.to_thread(worker.until_says, "serving ")
    await ask_everything(server, tmp_path)
    async with Producer("fused", redis=server.url("producer"), **PATIENT) as producer:
        trie = await producer.trie()
        exact = answers_of(trie.structure).of("max", row_weights([5], V, "max"))
        assert_right(await trie.weight_max(prompt=[5]), exact)

    def are_shown() -> bool:
        status = json.loads(command(server, "operator", "status", "--json"))
        return {model["name"]: len(model["workers"]) for model in status} == {"syn": 1, "fused": 1, "trie": 1}

    await asyncio.to_thread(until, are_shown, "each model has one live worker")
    assert "dropped" in command(server, "operator", "flush", "--model", "syn")
    shown = command(server, "operator", "logprobs", "--ids", "1,2", "--model", "syn", "--wait", "--json")
    assert json.loads(shown)["top"]
    assert "no adapters" in command(server, "operator", "adapters", "list", "--model", "syn")
    # A worker is killed while it holds jobs: other workers claim its jobs and remove its keys.
    stuck = workers.start("worker", "worker", "stuck", *SYNTHETIC, "--step-ms", "600000")
    await asyncio.to_thread(stuck.until_says, "serving ")
    async with Producer("stuck", redis=server.url("producer"), **PATIENT) as producer:
        asked = asyncio.create_task(producer.batch_logprobs([[i] for i in range(12)]))
        with server.client("admin") as admin:

            async def is_held() -> bool:
                summary: Any = admin.xpending(KEYS.model("stuck").jobs, GROUP)
                return bool(summary["pending"])

            await until_async(is_held, "the worker holds prompts")
            started.append(workers.start("worker", "worker", "stuck", *SYNTHETIC))
            await asyncio.to_thread(started[-1].until_says, "serving ")
            stuck.end()
            assert (await asked).shape == (12, V)

            async def is_swept() -> bool:
                return len(admin.xinfo_consumers(KEYS.model("stuck").jobs, GROUP)) == 1

            await until_async(is_swept, "the killed one is swept")
    for worker in started:
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0
        assert "nothing was left unfinished" in worker.text
        assert "s3cr3t" not in worker.text
    assert not (refused := server.refusals()), "\n".join(refused)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
async def test_a_single_client_yields_under_users_with_few_rights(
    server: SecureServer, workers: Workers, priority: Priority
) -> None:
    name = f"alone-{priority}"
    with server.client("admin") as admin:
        admin.acl_log_reset()
        worker = workers.start("worker", "worker", name, *SYNTHETIC[:-2], "--lease-s", "60", "--max-batch", "2")
        await asyncio.to_thread(worker.until_says, "serving ")
        worker.signal(signal.SIGSTOP)
        options: dict[str, Any] = {"redis": server.url("producer"), "timeout": DEADLINE_S}
        async with Producer(name, **options, priority=priority) as greedy, Producer(name, **options) as modest:
            many = asyncio.create_task(greedy.batch_logprobs([[i, 1] for i in range(400)]))
            jobs = KEYS.model(name).jobs

            async def is_queued() -> bool:
                return bool(admin.xlen(jobs) == 400)

            await until_async(is_queued, "all are in the stream")
            request = asyncio.create_task(modest.logprobs([1, 2]))

            async def has_given_way() -> bool:
                return bool(admin.xlen(jobs) < 20)

            await until_async(has_given_way, "what is beyond the usual has gone back")
            worker.signal(signal.SIGCONT)
            assert np.array_equal(await request, synthetic_row([1, 2], vocab_size=V))
            assert (await many).shape == (400, V)
    assert not (refused := server.refusals()), "\n".join(refused)


async def test_operators_may_clear_a_queue_and_producers_may_not(server: SecureServer, workers: Workers) -> None:
    busy = workers.start("worker", "worker", "busy", *SYNTHETIC[:-2], "--max-batch", "2", "--step-ms", "600000")
    await asyncio.to_thread(busy.until_says, "serving ")
    with server.client("admin") as admin:
        admin.acl_log_reset()
        keys = KEYS.model("busy")
        # The commands below may take minutes together on a busy machine.
        async with Producer("busy", redis=server.url("producer"), timeout=DEADLINE_S) as producer:
            asked = [asyncio.ensure_future(producer.logprobs([number])) for number in range(300)]

            async def is_held() -> bool:
                groups: Any = admin.xinfo_groups(keys.jobs)
                return bool(groups[0]["pending"] and admin.xlen(keys.jobs) + admin.zcard(keys.backlog) == 300)

            await until_async(is_held, "all are queued")
            clear = ("queue", "clear", "busy", "--yes", "--json")
            for role in ("producer", "adapters"):
                done = run_lmpool(*clear, LMPOOL_REDIS_URL=server.url(role))
                assert done.returncode == 2
                assert "refuses a command that this user may not run" in done.stderr
                assert await is_held(), "nothing was removed"
            wrong = run_lmpool(*clear, LMPOOL_REDIS_URL=server.url("operator", password="wrong")).stderr
            assert "refuses this user or password" in wrong
            assert "right of operators" not in wrong, "another command would be refused as well"
            assert server.refusals()
            admin.acl_log_reset()
            assert "300 prompts" in command(server, "operator", "queue", "show", "busy")
            told = json.loads(command(server, "operator", *clear))
            assert told["removed"] == 300 - told["held"]

            async def has_told() -> bool:
                return bool(sum(request.done() for request in asked) == told["removed"])

            await until_async(has_told, "who waited has been told")
            ended = [request.exception() for request in asked if request.done()]
            assert all(isinstance(error, QueueCleared) for error in ended)
        await asyncio.gather(*asked, return_exceptions=True)
    assert not (refused_now := server.refusals()), "\n".join(refused_now)


@pytest.mark.parametrize("role", ROLES)
def test_no_user_has_more_rights_than_its_role(server: SecureServer, role: str) -> None:
    with server.client(role) as client:
        for line in (*FORBIDDEN, *NOT_THEIRS[role], *(OF_BATCH if role != "batch" else ())):
            with pytest.raises(ResponseError) as caught:
                client.execute_command(*line.split(" "))
            assert _is_refusal(caught.value), f"{line}: {caught.value}"


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("worker", "PTTL lmpool:{m}:watcher"),
        ("trie-worker", "PTTL lmpool:{trie}:watcher"),
        ("worker", "GET lmpool:{m}:versions:turn:0"),
        ("worker", "PEXPIRE lmpool:{m}:versions:turn:0 9"),
        ("worker", "SET lmpool:{m}:versions:data:n:0 x PX 9"),
    ],
)
def test_workers_have_rights_that_they_rarely_use(server: SecureServer, role: str, line: str) -> None:
    with server.client(role) as client:
        client.execute_command(*line.split(" "))


def _is_refusal(error: ResponseError) -> bool:
    # Refusals within scripts have other texts than direct refusals, and the server disables DEBUG for all users.
    told = ("ermission", "The user executing the script can't", "DEBUG command not allowed")
    return isinstance(error, NoPermissionError) or any(text in str(error) for text in told)


async def test_users_of_one_model_can_neither_use_nor_read_another(server: SecureServer, workers: Workers) -> None:
    fingerprint = SyntheticBackend(SyntheticSettings(name="mine", vocab_size=V, seed=1)).info.fingerprint
    guest, guest_worker = add_guest(server, "producer", fingerprint), add_guest(server, "worker", fingerprint)
    workers.start("worker", "worker", "theirs", *SYNTHETIC)
    restricted = workers.start(guest_worker, "worker", "mine", *SYNTHETIC, "--seed", "1")
    for worker in workers.all:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with Producer("theirs", redis=server.url("producer"), **PATIENT) as producer:
        await producer.logprobs([1])
        reply = producer._sessions.session._connections.partitions[0].reply  # type: ignore[union-attr]
    jobs = KEYS.model("theirs").jobs
    with server.client("admin") as admin:
        admin.xadd(reply, {"d": b"x"})
        (row,) = admin.scan_iter("lmpool:row:*")
    # The guest need not name the model "mine", because it may use only this model.
    async with Producer(redis=server.url(guest), **PATIENT) as producer:
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V, seed=1))
    with pytest.raises(AuthenticationFailed, match=r"^\w+://\S+ refuses"):  # The error comes at once, not after 20 s.
        await Producer("theirs", redis=server.url(guest), timeout=20).logprobs([1])
    for name in (guest, guest_worker):
        with server.client(name) as client:
            for words in (
                ("XREAD", "STREAMS", reply, "0"),
                ("MGET", row),
                ("XLEN", jobs),
                ("XADD", jobs, "*", "m", "x"),
            ):
                with pytest.raises(NoPermissionError):
                    client.execute_command(*words)
            # A script that names an allowed key cannot read the forbidden keys either.
            for key in (row, reply):
                with pytest.raises(ResponseError) as caught:
                    client.eval("return redis.call('GETRANGE', ARGV[1], 0, 9)", 1, KEYS.model("mine").jobs, key)
                assert _is_refusal(caught.value), caught.value

    def has_looked() -> bool:
        return any(line.startswith(f"{guest_worker}: lmpool:{{theirs}}:") for line in server.refusals())

    # The restricted worker may not remove the keys of the model "theirs"; it skips the keys and continues.
    await asyncio.to_thread(until, has_looked, "the restricted worker looks after infos that nobody serves")
    restricted.signal(signal.SIGTERM)
    assert await asyncio.to_thread(restricted.wait) == 0
    # UNBLOCKED is no failure: on a busy machine a heartbeat may be late, and the stream is missing for a moment.
    troubles = [line for line in restricted.text.splitlines() if "will try again" in line and "UNBLOCKED" not in line]
    assert not troubles


async def test_workers_write_tokenizers_and_producers_read_them(server: SecureServer, workers: Workers) -> None:
    packed = PackedTokenizer.pack("{}")
    async with Server(server.url("worker")).client() as client:
        for _ in range(2):
            await register(client, KEYS, packed)
    for role in ("producer", "adapters", "operator"):
        async with Server(server.url(role)).client() as client:
            assert await look_up_tokenizer(client, KEYS, packed.digest) == "{}"


# Commands on one key, which a tenant must not run on a key of another tenant.
TO_A_KEY = (
    "GET", "MGET", "GETRANGE 0 1", "STRLEN", "EXISTS", "PTTL", "HGETALL", "HGET f", "HKEYS", "HLEN", "HSTRLEN f",
    "XLEN", "XRANGE - +", "XPENDING workers", "XINFO CONSUMERS workers", "ZCARD", "ZRANGE 0 -1", "SET x", "HSET f x",
    "HDEL f", "DEL", "UNLINK", "PEXPIRE 1", "XADD * m x", "XDEL 1-1", "ZADD 1 x", "TYPE", "DUMP",
)  # fmt: skip


def add_tenants(server: SecureServer) -> list[str]:
    """Add the users of two tenants as docker/redis/README.md says; return the users' names."""
    (way,) = re.findall(
        r"^(grep '\^user default '.*?>> tenants\.acl)$", (SHIPPED / "README.md").read_text(), re.M | re.S
    )
    # users.acl also has the passwords of other users, which the new lines must not contain.
    (place := server.folder / "tenants").mkdir()
    users = re.sub("SHA256-OF-THE-PASSWORD-OF-[a-z-]+", 64 * "0", (SHIPPED / "users.acl").read_text())
    (place / "users.acl").write_text(users)
    subprocess.run(["sh", "-c", way], cwd=place, check=True)
    first, *lines = (place / "tenants.acl").read_text().splitlines()
    assert first.startswith("user default off ")
    names = []
    with server.client("admin") as admin:
        for line in lines:
            _, name, *rules = line.split()
            assert f"#SHA256-OF-THE-PASSWORD-OF-{name}" in rules
            names.append(name)
            rules = [rule for rule in rules if not rule.startswith("#")]
            admin.execute_command("ACL", "SETUSER", name, *rules, f">{password_of(name)}")
    return names


async def test_tenants_are_both_served_and_neither_can_touch_the_other(server: SecureServer, workers: Workers) -> None:
    tenants = add_tenants(server)
    # A server has one queue for jobs of arq, so tenants have none.
    roles = [role for role in ROLES if role != "batch"]
    assert sorted(tenants) == sorted(f"{tenant}-{role}" for tenant in ("red", "blue") for role in roles)
    with server.client("admin") as admin:
        admin.acl_log_reset()
    for tenant in ("red", "blue"):
        workers.start(f"{tenant}-worker", "worker", "syn", *SYNTHETIC, "--prefix", tenant)
    for worker in workers.all:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with (
        Producer("syn", redis=server.url("red-producer"), prefix="red", cache_bytes=0, **PATIENT) as red,
        Producer("syn", redis=server.url("blue-producer"), prefix="blue", cache_bytes=0, **PATIENT) as blue,
    ):
        for number, producer in enumerate((red, blue, red, blue)):
            assert np.array_equal(await producer.logprobs([number]), synthetic_row([number], vocab_size=V))
        with server.client("red-producer") as client:
            # A tenant damages its own job stream: its pool repairs the stream, and other tenants are not affected.
            client.execute_command("XADD", "red:{syn}:jobs", f"{2**64 - 1}-{2**64 - 1}", "m", "x")
        for number, producer in enumerate((blue, red), 7):
            assert np.array_equal(await producer.logprobs([number]), synthetic_row([number], vocab_size=V))
        assert "the job stream of 'syn' was replaced" in workers.all[0].text
        assert "was replaced" not in workers.all[1].text
    assert "syn" in command(server, "blue-operator", "status", "--prefix", "blue")
    # redis-py sends CLIENT SETINFO when this test's own client connects; a refusal of it does not count.
    assert not (refused := [line for line in server.refusals() if "client|setinfo" not in line]), "\n".join(refused)
    with server.client("admin") as admin:
        admin.set("blue:weights:w", "x")

        def of_all_kinds() -> list[bytes]:
            keys = sorted(admin.scan_iter("blue:*"))
            kinds = ("models", "worker", "row", "weights", "{syn}:jobs")
            return keys if all(any(key.startswith(f"blue:{kind}".encode()) for key in keys) for kind in kinds) else []

        # Wait until each kind of key exists: the key of a worker with a late heartbeat is missing for a while.
        blue_keys = await asyncio.to_thread(until, of_all_kinds, "there is a key of each kind")
    for role in roles:
        with server.client(f"red-{role}") as client:
            for line in ("SCAN 0", "KEYS *", "RANDOMKEY", "DBSIZE", "ACL LIST", "CLIENT LIST"):
                with pytest.raises(NoPermissionError):
                    client.execute_command(*line.split())
            for key in blue_keys:
                for name, *arguments in map(str.split, TO_A_KEY):
                    with pytest.raises(NoPermissionError):
                        client.execute_command(*_about(key, name, *arguments))
                with pytest.raises(NoPermissionError):
                    client.eval("return 1", 1, key)
                for name in ("HLEN", "STRLEN", "XLEN", "UNLINK"):
                    with pytest.raises(ResponseError) as caught:
                        client.eval("return redis.call(ARGV[1], ARGV[2])", 1, "red:{syn}:jobs", name, key)
                    assert _is_refusal(caught.value), caught.value


def _about(key: bytes, name: str, *arguments: str) -> tuple[str | bytes, ...]:
    """The words of a command, with the key after the subcommand if the command has a subcommand."""
    return (name, arguments[0], key, *arguments[1:]) if name == "XINFO" else (name, key, *arguments)


@pytest.mark.parametrize("tls", [True, False])
def test_the_server_does_not_start_before_its_users_have_passwords(tmp_path: Path, tls: bool) -> None:
    server = SecureServer(tmp_path, tls=tls)
    shipped = (SHIPPED / "users.acl").read_text()
    for number, role in enumerate(ROLES, 1):  # Only this role's user has no password.
        users = re.sub(rf"#SHA256-OF-THE-PASSWORD-OF-(?!{role} )[a-z-]+", f"#{'0' * 64}", shipped)
        (tmp_path / "users.acl").write_text(users)
        done = subprocess.run(server.command(), capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert done.returncode != 0, role
        assert server.log.count("password hash must be exactly 64 characters") == number


def test_trie_workers_may_store_answers_and_no_rows() -> None:
    # users.acl can name the fingerprint of trie workers, which changes only if the meaning of their results changes.
    info = TrieBackend(TrieSettings()).info
    (line,) = [
        line for line in (SHIPPED / "users.acl").read_text().splitlines() if line.startswith("user trie-worker ")
    ]
    assert f"~lmpool:row:{info.fingerprint}:*)" in line


async def test_a_producer_marks_the_model_as_wanted_and_an_operator_sees_it(
    server: SecureServer, workers: Workers
) -> None:
    rules = next(line for line in (SHIPPED / "users.acl").read_text().splitlines() if line.startswith("user producer "))
    without = re.sub(r" \([^()]*:wanted\)", "", rules.partition(" resetchannels")[2])
    with server.client("admin") as admin:
        admin.execute_command(
            "ACL", "SETUSER", "before", "on", "resetchannels", *_split(without), f">{password_of('before')}"
        )
    async with Server(server.url("operator")).client() as operator, Server(server.url("web")).client() as page:
        # The user "before" has the rights of an older release: its requests run, but no operator sees that it waits.
        for user, wanted in (("before", 0), ("producer", 1)):
            await wait_in_vain(server.url(user))
            assert [(await read_demand(client, KEYS, "none")).wanted for client in (operator, page)] == [wanted, wanted]


async def wait_in_vain(url: str) -> None:
    """Wait for a missing model until the timeout; retry with longer timeouts if only connecting takes so long."""
    for timeout in (0.5, 5.0, 50.0):
        try:
            await Producer("none", redis=url, when_absent="wait").open(timeout=timeout)
        except NoWorker:
            return
        except ServerUnreachable:
            continue
        pytest.fail("there is such a model")
    pytest.fail("the server cannot be reached")


def _split(rules: str) -> list[str]:
    """Split a user's line into its rules; a text in parentheses is one rule with its own commands and keys."""
    return re.findall(r"\([^()]*\)|\S+", rules)
