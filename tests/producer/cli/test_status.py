"""`lmpool top` and `lmpool status`: their tables at any width, and the live view while the server restarts."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from pathlib import Path

from rich.console import Console

from lmpool.admin.fleet import summarize
from lmpool.admin.survey import Survey
from lmpool.embedded import EmbeddedServer
from lmpool.producer import SyncProducer
from lmpool.producer.cli.status import STATUS, TOP, seconds, survey_tables
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, WorkerProcess, lmpool_command, pending, run_lmpool, until, until_async
from tests.support.scrape import free_port, scrape

LONG = "mistralai/Mistral-Nemo-Instruct-2407-a-rather-long-name"


def lines_of(models: Survey, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    for columns in (STATUS, TOP):
        console.print(*survey_tables(models, columns))
    return console.export_text().splitlines()


def folded(lines: list[str], column: int) -> str:
    """Join the texts of one column of a table, which may be folded into several lines."""
    return "".join(cells[column].strip() for line in lines if len(cells := line.strip("│┃").split("│")) > column)


def a_worker(name: str) -> dict[str, object]:
    fields = {"state": "draining", "rows": "1234567", "rows_per_s": "12345.6", "in_flight": "128", "failures": "3"}
    more = {"batch": "31.9", "p50_s": "0.0123", "p99_s": "0.25", "tokens": "200", "reused": "50", "silent_s": 2.2}
    more |= {"lane": 57, "homed": "123456", "stolen": "789"}
    return {"id": name, "model": LONG, **fields, **more}


def a_model(name: str) -> dict[str, object]:
    numbers = {"queued": 0, "age_s": 0.0, "dead": 0, "rows_per_s": 0.0, "p50_s": None, "p99_s": None}
    return with_workers({"name": name, "info": {"name": name, "vocab_size": 512}, **numbers})


def with_workers(model: dict[str, object], *workers: dict[str, object]) -> dict[str, object]:
    return {**model, "workers": list(workers), "summary": summarize(workers)}


def test_names_are_never_cut_and_tables_fit_at_any_width() -> None:
    assert "512" not in "".join(lines_of([a_model("trie")], 200)), "trie workers serve any vocabulary"
    assert "512" in "".join(lines_of([a_model("syn")], 200))
    ids = [f"gpu-node-17.cluster.example.org-{number}-ab{number}" for number in range(3)]
    model = {"name": LONG, "info": None, "queued": 99_999, "age_s": 61.0, "dead": 2, "rows_per_s": 30_000.0}
    models: Survey = [with_workers({**model, "p50_s": 0.01, "p99_s": 0.2}, *map(a_worker, ids))]
    for width in (60, 80, 100, 120, 200):
        lines = lines_of(models, width)
        assert all(len(line) <= width for line in lines)
        assert "…" not in "".join(lines)
        assert LONG in folded(lines, 0) or LONG in folded(lines, 1)
        for name in ids:
            assert name in folded(lines, 0)
        assert "99999" in "".join(lines)
    for width, shown in ((80, ("lane", "reuse")), (100, ("lane", "reuse", "heartbeat"))):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
        console.print(survey_tables(models, STATUS)[1])
        (titles,) = [line for line in console.export_text().splitlines() if "state" in line]
        assert all(title in titles for title in shown)
    widest = "\n".join(lines)
    for text in ("batch", "p50", "heartbeat", "25%", "12 ms", "250 ms", "2.2 s", "57", "123456", "789"):
        assert text in widest


def test_ranks_and_devices_are_shown_if_a_model_is_spread_over_several_devices() -> None:
    model = with_workers(a_model("m"), a_worker("one"), {**a_worker("two"), "ranks": 2, "devices": "cuda:0 cuda:1"})
    spread = "\n".join(lines_of([model], 300))
    assert spread.count("cuda:0 cuda:1") == spread.count("ranks") == 2, "in `status` and in `top`"
    assert "devices" not in "\n".join(lines_of([with_workers(model, a_worker("one"))], 300))


def on_a_terminal(command: list[str], width: int) -> str:
    """Return the output of a command on a terminal of this width, without colours."""
    controlling, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    # Let Python buffer its output: without a buffer it would drop the rest of a short write to a terminal.
    settings = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(width), "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, **settings}
    )
    seen, end = b"", b"\x04"
    watcher = threading.Thread(target=lambda: (process.wait(), os.write(terminal, end)))
    watcher.start()
    # Read until the end mark, because the output of the process arrives with a delay.
    while not seen.endswith(end):
        seen += os.read(controlling, 65536)
    watcher.join()
    os.close(controlling)
    os.close(terminal)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", seen.removesuffix(end).decode())


def test_durations_have_readable_units() -> None:
    written = [seconds(value) for value in (0.00085, 0.0034, 0.0123, 0.25, 3.42, 61.2, 7200.0)]
    assert written == ["850 µs", "3.4 ms", "12 ms", "250 ms", "3.4 s", "61 s", "120 min"]


def test_once_shows_two_models_with_their_queues_rates_and_times(pool: Pool) -> None:
    pool.start("--lease-s", 30)
    pool.start("--lease-s", 30, "--step-ms", 20, "--name", LONG)
    for name in ("syn", LONG):
        with SyncProducer(name, redis=pool.url, prefix=pool.prefix) as producer:
            producer.batch_logprobs([[i] for i in range(20)])
    command = ("top", "--once", "--redis", pool.url, "--prefix", pool.prefix)
    models = json.loads(run_lmpool(*command, "--json").stdout)
    assert [model["name"] for model in models] == [LONG, "syn"]
    for model in models:
        assert (model["queued"], model["age_s"], model["dead"]) == (0, 0, 0)
        (worker,) = model["workers"]
        assert 0 <= worker["silent_s"] < 30
        assert worker["state"] == "ready"
    text = run_lmpool(*command, COLUMNS="80").stdout
    assert "too narrow" not in text, "without a terminal, all columns fit"
    assert "\x1b" not in text
    assert any(LONG in line and "ready" in line for line in text.splitlines())
    text = on_a_terminal([*lmpool_command(), *command], 80)
    assert LONG in folded(text.splitlines(), 0)
    assert "ready" in text
    # Check only some columns, and the captions of both tables: the width of times decides how many columns fit.
    captions = re.findall(r"too narrow for ((?:[\w-]+, )*[\w-]+)", " ".join(text.split()))
    assert any({"rows", "in-flight", "reuse", "heartbeat"} <= set(caption.split(", ")) for caption in captions), (
        "a caption names the columns that do not fit"
    )


async def test_homed_reused_and_stolen_prompts_are_shown(pool: Pool, tmp_path: Path) -> None:
    slow, fast = Gate(tmp_path / "slow"), Gate(tmp_path / "fast")
    # After a pause of a lease, the thief would also compute the prompts that the slow worker holds.
    options, ports = ("--lease-s", 6, "--max-batch", 4, "--token-ms", 0.001, "--log-every-s", 0.5), {}
    for gate in (slow, fast):
        gate.open()
        port, command = free_port(), gate.command
        started = await asyncio.to_thread(
            lambda: pool.start(*options, "--metrics-port", port, command=command)  # noqa: B023  awaited at once
        )
        (name,) = re.findall(r"as worker (\S+)", started.text)
        ports[name] = port
    held_up, thief = ports

    async def workers() -> dict[str, dict[str, float]]:
        done = await asyncio.to_thread(run_lmpool, "status", "--json", "--redis", pool.url, "--prefix", pool.prefix)
        (model,) = json.loads(done.stdout)
        return {worker["id"]: worker for worker in model["workers"]}

    def value(worker: str, name: str) -> float:
        return scrape(ports[worker]).value(f"lmpool_worker_{name}", model="syn")

    contexts = [[number] * 40 for number in range(8)]
    async with pool.producer("syn") as producer:

        async def are_homed() -> bool:
            for context in contexts:
                context.append(0)
            await producer.batch_logprobs(contexts)
            seen = (await workers()).values()
            return all(worker["homed"] > 0 and worker["reused"] > 0 for worker in seen)

        await until_async(are_homed, "growing prompts return to their worker and reuse its prefix cache")
        slow.shut()
        requests = [asyncio.ensure_future(producer.logprobs([100, number])) for number in range(60)]

        async def are_taken() -> bool:
            holders = [entry["consumer"].decode() for entry in pending(pool)]
            return holders == [held_up] * sum(not task.done() for task in requests) != []

        await until_async(are_taken, "the other worker computes the prompts that the slow one does not hold")
        seen = await workers()
        lane = seen[held_up]["lane"]
        assert lane + int(pool.redis.xlen(pool.keys.model("syn").jobs)) == pool.held()
        assert lane > seen[thief]["lane"] == 0

        async def is_counted() -> bool:
            seen.update(await workers())
            counted = await asyncio.to_thread(
                lambda: {
                    name: (value(name, "homed_jobs_total"), value(name, "stolen_jobs_total"), value(name, "lane_jobs"))
                    for name in seen
                }
            )
            same = {name: (worker["homed"], worker["stolen"], worker["lane"]) for name, worker in seen.items()}
            return counted == same and seen[thief]["stolen"] > 0

        await until_async(is_counted, "heartbeats, commands and metrics agree")
        shown = await asyncio.to_thread(run_lmpool, "top", "--once", "--redis", pool.url, "--prefix", pool.prefix)
        cells = [re.split(r" *[┃│] *", line) for line in shown.stdout.splitlines()]
        titles, line = (next(row for row in cells if name in row) for name in ("stolen", held_up))
        assert line[titles.index("lane")] == str(lane)
        assert line[titles.index("homed")] == str(seen[held_up]["homed"])
        assert line[titles.index("reuse")] != "0%"
        slow.open()
        await asyncio.gather(*requests)

        async def are_empty() -> bool:
            return all(worker["lane"] == 0 for worker in (await workers()).values())

        await until_async(are_empty, "all lanes are empty")
    until(lambda: re.search(r"[1-9]\d* prompts homed", pool.workers[1].text), "the log counts homed prompts")
    until(lambda: re.search(r"[1-9]\d* stolen", pool.workers[1].text), "the log counts stolen prompts")


def test_latencies_of_all_workers_of_a_model_are_merged(pool: Pool) -> None:
    # The lease is so long that no heartbeat replaces the counts.
    workers = [pool.start("--lease-s", 3600), pool.start("--lease-s", 3600)]
    ids = [worker.text.rpartition("as worker ")[2].strip() for worker in workers]
    for name, counts in zip(ids, ("3:98", "8:2"), strict=True):
        pool.redis.hset(pool.keys.worker(name), mapping={"job_counts": counts, "id": "another"})
    (model,) = json.loads(run_lmpool("top", "--once", "--json", "--redis", pool.url, "--prefix", pool.prefix).stdout)
    assert 0.0005 < model["p50_s"] <= 0.001
    assert 0.025 < model["p99_s"] <= 0.05
    assert {worker["id"] for worker in model["workers"]} == set(ids)


def test_json_of_a_live_view_is_refused(pool: Pool) -> None:
    done = run_lmpool("top", "--json", "--redis", pool.url)
    assert done.returncode == 2
    assert done.stderr == "lmpool: --json: the live view has no JSON form; use --once --json\n"


def test_the_live_view_outlives_its_server_and_ends_at_ctrl_c(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "top", tmp_path)
    command = [*lmpool_command(), "top", "--interval", "0.1", "--redis", pool.url, "--prefix", pool.prefix]
    try:
        pool.start("--lease-s", 1)
        shown = WorkerProcess(command, tmp_path / "top.log")
        pool.workers.append(shown)
        until(lambda: "syn" in shown.text and "ready" in shown.text, "the view shows the worker")
        own_server.stop()
        until(lambda: "no Redis server answers" in shown.text, "the view shows that the server is unreachable")
        assert shown.is_running
        own_server.start()
        before = len(shown.text)
        until(
            lambda: "s ago)" not in shown.text[before:][-1500:] and "ready" in shown.text[before:],
            "the view shows the worker again",
        )
        shown.signal(signal.SIGINT)
        assert shown.wait() in (0, 130)
        assert "Traceback" not in shown.text
    finally:
        pool.end()


def test_the_live_view_restores_the_terminal(pool: Pool) -> None:
    pool.start()
    controlling, terminal = pty.openpty()
    command = [*lmpool_command(), "top", "--interval", "0.1", "--redis", pool.url, "--prefix", pool.prefix]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    seen = b""

    def read() -> bytes:
        nonlocal seen
        try:
            seen += os.read(controlling, 65536)
        except OSError:  # The process has closed its terminal.
            return b"ended"
        return seen

    try:
        until(lambda: b"ready" in read(), "the view shows the worker")
        process.send_signal(signal.SIGINT)
        until(lambda: read() == b"ended", "the view ends")
        assert process.wait(DEADLINE_S) in (0, 130)
    finally:
        process.kill()
        os.close(controlling)
    assert b"\x1b[?1049h" in seen
    assert seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h")
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
