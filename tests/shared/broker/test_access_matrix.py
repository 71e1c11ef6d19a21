"""Which user of docker/redis may read and write which key of a pool, checked with every command of the server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.exceptions import NoPermissionError

from lmpool.admin.queue import DeadLetters
from lmpool.admin.survey import read_survey
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_memory
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE
from lmpool.workers.trie import TrieBackend, TrieSettings
from tests.shared.broker.secure_server import SHIPPED, SecureServer

TRIE_ROWS = Keys().row(TrieBackend(TrieSettings()).info.fingerprint).decode()

# Kinds of commands that a user may run on a key: "r" reading, "w" writing, "rw" both, "-" none. A writing command may
# be as weak as setting a lifetime; test_access.py has the commands that no user may run.
ACCESS = f"""
key                       producer adapters weights worker trie-worker web operator batch
lmpool:models             r        r        r       rw     -           r   r        r
lmpool:models:trie        r        r        r       rw     rw          r   r        r
lmpool:loading            r        r        r       rw     rw          r   r        r
lmpool:worker:w           r        r        r       rw     rw          r   r        r
lmpool:row:f:d            rw       rw       rw      rw     r           rw  rw       rw
{TRIE_ROWS}d              rw       rw       rw      rw     rw          rw  rw       rw
lmpool:tokenizer:d        r        r        r       rw     -           r   r        r
lmpool:trie:d             rw       rw       rw      rw     r           rw  rw       rw
lmpool:tokens:d           rw       rw       rw      rw     -           rw  rw       rw
lmpool:weights:n          w        w        w       -      r           w   w        w
lmpool:{{m}}:jobs         rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:lane:w       rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:lanes        rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:backlog      rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:backlog:jobs rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:virtual_time rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:sole_client  rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:wanted       w        w        w       -      -           rw  rw       w
lmpool:{{m}}:capacity     r        r        r       rw     -           r   r        r
lmpool:{{m}}:workers      r        r        r       rw     -           r   r        r
lmpool:{{m}}:loading      r        r        r       rw     -           r   r        r
lmpool:{{m}}:claim_cursor -        -        -       rw     -           -   -        -
lmpool:{{m}}:watcher      w        w        w       rw     -           w   w        w
lmpool:{{m}}:turn         -        -        -       rw     -           -   -        -
lmpool:{{m}}:complete_turn -       -        -       rw     -           -   -        -
lmpool:{{m}}:waiting:d    rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:partition:d  rw       rw       rw      -      -           rw  rw       rw
lmpool:{{m{{3}}:jobs      rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m{{3}}:waiting:d rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:reply:c      rw       rw       rw      rw     -           rw  rw       rw
lmpool:{{m}}:moved        r        r        r       w      -           r   r        r
lmpool:{{m}}:adapters     r        rw       r       rw     -           r   r        r
lmpool:{{m}}:adapter_check:n -        rw       -       rw     -           -   -        -
lmpool:{{m}}:adapter_load:l -        -        -       rw     -           -   -        -
lmpool:{{m}}:versions     r        r        rw      rw     -           r   r        r
lmpool:{{m}}:versions:state r        r        rw      rw     -           r   r        r
lmpool:{{m}}:versions:turn:0 -        -        -       rw     -           -   -        -
lmpool:{{m}}:versions:data:n:0 -        -        w       rw     -           -   -        -
lmpool:{{m}}:dead         r        r        r       rw     -           r   rw       r
lmpool:{{m}}:reasons      -        -        -       rw     -           -   -        -
lmpool:{{trie}}:jobs      rw       rw       rw      rw     rw          rw  rw       rw
lmpool:{{trie}}:waiting:d rw       rw       rw      rw     rw          rw  rw       rw
lmpool:{{trie}}:reply:c   rw       rw       rw      rw     rw          rw  rw       rw
lmpool:{{trie}}:dead      r        r        r       rw     rw          r   rw       r
lmpool:{{trie}}:adapters  r        rw       r       rw     w           r   r        r
other:models              -        -        -       -      -           -   -        -
arq:lmpool:batch          -        -        -       -      -           -   -        rw
"""
# Commands without a key that every user may run (OF_ALL) or one user may run (WITHOUT_KEY). test_access.py checks INFO.
# SCRIPTS may name any key of the pool, because the server checks each command in a script.
OF_ALL = {"asking", "cluster|slots", "exec", "multi", "ping", "select", "time"} | {
    f"command|{name}" for name in ("count", "docs", "getkeys", "getkeysandflags", "help", "info", "list")
}
WITHOUT_KEY = {"producer": set(), "adapters": set(), "weights": set(), "worker": set(), "trie-worker": set(),
               "web": set(), "operator": {"scan"}, "batch": {"dbsize", "discard", "unwatch"}}  # fmt: skip
# Arguments to try for commands whose keys follow a number of keys, or a word.
MOVABLE = ("1 KEY", "1 KEY MIN", "0 1 KEY MIN", "KEY 1 KEY", "x 1 KEY", "STREAMS KEY 0", "GROUP g c STREAMS KEY >")
SCRIPTS = {"eval", "evalsha"}


class Command(NamedTuple):
    words: tuple[str, ...]
    forms: tuple[tuple[str, ...], ...]  # Lists of arguments; "KEY" stands for the key.
    is_write: bool
    categories: frozenset[str]

    @property
    def name(self) -> str:
        return "|".join(self.words)


@pytest.fixture(scope="module", params=["tls", "embedded"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    with SecureServer(tmp_path_factory.mktemp("s"), tls=request.param == "tls").running() as running:
        yield running


def commands_of(admin: Any) -> Iterator[Command]:
    """All commands and subcommands that a server has."""
    admin.response_callbacks.pop("COMMAND", None)
    for entry in admin.execute_command("COMMAND"):
        subcommands = entry[9] if len(entry) > 9 else []
        for name, arity, flags, first, last, _, categories, *_ in subcommands or [entry]:
            words = tuple(name.decode().split("|"))
            flat = {flag.decode() for flag in flags}
            if "no_auth" in flat:  # Any user may send AUTH, HELLO, QUIT and RESET.
                continue
            least = max(abs(arity) - len(words), 1 if first else 0)
            if first:
                start = first - len(words)
                end = (last - len(words) if last > 0 else start) + 1
                arguments = ["KEY" if start <= at < end else "1" for at in range(max(least, end))]
                forms = [tuple(arguments)]
            else:
                forms = [("x",) * least]
            if "movablekeys" in flat:
                forms += [tuple(line.split()) for line in MOVABLE]
            yield Command(words, tuple(forms), "write" in flat, frozenset(c.decode().strip("@") for c in categories))


def replies_of(admin: Any, calls: list[tuple[str, ...]]) -> list[Any]:
    """The server's replies to commands; an error is a reply, too."""
    with admin.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*call)
        replies: list[Any] = pipe.execute(raise_on_error=False)
    return replies


def on_a_key(admin: Any, commands: list[Command]) -> list[tuple[Command, tuple[str, ...]]]:
    """The commands that name keys, each with the arguments in which the server finds one key."""
    forms = [(command, form) for command in commands if command.name not in SCRIPTS for form in command.forms]
    found = replies_of(admin, [("COMMAND", "GETKEYS", *command.words, *form) for command, form in forms])
    return [pair for pair, keys in zip(forms, found, strict=True) if isinstance(keys, list) and b"KEY" in keys]


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The users, and for each key the rights of each user, as the table `ACCESS` lists them."""
    (_, *users), *rows = (line.split() for line in ACCESS.strip().splitlines())
    return users, {key: access for key, *access in rows}


def test_the_table_has_every_key_of_a_pool() -> None:
    keys, model = Keys(), Keys().model("m")
    made = {getattr(model, name) for name in dir(model) if isinstance(getattr(model, name), bytes)} - {model.base}
    made |= {keys.models(), keys.trie_models(), keys.loading(), keys.worker("w"), keys.row("f"), keys.vocabulary("d"),
             keys.tokenizer("d"), keys.weights(), model.lane("w"), model.reply("c"), model.adapter_check("n"),
             model.adapter_load("l"), model.version_turn(0), model.version_data("n", 0)}  # fmt: skip
    listed = table()[1]
    assert {key.decode() for key in made if not any(name.startswith(key.decode()) for name in listed)} == set()
    assert keys.trie_models().decode().endswith(TRIE_SERVICE)


def test_every_user_reads_and_writes_the_keys_of_the_table_and_runs_no_dangerous_command(server: SecureServer) -> None:
    users, expected = table()
    found: dict[str, list[str]] = {key: [] for key in expected}
    with server.client("admin") as admin:
        commands = list(commands_of(admin))
        assert len(commands) > 300
        forms = on_a_key(admin, commands)
        with_keys = {command for command, _ in forms}
        for user in users:
            dry_run = ("ACL", "DRYRUN", user)
            replies = replies_of(admin, [(*dry_run, *command.words, *command.forms[0]) for command in commands])
            # For a command that the user may run on some key, the server refuses the key, not the command.
            usable = {c for c, reply in zip(commands, replies, strict=True) if b"to run the" not in as_bytes(reply)}
            assert not {command.name for command in usable if command.categories & {"dangerous", "admin"}}, user
            assert {command.name for command in usable - with_keys} - SCRIPTS - OF_ALL == WITHOUT_KEY[user], user
            calls = [(key, command, form) for key in expected for command, form in forms if command in usable]
            replies = replies_of(
                admin, [(*dry_run, *c.words, *(word.replace("KEY", key) for word in form)) for key, c, form in calls]
            )
            kinds = {(key, c.is_write) for (key, c, _), reply in zip(calls, replies, strict=True) if reply == b"OK"}
            for key, access in found.items():
                access.append("r" * ((key, False) in kinds) + "w" * ((key, True) in kinds) or "-")
    assert found == expected


def as_bytes(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else str(reply).encode()


async def test_the_pages_user_reads_everything_and_cannot_drop_dead_letters(server: SecureServer) -> None:
    with server.client("admin") as admin:
        admin.xadd(Keys().model("m").dead, {"m": b"job", "e": b"why"})
        admin.acl_log_reset()
        async with Server(server.url("web")).client() as page:
            letters = DeadLetters(page, Keys().model("m"))
            (letter,) = await letters.newest(5)
            await read_survey(page, Keys())
            assert await read_memory(page) is not None
            assert not (refused := server.refusals()), "\n".join(refused)
            with pytest.raises(NoPermissionError):
                await letters.drop([letter])
        assert admin.xlen(Keys().model("m").dead) == 1
        admin.delete(Keys().model("m").dead)


def test_the_file_for_redis_6_2_is_made_of_rules_that_it_has_and_allows_no_sort(tmp_path: Path) -> None:
    readme = (SHIPPED / "README.md").read_text("utf-8").partition("### Redis 6.2")[2]
    (way,) = re.findall(r"^(sed .* users\.acl)$", readme, re.MULTILINE)
    made = subprocess.run(["sh", "-c", way], cwd=SHIPPED, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"[()]|%[RW]|sort_ro", made)
    for line in made.splitlines():
        # Redis 6.2 does not check the keys after BY and GET, so SORT could read keys of other users.
        _, has_category, behind = line.rpartition("+@sortedset ")
        assert not has_category or behind.startswith("-sort "), line.split()[1]
        assert not re.search(r"\+sort\b|\+@(all|read|write|list|set)\b", line)
