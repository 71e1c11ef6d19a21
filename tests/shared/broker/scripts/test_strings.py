"""Scripts set several strings with one MSETEX, if the server has this command and the user may run it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.keys import GROUP
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    JOBS,
    LIFETIME_MS,
    ROW_MS,
    ROWS,
    A,
    digest,
    entries_of,
    finish_args,
    finish_storing,
    register,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_server  # noqa: F401
from tests.support.pool import PATIENCE

USERS = Path(__file__).parents[4] / "docker/redis/users.acl"


async def has_command(redis: redis_async.Redis) -> bool:
    """Whether the server has the command MSETEX, which Redis 8.4 and Valkey 9.1 introduced."""
    known: Any = await redis.eval("return redis.call('COMMAND', 'INFO', 'MSETEX')[1] and 1 or 0", 0)
    return bool(known)


@pytest.fixture(name="admin")
async def clean_server(server: str) -> AsyncIterator[redis_async.Redis]:
    """A client with all rights on a server with an empty queue."""
    client = redis_async.Redis.from_url(server, **PATIENCE)
    await client.flushall()
    await client.config_resetstat()
    await client.xgroup_create(JOBS, GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()


@pytest.fixture(params=["default", "limited"], name="redis")
async def script_user(
    request: pytest.FixtureRequest, admin: redis_async.Redis, server: str
) -> AsyncIterator[redis_async.Redis]:
    """Two clients: one of a user with all rights, and one of a user that may not run MSETEX."""
    if request.param == "default":
        yield admin
        return
    rights = ["+@all", *(["-msetex"] if await has_command(admin) else [])]
    await admin.acl_setuser("limited", enabled=True, reset=True, passwords=["+secret"], keys=["*"], commands=rights)
    client = redis_async.Redis.from_url(server, username="limited", password="secret", **PATIENCE)
    # Connect before the counters are reset: old servers refuse commands that redis-py sends when it connects.
    await client.ping()
    await admin.config_resetstat()
    await admin.acl_log_reset()
    yield client
    await client.aclose()
    await admin.acl_deluser("limited")


async def calls(admin: redis_async.Redis, command: str) -> int:
    """Number of calls of a Redis command, including calls in scripts."""
    counts: dict[str, Any] = await admin.info("commandstats")
    return int(counts.get(f"cmdstat_{command}", {}).get("calls", 0))


async def assert_set_by(admin: redis_async.Redis, redis: redis_async.Redis, count: int) -> None:
    """Check that a script has set strings with MSETEX where possible, and that the server counts no refusal."""
    is_together = await has_command(admin) and redis is admin
    assert await calls(admin, "msetex") == int(is_together)
    assert await calls(admin, "set") == (0 if is_together else count)
    # NOSCRIPT is no error here: the client then sends the text of the script.
    assert (await admin.info("errorstats")).keys() <= {"errorstat_NOSCRIPT"}
    assert await admin.acl_log() == []


@pytest.mark.parametrize("has_lanes", [False, True])
async def test_new_prompts_are_registered_together(
    admin: redis_async.Redis, redis: redis_async.Redis, has_lanes: bool
) -> None:
    for worker in ("w1", "w2") if has_lanes else ():
        await register(redis, worker, 8)
        await take(redis, worker)
    assert await submit(redis, 1, 2, 2, 3) == "QQJQ"
    await assert_set_by(admin, redis, 3)
    entries = {fields[b"m"]: entry for entry, fields in await entries_of(redis)}
    entries |= {b"job-%d" % number: b"" for number in (1, 2, 3) if has_lanes}
    for number in (1, 2, 3):
        known = await registered(redis, number)
        assert known.keys() == {b"job", A}
        assert has_lanes or known[b"job"] == entries[b"job-%d" % number]
        assert 0 < await redis.pttl(waiting(number)) <= LIFETIME_MS


async def test_rows_are_stored_together(admin: redis_async.Redis, redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    entries, rows = await take(redis), [b"row1", b"row2", b"row3"]
    await admin.config_resetstat()
    assert await finish_storing(redis, entries, rows) == b"1"
    await assert_set_by(admin, redis, 3)
    assert [fields[b"v"] for fields in await told(redis, A)] == [b"".join(rows)]
    for number, row in enumerate(rows, 1):
        assert await redis.get(ROWS + digest(number)) == row
        assert 0 < await redis.pttl(ROWS + digest(number)) <= ROW_MS


async def test_where_one_row_is_there_already_the_others_are_stored_all_the_same(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    await redis.set(ROWS + digest(2), b"before")
    assert await finish_storing(redis, await take(redis), [b"row1", b"row2", b"row3"]) == b"1"
    stored = [await redis.get(ROWS + digest(number)) for number in (1, 2, 3)]
    assert stored == [b"row1", b"before", b"row3"]
    carried = {fields[b"d"]: fields.get(b"v") for fields in await told(redis, A)}
    assert carried == {digest(1) + digest(3): b"row1row3", digest(2): None}


async def test_two_jobs_of_one_prompt_store_its_row_once(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    lost = await redis.xadd(JOBS, {"m": b"job-1"})
    entries = await take(redis)
    assert lost in entries
    keys = [JOBS, DEAD, *2 * [waiting(1)], *2 * [ROWS + digest(1)]]
    args = finish_args(*((entry, b"", False) for entry in entries), rows=[b"row1", b"row1"], row_ms=ROW_MS)
    assert await scripts.FINISH(redis, keys, args) == b"1"
    assert await redis.get(ROWS + digest(1)) == b"row1"
    assert [fields.get(b"v") for fields in await told(redis, A)] == [b"row1"]
    assert await entries_of(redis) == []


def test_the_readme_explains_how_users_with_few_rights_get_this_right() -> None:
    """The shipped users.acl lacks MSETEX, with which old servers would not start; the README's command adds it."""
    users = USERS.read_text()
    assert "msetex" not in users
    (command,) = re.findall(r"^sed '(s/\+set /.*)' users\.acl$", (USERS.parent / "README.md").read_text(), re.MULTILINE)
    _, before, after, _ = command.split("/")
    changed = re.sub(before.replace("+", r"\+"), after, users)
    for line in changed.splitlines()[1:]:
        for rights in re.findall(r"\(([^)]*~lmpool:(?:\{[^}]*\}:waiting|row):[^)]*)\)", line):
            assert ("+set " in rights) == ("+msetex " in rights)
