"""`lmpool dead`: list, show, retry and drop dead letters (prompts that were given up), even if malformed."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from lmpool.admin.queue import DeadLetters, read_letter, summary
from lmpool.admin.survey import shortened
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError, WorkerError
from lmpool.producer.cli.queues import dead_app, letters_table
from lmpool.protocol.job import Failure, Job, digest_of
from lmpool.protocol.model_info import ModelInfo
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V, lmpool_command, run_lmpool, until

NASTY = "red \x1b[31m alert\nnext [bold]line\u202e \x07" + "x" * 5000
GIVEN_UP = Failure("WorkerError", "given up after 3 deliveries: its workers died")


class Ended(NamedTuple):
    """The result of a command: its output and its error."""

    stdout: str
    error: str
    stderr: str = ""


def dead(pool: Pool, *arguments: str, model: str | None = "syn") -> Ended:
    """Run `lmpool dead` in this process, which is faster than starting a process."""
    options = ["--redis", pool.url, "--prefix", pool.prefix, *(["--model", model] if model else [])]
    ended = CliRunner(env={"COLUMNS": "400"}).invoke(dead_app, [*arguments, *options])
    assert ended.exception is None or isinstance(ended.exception, LMPoolError), ended.output
    return Ended(ended.stdout, str(ended.exception or ""), ended.stderr)


def as_json(pool: Pool, *arguments: str) -> Any:
    """Run `lmpool dead` with `--json`; return its output."""
    ended = dead(pool, *arguments, "--json")
    assert not ended.error
    return json.loads(ended.stdout)


def refusal(ended: Ended) -> str:
    """Return the error of a command, which must be one line."""
    assert ended.error
    assert ended.error.isprintable()
    return ended.error


def fingerprint_of(pool: Pool) -> str:
    return ModelInfo.unpack(pool.redis.hget(pool.keys.models(), "syn")).fingerprint  # type: ignore[arg-type]


def bury(pool: Pool, data: bytes, failure: bytes = GIVEN_UP.pack(), entry: str = "*") -> str:
    """Add a dead letter as a worker does; return its id."""
    added: Any = pool.redis.xadd(pool.keys.model("syn").dead, {"e": failure, "m": data}, id=entry)
    return str(added, "ascii")


def ids_of(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


def job(prompt: list[int], fingerprint: str = "f" * 32, adapter: str = "", query: bytes = b"") -> bytes:
    return Job(ids_of(prompt), adapter, fingerprint, query=query).pack()


async def test_a_prompt_that_was_given_up_is_listed_shown_and_queued_again(pool: Pool) -> None:
    prompt = [99, 1, 2]
    # With --max-deliveries 1, a prompt is given up as soon as another worker claims it.
    ill = pool.start("--raise-token", 99, "--max-deliveries", 1, "--lease-s", 600)
    async with pool.producer("syn") as producer:
        request = asyncio.create_task(producer.logprobs(prompt))
        assert await asyncio.to_thread(ill.wait) == 2
        await asyncio.to_thread(pool.start, "--max-deliveries", 1, "--lease-s", 2)
        with pytest.raises(WorkerError):
            await asyncio.wait_for(request, DEADLINE_S)
    (listed,) = await asyncio.to_thread(as_json, pool, "list")
    assert listed["error"] == "WorkerError"
    assert listed["reason"].startswith("given up after 1 deliveries: the last worker that held it ended: MemoryError: ")
    assert listed["digest"] == digest_of(ids_of(prompt)).hex()
    assert listed["tokens"] == 3
    assert listed["asked"] == "row"
    shown = (await asyncio.to_thread(dead, pool, "show", listed["id"])).stdout
    assert re.search(r"^ids +99, 1, 2$", shown, re.MULTILINE)
    assert re.search(r"^given_up +20\d\d-", shown, re.MULTILINE)
    retried = await asyncio.to_thread(as_json, pool, "retry", listed["id"])
    assert retried == {"queued": [listed["id"]], "under_way": [], "refused": {}}
    row_key = pool.keys.row(fingerprint_of(pool)) + digest_of(ids_of(prompt))
    until(lambda: pool.redis.exists(row_key), "the row is in the cache")
    async with pool.producer("syn") as producer:
        assert np.array_equal(await producer.logprobs(prompt), synthetic_row(prompt, vocab_size=V))
        assert producer.stats().computed == 0
    assert (await asyncio.to_thread(dead, pool, "list")).stdout == "no prompt was given up\n"
    until(lambda: not pool.names("*waiting*") and not pool.jobs(), "the prompt has left no keys")
    assert pool.redis.type("keep") == b"none", "no stream of that name was created"


def test_a_command_inside_a_program_leaves_the_signal_handlers_of_the_program(pool: Pool) -> None:
    dead(pool, "list")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_list_without_a_model_shows_the_letters_of_all_served_models(pool: Pool) -> None:
    assert "; no model is served: pass --model" in dead(pool, "list", model=None).stdout
    assert "model" in refusal(dead(pool, "list", model="a{b}"))
    for name in ("one", "two"):
        pool.start(model=name)
        pool.redis.xadd(pool.keys.model(name).dead, {"e": GIVEN_UP.pack(), "m": job([1])})
    assert [letter["model"] for letter in json.loads(dead(pool, "list", "--json", model=None).stdout)] == ["two", "one"]
    table = dead(pool, "list", model=None).stdout
    assert re.search(r"model.*given up", table)
    assert "and 1 older ones" in dead(pool, "list", "--limit", "1", model=None).stdout
    assert [letter["model"] for letter in json.loads(dead(pool, "list", "--json", model="one").stdout)] == ["one"]


def test_a_letter_that_no_worker_can_compute_is_not_retried(pool: Pool) -> None:
    pool.start()
    fingerprint = fingerprint_of(pool)
    cases = {
        bury(pool, b"\x80\x04K\x01."): "the job cannot be decoded, so no worker can compute it: not a job",
        bury(pool, job([1])): f"it is for another model of this name: its fingerprint is {'f' * 32}, not {fingerprint}",
        bury(pool, job([V], fingerprint)): f"token id {V} is out of range",
        bury(pool, Job(b"abc", "", fingerprint).pack()): "3 bytes are not a whole number of uint32 ids",
        bury(pool, job([1], fingerprint, query=b"\xc1")): "the job cannot be decoded",
        bury(pool, job([1], fingerprint, "poet@12")): "the adapter 'poet' of revision '12' is no longer registered",
    }
    good = bury(pool, job([7, 7], fingerprint))
    line = refusal(dead(pool, "retry", *list(cases)[:3]))
    assert line.startswith("3 prompts were not queued again: ")
    for entry, reason in list(cases.items())[:3]:
        assert f"{entry}: {reason}" in line
    ended = dead(pool, "retry", "--all", "--json")
    outcome = json.loads(ended.stdout)
    assert "6 prompts were not queued again" in refusal(ended)
    assert outcome["queued"] == [good]
    for entry, reason in cases.items():
        assert reason in outcome["refused"][entry]
    assert pool.redis.xlen(pool.keys.model("syn").dead) == len(cases)
    assert dead(pool, "drop", "--all").stdout == "dropped 6 prompts\n"


def test_text_of_other_programs_is_escaped(pool: Pool) -> None:
    hostile = Failure(NASTY, NASTY).pack()
    ids = [
        bury(pool, job([1, 2], NASTY, NASTY), hostile),
        bury(pool, NASTY.encode("utf-8", "surrogatepass"), b"\xde\xad\xbe\xef"),
        bury(pool, Job(b"abc", NASTY, NASTY).pack(), b""),
        bury(pool, b"", b"", f"{2**64 - 1}-7"),
    ]
    listed = dead(pool, "list")
    assert not listed.error
    printed = [listed.stdout, *(dead(pool, "show", entry).stdout for entry in ids)]
    for text in printed:
        assert text.strip()
        assert all(line.isprintable() for line in text.splitlines())
        assert max(map(len, text.splitlines())) < 1000
    assert "[bold]" in printed[1]
    assert "\\x1b[31m" in printed[1]
    assert NASTY.encode("utf-8", "surrogatepass").hex()[:512] + "…" in printed[2]
    assert "at an impossible time" in printed[4]
    assert "this entry" not in refusal(dead(pool, "show", "\x1b[31m1-1"))


def test_unknown_letters_are_refused(pool: Pool) -> None:
    kept = bury(pool, job([1]))
    unknown = "'12-34' matches no dead letter: see `lmpool dead list`"
    assert unknown in refusal(dead(pool, "show", "12-34"))
    assert unknown in refusal(dead(pool, "drop", kept, "12-34"))
    assert "pass ids (see" in refusal(dead(pool, "drop"))
    assert "pass ids (see" in refusal(dead(pool, "retry", kept, "--all"))
    assert "pass --model for a model that is not served" in refusal(dead(pool, "show", kept, model=None))
    # Without a worker, dead letters can be shown and dropped, but not retried.
    assert "the model 'syn' is not served" in refusal(dead(pool, "retry", "--all"))
    assert [letter["id"] for letter in as_json(pool, "list")] == [kept]
    assert as_json(pool, "show", kept)["ids"] == [1]
    assert as_json(pool, "drop", kept) == {"dropped": 1}
    assert as_json(pool, "list") == []


def test_an_unambiguous_prefix_of_an_id_or_digest_is_enough(pool: Pool) -> None:
    pool.start()
    ids = [bury(pool, job([number]), entry=f"176{number}000000000-0") for number in range(4)]
    twins = [bury(pool, job([9]), entry=f"1800000000000-{number}") for number in range(2)]
    digest = digest_of(ids_of([2])).hex()
    for name in ("1762", ids[2][:-1], digest[:9], digest.upper(), ids[2]):
        assert as_json(pool, "show", name)["ids"] == [2], name
    for name, meant in (("176", ids), ("180", twins), (digest_of(ids_of([9])).hex(), twins)):
        for command in ("show", "retry", "drop"):
            line = refusal(dead(pool, command, name))
            assert f"'{name}' matches {', '.join(meant)}" in line
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 6
    assert as_json(pool, "drop", twins[0], "1763", digest[:9], ids[2]) == {"dropped": 3}
    assert [letter["id"] for letter in as_json(pool, "list")] == [twins[1], ids[1], ids[0]]


def test_an_ambiguous_prefix_lists_some_candidates(pool: Pool) -> None:
    for number in range(30):
        bury(pool, job([number]))
    line = refusal(dead(pool, "show", "1"))
    assert "and 22 more" in line
    assert line.count("-") == 8


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_ids_are_never_cut(width: int) -> None:
    letters = [read_letter(b"1763800000000-%d" % number, {b"e": GIVEN_UP.pack(), b"m": job([1])}) for number in (0, 17)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(letters_table([summary(letter) for letter in letters], has_models=False))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    cells = [line.strip("│┃┏┡└├").split("│")[0].strip() for line in lines]
    if width >= 40:
        assert {"1763800000000-0", "1763800000000-17"} <= set(cells)
    else:
        assert "1763800000000-17" in "".join(cells)
    columns = zip(*(line.strip("│").split("│") for line in lines if line.startswith("│")), strict=True)
    shown = ["".join(column).replace(" ", "") for column in columns]
    assert any("3deliveries:itsworkersdied" in column for column in shown), "the reason is folded and not cut"


def test_without_a_terminal_the_table_is_not_cut(pool: Pool) -> None:
    reason = Failure("WorkerError", "a long reason " * 20 + "and its end")
    entry = bury(pool, job([1, 2], adapter="an-adapter-of-some-length@" + "0" * 32), reason.pack())
    command = ["dead", "list", "--redis", pool.url, "--prefix", pool.prefix, "--model", "syn"]
    printed = run_lmpool(*command, COLUMNS="60").stdout
    (line,) = [line for line in printed.splitlines() if entry in line]
    for text in ("and its end", "0" * 32, digest_of(ids_of([1, 2]), "an-adapter-of-some-length@" + "0" * 32).hex()):
        assert text in line
    assert "\x1b" not in printed


def test_a_mistake_is_one_line_and_exit_code_2(pool: Pool) -> None:
    options = ["--redis", pool.url, "--prefix", pool.prefix, "--model", "syn"]
    command = [*lmpool_command(), "dead", "show", "12-34", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "lmpool: id: '12-34' matches no dead letter: see `lmpool dead list`\n"
    ended = run_lmpool("dead", "show", "", *options)
    assert ended.stderr == "lmpool: id: '' matches no dead letter: see `lmpool dead list`\n"


# The class DeadLetters


@pytest.fixture(params=[2, 3])
async def letters(pool: Pool, request: pytest.FixtureRequest) -> AsyncIterator[DeadLetters]:
    """The dead letters of a model, read by version 2 or 3 of Redis's protocol."""
    client = Server(f"{pool.url}?protocol={request.param}").client()
    yield DeadLetters(client, pool.keys.model("syn"))
    await client.aclose()


async def test_letters_are_read_in_order_and_in_small_pages(pool: Pool, letters: DeadLetters) -> None:
    ids = [bury(pool, job([number])) for number in range(30)]
    assert [letter.entry for letter in await letters.newest(100)] == ids[::-1]
    assert [letter.entry for letter in await letters.newest(11)] == ids[:-12:-1]
    seen = []
    async for letter in letters.oldest_first():
        seen.append(letter.entry)
        bury(pool, job([100]))  # Dead letters added now are not listed, so the loop ends.
    assert seen == ids
    assert await letters.drop(await letters.find(ids)) == 30
    assert await letters.count() == 30
    assert await letters.drop_all() == 30


@pytest.mark.parametrize("entry", ["", "-", "+", "1", "1-", "-1", "1-1-1", "(1-1", "$", f"{2**64}-0", "1-" + "9" * 30])
async def test_a_malformed_id_matches_no_letter(letters: DeadLetters, entry: str) -> None:
    with pytest.raises(SettingsError, match="matches no dead letter"):
        await letters.find([entry])


@given(data=st.binary(max_size=200), failure=st.binary(max_size=100), has=st.sampled_from(["em", "e", "m", ""]))
def test_any_bytes_can_be_read(data: bytes, failure: bytes, has: str) -> None:
    fields = {name.encode(): value for name, value in (("e", failure), ("m", data)) if name in has}
    letter = read_letter(b"1-1", fields)
    assert letter.failure.text.isprintable()
    assert letter.failure.kind.isprintable()
    assert letter.fault.isprintable()
    assert bool(letter.fault) or letter.job is not None


@given(st.text(max_size=600))
def test_printed_texts_are_short_and_printable(text: str) -> None:
    shown = shortened(text, 50)
    assert shown.isprintable()
    assert len(shown) <= 50
    if text.isprintable() and len(text) <= 50:
        assert shown == text


@pytest.mark.parametrize("command", [["list"], ["drop", "--all"]], ids=["list", "drop"])
async def test_a_mistyped_model_is_reported(pool: Pool, command: list[str]) -> None:
    await asyncio.to_thread(pool.start)
    ended = await asyncio.to_thread(dead, pool, *command, model="nope")
    assert "; the model 'nope' is not served; served are: syn" in ended.stdout
    ended = await asyncio.to_thread(dead, pool, *command, "--json", model="nope")
    assert ended.stdout in ("[]\n", '{"dropped": 0}\n')
    assert ended.stderr.startswith(
        "the model 'nope' is not served; served are: syn; start a worker with `lmpool worker "
    )
    assert ended.stderr.count("\n") == 1
    assert "served" not in (await asyncio.to_thread(dead, pool, *command)).stdout
