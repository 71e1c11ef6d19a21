"""The command line: its output, its errors and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from lmpool.broker.server import Server
from lmpool.producer import SyncProducer
from lmpool.protocol.keys import Keys
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, WorkerProcess, is_running, lmpool_command, server_pid, until
from tests.support.pool import run_lmpool as run
from tests.support.scrape import free_port


def on(pool: Pool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a client command on a pool."""
    return run(*arguments, "--redis", pool.url, "--prefix", pool.prefix)


# Pattern of the progress lines that a worker logs before an error.
_PROGRESS = "(loading|still loading|weights are loaded|the model runs|joining the pool)"


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a command, which must be one line."""
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    # Skip the progress lines that a worker logs before the error; on a busy machine there are several.
    (line,) = [line for line in ended.stderr.splitlines() if not re.match(rf"[\d:]{{8}} {_PROGRESS}", line)]
    assert line.startswith("lmpool: ")
    return line


def test_version_and_help() -> None:
    assert run("--version").stdout == f"lmpool {version('lmpool')}\n"
    ended = run("--help")
    assert ended.returncode == 0
    for command in ("up", "worker", "trie-worker", "trie", "logprobs", "status", "flush", "bench", "adapters", "dead"):
        assert re.search(rf"\b{command}\b", ended.stdout)


@pytest.mark.parametrize("command", [[], ["up"], ["worker"], ["logprobs"], ["trie", "show"], ["dead", "retry"]])
def test_every_command_has_a_short_option_for_its_help(command: list[str]) -> None:
    ended = run(*command, "-h")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == run(*command, "--help").stdout


def test_the_command_runs_as_a_module_and_prints_its_version() -> None:
    for code in (["-m", "lmpool", "--version"], ["-c", "import lmpool; print('lmpool', lmpool.__version__)"]):
        ended = subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.stdout, ended.stderr) == (run("--version").stdout, "")


def test_options_are_described_without_docstrings() -> None:
    command = [sys.executable, "-OO", *lmpool_command(), "worker", "--help-all"]
    wide = {**os.environ, "COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=wide)
    assert ended.returncode == 0, ended.stderr
    assert "Prefix of all Redis keys." in ended.stdout


FOREIGN_BACKENDS = {
    "plain": "",
    "raising": "raise RuntimeError('no licence\\nfound')",
    "unreadable": "def",
    "listed": "Settings = list",
    "nested": "Settings.__annotations__['litres'] = 'int | list[str]'",
    "unknown": "Settings.__annotations__['litres'] = 'Litres'",
    "colliding": "Settings = make_dataclass('Settings', [('model', str), ('redis', str)])",
}


def test_a_foreign_backend_needs_no_descriptions_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    settings = "Settings = make_dataclass('Settings', [('model', str), ('litres', float, 1.5)])\n"
    for name, end in FOREIGN_BACKENDS.items():
        (tmp_path / f"others_{name}.py").write_text(f"from dataclasses import make_dataclass\n{settings}{end}")
    info = tmp_path / "kitchen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen\nVersion: 1.0\n")
    lines = [f"{name} = others_{name}:Settings" for name in FOREIGN_BACKENDS]
    (info / "entry_points.txt").write_text("\n".join(["[lmpool.backends]", *lines]))
    ended = run("worker", "--help-all", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]), COLUMNS="200")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"--litres +<float> +\(default: 1.5\)", ended.stdout), ended.stdout
    warnings = {line.split("'")[1]: line for line in ended.stderr.splitlines()}
    assert warnings.keys() == FOREIGN_BACKENDS.keys() - {"plain"}
    for name, line in warnings.items():
        assert line.startswith(f"the backend '{name}' of others_{name}:Settings (kitchen) is left out: "), line
    assert "RuntimeError: no licence found" in warnings["raising"]
    assert "redis: the command has an option of this name" in warnings["colliding"]


@pytest.mark.parametrize("command", [[], ["trie"], ["adapters"], ["dead"]])
def test_a_command_without_arguments_prints_its_help_and_no_error(command: list[str]) -> None:
    ended = run(*command)
    assert ended.returncode == 2
    assert "Usage:" in ended.stdout + ended.stderr
    assert "lmpool:" not in ended.stderr


def test_logprobs_prints_a_table_or_json(pool: Pool) -> None:
    pool.start()
    row = synthetic_row([1, 2, 3], vocab_size=V)
    best = [int(token) for token in np.argsort(row, kind="stable")[::-1][:4]]
    ended = on(pool, "logprobs", "1, 2 3", "--ids", "--top", "4", "--json")
    assert ended.returncode == 0, ended.stderr
    output = json.loads(ended.stdout)
    assert output["ids"] == [1, 2, 3]
    assert [item["id"] for item in output["top"]] == best
    assert [item["logprob"] for item in output["top"]] == [float(row[token]) for token in best]
    table = on(pool, "logprobs", "1,2,3", "--ids", "--top", "4")
    assert f"{row[best[0]]:.4f}" in table.stdout


def test_commands_wait_for_a_worker_with_a_notice_and_end_with_ctrl_c(pool: Pool, tmp_path: Path) -> None:
    where = ("--redis", pool.url, "--prefix", pool.prefix)
    command = [*lmpool_command(), "logprobs", "1", "--ids", "--json", *where]
    waiting = [WorkerProcess(command, tmp_path / f"{at}.log") for at in range(2)]
    try:
        for process in waiting:
            process.until_says("waiting for a worker to serve a model: no model is served: start a worker with")
        waiting[0].signal(signal.SIGINT)
        assert waiting[0].wait() == 130
        assert "Traceback" not in waiting[0].text
        pool.start()
        assert waiting[1].wait() == 0
        notice, result = waiting[1].text.splitlines()
        assert notice.startswith("waiting for a worker")
        assert json.loads(result)["ids"] == [1]
    finally:
        for process in waiting:
            process.end()
    late = on(pool, "bench", "--model", "nope", "--timeout", "5", "--wait")
    assert late.returncode == 2
    why = (
        "the model 'nope' is not served; served are: syn; start a worker with `lmpool worker MODEL --name nope`, or "
        f"correct prefix={pool.prefix!r}, which names the pool"
    )
    assert late.stderr.splitlines() == [
        f"waiting for a worker to serve 'nope': {why}; this waits up to 5 s (--timeout); --no-wait fails at once",
        f"lmpool: no answer within 5 s: {why}",
    ]
    assert one_line(on(pool, "adapters", "list", "--model", "nope", "--no-wait")) == f"lmpool: {why}"
    for command in (["logprobs", "1"], ["bench"], ["adapters", "remove", "poet"], ["trie", "show"]):
        at_once = one_line(on(pool, *command, "--model", "nope"))
        assert at_once == f"lmpool: {why}; or pass --wait to wait for it", command


def test_without_a_named_server_commands_wait_only_with_the_option(tmp_path: Path) -> None:
    nowhere = {"LMPOOL_RUNTIME_DIR": str(tmp_path / "none")}
    (tmp_path / "in.jsonl").write_text('{"ids": [1]}')
    source, out = str(tmp_path / "in.jsonl"), tmp_path / "out"
    for command in (
        ["logprobs", "1"],
        ["adapters", "list"],
        ["trie", "show"],
        ["perplexity", source],
        ["batch", "run", source, str(out), "--what", "topk:2"],
    ):
        line = one_line(run(*command, **nowhere))
        assert line.startswith("lmpool: no Redis server was named and none of yours runs in ")
        assert line.endswith("LMPOOL_REDIS_URL; or pass --wait to wait for one")
    assert not out.exists()
    for server in (["--wait"], ["--redis", "redis://127.0.0.1:1"]):
        waited = run("perplexity", source, "--timeout", "3", *server, **nowhere)
        assert (waited.returncode, "waiting for the server: no Redis server " in waited.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["logprobs", "1", "--ids", "--timeout", "-1"], "lmpool: --timeout: -1.0 must be a number of seconds"),
        (["bench", "--redis", "http://x"], "lmpool: --redis: 'http://x' is not a Redis URL"),
        (["worker", "m", "--backend", "synthetic", "--log-format=xml"], "lmpool: --log-format: 'xml' is not one of"),
        (["worker", "m", "--backend", "synthetic", "--vocab-size", "-3"], "lmpool: --vocab-size: -3 "),
        (["status"], "or set --redis or LMPOOL_REDIS_URL"),
        (["logprobs", "1", "--no-wait"], "or set --redis or LMPOOL_REDIS_URL"),
        (["up"], "Missing argument 'MODEL'"),
    ],
    ids=" ".join,
)
def test_messages_name_options_and_not_arguments_of_python(command: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in one_line(run(*command, LMPOOL_RUNTIME_DIR=str(tmp_path / "none")))


def test_an_error_names_no_option_for_an_address_from_the_environment() -> None:
    assert one_line(run("status", LMPOOL_REDIS_URL="http://x")).startswith("lmpool: redis: 'http://x' is not")


@pytest.mark.parametrize("command", [["logprobs"], ["trie", "show"]], ids=" ".join)
def test_a_prompt_that_names_a_file_gets_a_hint(pool: Pool, tmp_path: Path, command: list[str]) -> None:
    pool.start()
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("1 2 3")
    for text, lines in [(str(prompt), 2), ("no such file", 1), ("x" * 5000, 1), (str(tmp_path), 1)]:
        printed = on(pool, *command, text).stderr.splitlines()
        assert len(printed) == lines
        assert (f"the prompt is the text {str(prompt)!r}, not the content of this file" in printed[0]) is (lines == 2)
    assert len(on(pool, *command, "--ids", str(prompt)).stderr.splitlines()) == 1


def test_logprobs_refuses_invalid_prompts(pool: Pool) -> None:
    pool.start("--max-prompt-tokens", 4)
    cases = [
        (["hello world"], "the model 'syn' has no tokenizer; pass token ids with --ids"),
        (["1,two", "--ids"], "ids: '1,two' is not a list of integers"),
        (["", "--ids"], "at least 1 token id"),
        (["99999", "--ids"], f"99999 is out of range: this model's ids go from 0 to {V - 1}"),
        (["1 2 3 4 5", "--ids"], "5 tokens: this model takes at most 4"),
        (["1", "--ids", "--model", "nope", "--no-wait"], "'nope' is not served; served are: syn"),
        (["1", "--ids", "--timeout", "-1"], "timeout: -1.0"),
        (["1", "--ids", "--top", "0"], "--top"),
    ]
    for arguments, message in cases:
        assert message in one_line(on(pool, "logprobs", *arguments))


def test_weights_are_published_and_listed_and_rows_of_a_version_are_dropped(pool: Pool, tmp_path: Path) -> None:
    save_file({"seed": np.array(7)}, full := tmp_path / "full.safetensors")
    save_file({"seed.indices": np.array([0]), "seed.values": np.array([8])}, sparse := tmp_path / "sparse.safetensors")
    save_file({"seed": np.array(-1)}, wrong := tmp_path / "wrong.safetensors")
    save_file({"leaf": np.array(1)}, other := tmp_path / "other.safetensors")
    pool.start()
    assert on(pool, "weights", "list").stdout == "clients use version 0, and no other version was published\n"
    on(pool, "logprobs", "1", "--ids")
    assert on(pool, "weights", "publish", str(full)).stdout == "version 1 is served\n"
    on(pool, "logprobs", "1", "--ids", "--model", "syn@1")
    published = on(pool, "weights", "publish", str(sparse), "--stored", "--version", "5", "--model", "syn")
    assert published.stdout == "version 5 is served\n"
    shown = json.loads(on(pool, "logprobs", "1,2", "--ids", "--json").stdout)
    assert shown["top"][0]["logprob"] == synthetic_row([1, 2], vocab_size=V, seed=8).max()
    assert "no worker serves version 6: weights: the seed: -1 " in one_line(on(pool, "weights", "publish", str(wrong)))
    assert "the tensor 'seed' is missing" in one_line(on(pool, "weights", "publish", str(other)))
    assert "must be above 5" in one_line(on(pool, "weights", "publish", str(full), "--version", "3"))
    listed = json.loads(on(pool, "weights", "list", "--json").stdout)
    assert (listed["used"], list(listed["versions"])) == (5, ["1", "5", "6"])
    table = on(pool, "weights", "list").stdout
    assert re.search(r"\b5\b.*served", table)
    assert "clients use version 5" in table
    for options in (("--version", "0"), ("--version", "1", "--model", "syn"), ()):
        assert on(pool, "flush", *options).stdout == "dropped 1 rows\n"
    why = "the model 'syn@4' is not served; `lmpool weights list --model syn` lists the versions of its weights"
    assert one_line(on(pool, "flush", "--version", "4")).startswith(f"lmpool: {why}")


def test_adapters_are_listed_added_and_removed(pool: Pool, tmp_path: Path) -> None:
    for version_ in ("one", "other"):
        (tmp_path / version_).write_text(version_)
    pool.start("--adapters", f"judge={tmp_path / 'one'}")
    assert list(json.loads(on(pool, "adapters", "list", "--json").stdout)) == ["judge"]
    added = on(pool, "adapters", "add", "poet", str(tmp_path / "other"))
    revisions = json.loads(on(pool, "adapters", "list", "--json").stdout)
    assert added.stdout == f"poet is in service, revision {revisions['poet']}\n"
    assert re.search(rf"poet\b.*{revisions['poet']}", on(pool, "adapters", "list").stdout)
    (best,) = json.loads(on(pool, "logprobs", "1,2", "--ids", "--top", "1", "--adapter", "poet", "--json").stdout)[
        "top"
    ]
    assert best["id"] == int(synthetic_row([1, 2], vocab_size=V, adapter_revision=revisions["poet"]).argmax())
    assert "cannot load the adapter 'poet'" in one_line(on(pool, "adapters", "add", "poet", str(tmp_path / "none")))
    assert "must be 1 to 100 characters" in one_line(on(pool, "adapters", "add", "a@b", str(tmp_path / "one")))
    for name in revisions:
        assert on(pool, "adapters", "remove", name).stdout == f"{name} is not in service any more\n"
    assert on(pool, "adapters", "list").stdout == "the model has no adapters\n"
    assert "no adapter 'poet'; it has: none" in one_line(on(pool, "adapters", "remove", "poet"))


def test_status_shows_models_workers_and_queues(pool: Pool) -> None:
    first, second = on(pool, "status").stdout.splitlines()
    assert first == f"no model is served under the prefix {pool.prefix!r} at {Server(pool.url)}"
    assert second.startswith("server: "), "a full server may be the reason"
    assert json.loads(on(pool, "status", "--json").stdout) == []
    pool.start()
    (model,) = json.loads(on(pool, "status", "--json").stdout)
    assert model["info"]["name"] == "syn"
    assert (model["queued"], model["dead"]) == (0, 0)
    (worker,) = model["workers"]
    assert worker["state"] == "ready"
    assert type(worker["rows"]) is int, "scripts can compute with it"
    assert worker["p50_s"] is None
    assert "Models" in on(pool, "status").stdout


def test_status_shows_a_worker_load_serve_and_drain(pool: Pool, tmp_path: Path) -> None:
    def states() -> list[tuple[str, str]]:
        output = json.loads(on(pool, "status", "--json").stdout)
        return [(model["name"], worker["state"]) for model in output for worker in model["workers"]]

    loads, steps = Gate(tmp_path / "loads"), Gate(tmp_path / "steps")
    words = [sys.executable, "-m", "tests.support.gated_worker", pool.url, pool.prefix, str(free_port())]
    worker = pool._launch([*words, str(tmp_path / "loads")], None, wait=False)
    until(lambda: states() == [("syn", "loading")], "status shows that the worker loads")
    assert "syn" in on(pool, "status").stdout
    assert "a worker is loading 'syn', try again in a moment" in on(pool, "logprobs", "1", "--ids", "--no-wait").stderr
    mistyped = on(pool, "logprobs", "1", "--ids", "--model", "sny", "--no-wait").stderr
    assert "try again" not in mistyped
    assert "being loaded: 'syn')" in mistyped
    loads.open()
    worker.until_says("serving ")
    until(lambda: states() == [("syn", "ready")], "status shows that the worker is ready")
    assert not pool.redis.exists(pool.keys.loading())
    busy = pool.start("--name", "busy", command=steps.command)
    with SyncProducer("busy", redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S) as producer:
        thread = threading.Thread(target=producer.logprobs, args=([1],))
        thread.start()
        until(lambda: pool.held("busy") == 1, "the worker holds a prompt")
        busy.signal(signal.SIGTERM)
        until(lambda: ("busy", "draining") in states(), "status shows that the worker drains")
        steps.open()
        thread.join()
    assert busy.wait() == 0
    assert states() == [("syn", "ready")]


def test_a_worker_that_cannot_load_leaves_no_keys(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    worker = pool.start("--backend", "hf", model=str(tmp_path), wait=False)
    assert worker.wait() == 2
    assert pool.names("*") == []


def test_flush_drops_the_cached_rows_of_one_model(pool: Pool) -> None:
    pool.start(model="one")
    pool.start("--seed", 5, model="two")
    for name in ("one", "two"):
        with SyncProducer(name, redis=pool.url, prefix=pool.prefix) as producer:
            producer.batch_logprobs([[i] for i in range(7)])
    assert on(pool, "flush", "--model", "one").stdout == "dropped 7 rows\n"
    assert on(pool, "flush").stdout == "dropped 7 rows\n"
    assert not pool.names("row:*")


def test_bench_measures_a_served_model(pool: Pool) -> None:
    pool.start()
    output = json.loads(on(pool, "bench", "--prompts", "50", "--length", "4", "--json").stdout)
    assert output["new_per_s"] > 0
    assert output["alone_p50_ms"] > 0
    assert "cached" in on(pool, "bench", "--prompts", "20").stdout
    assert "length: 999999 tokens; this model accepts at most" in one_line(on(pool, "bench", "--length", "999999"))


def test_every_mistake_is_one_line_and_exit_code_2(short_dir: Path, server_url: str) -> None:
    nobody = f"unix://{short_dir}/none.sock"
    cases = [
        (["status", "--redis", nobody], "no Redis server answers at unix://"),
        (["status", "--redis", "http://x"], "redis: 'http://x' is not a Redis URL"),
        (["worker", "syn", "--backend", "synthetic", "--redis", nobody], "no Redis server answers at"),
        (["worker", "no/such/model", "--redis", server_url], "model: no/such/model cannot be loaded"),
        (["worker", "./nowhere", "--redis", server_url], "there is no such folder"),
        # `lmpool up` reports the error once for two workers, before it starts a server.
        (["up", "./nowhere", "--workers", "2"], f"there is no such folder ({Path.cwd()}/nowhere)"),
        (
            ["worker", "~nobody-is-called-so/model", "--redis", server_url],
            "model: ~nobody-is-called-so/model cannot be",
        ),
        (["worker"], "Missing argument"),
        (["logprobs", "smollm2", "hello"], "(hello); a model is named by --model"),
        (["frobnicate"], "frobnicate"),
        (["status", "--colour"], "--colour"),
        (["up", "syn", "--backend", "synthetic", "--memory-mb", "0"], "memory_bytes"),
    ]
    for arguments, message in cases:
        assert message in one_line(run(*arguments)), arguments
    line = one_line(run("status", LMPOOL_RUNTIME_DIR=str(short_dir / "empty")))
    assert "lmpool up MODEL" in line


# A program that sends itself one signal while it works, and more signals while it cleans up.
INTERRUPTED = """
import asyncio, os, sys, typer
from lmpool.producer.cli.options import run
first, *others = map(int, sys.argv[1:])
async def work():
    try:
        os.kill(os.getpid(), first)
        await asyncio.sleep(3600)
    finally:
        print("cleans up", flush=True)
        for number in others:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
try:
    run(work())
except KeyboardInterrupt:
    print("interrupted")
except typer.Exit as ended:
    print("exit code", ended.exit_code)
"""


@pytest.mark.parametrize(
    ("signals", "code", "said"),
    [
        ([signal.SIGINT], 0, "cleans up\ninterrupted\n"),
        ([signal.SIGTERM], 0, "cleans up\nexit code 143\n"),
        ([signal.SIGHUP, signal.SIGHUP], 0, "cleans up\nexit code 129\n"),
        ([signal.SIGINT, signal.SIGINT], 130, "cleans up\n"),
        ([signal.SIGTERM, signal.SIGINT], 130, "cleans up\n"),
        ([signal.SIGHUP, signal.SIGTERM], 143, "cleans up\n"),
    ],
    ids=lambda given: "-".join(number.name for number in given) if isinstance(given, list) else "",
)
def test_a_first_signal_lets_a_command_clean_up_and_a_second_ends_it_without_a_traceback(
    signals: list[signal.Signals], code: int, said: str
) -> None:
    command = [sys.executable, "-c", INTERRUPTED, *(str(int(number)) for number in signals)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(3600)")
    with subprocess.Popen(
        [sys.executable, "-m", "lmpool", "status"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        assert command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        _, printed = command.communicate(timeout=DEADLINE_S)
    assert (command.returncode, printed) == (-signal.SIGINT, "")


def test_a_command_that_ignores_sigint_is_not_ended_by_it(tmp_path: Path) -> None:
    """A shell starts a background command (`&`) so that it ignores SIGINT."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); os._exit(7)")
    ended = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$0\" -m lmpool status", sys.executable],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 7


@pytest.fixture
def runtime(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder (for the sockets of embedded servers) for one test."""
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(short_dir / "run"))
    return short_dir / "run"


UP = ["up", "syn", "--backend", "synthetic", "--vocab-size", str(V)]


def test_up_is_found_by_clients_and_ends_with_ctrl_c(runtime: Path, tmp_path: Path) -> None:
    owner = WorkerProcess([*lmpool_command(), *UP], tmp_path / "up.log")
    try:
        owner.until_says("serving ")
        with SyncProducer() as producer:
            assert np.array_equal(producer.logprobs([1]), synthetic_row([1], vocab_size=V))
        assert json.loads(run("status", "--json").stdout)[0]["info"]["name"] == "syn"
        second = WorkerProcess([*lmpool_command(), "up", "other", "--backend", "synthetic"], tmp_path / "second.log")
        try:
            second.until_says("serving ")
            assert "your server runs already at unix://" in second.text
            second.signal(signal.SIGINT)
            assert second.wait() == 0
        finally:
            second.end()
        owner.signal(signal.SIGINT)
        assert owner.wait() == 0
        assert "Traceback" not in owner.text
        assert not (runtime / "redis.sock").exists()
    finally:
        owner.end()


def test_a_killed_up_leaves_no_server_behind(runtime: Path, tmp_path: Path) -> None:
    first = WorkerProcess([*lmpool_command(), *UP], tmp_path / "first.log", installed=True)
    try:
        first.until_says("serving ")
        pid = server_pid(runtime)
    finally:
        first.end()
    until(lambda: not is_running(pid), "the server ends with its owner")
    again = WorkerProcess([*lmpool_command(), *UP], tmp_path / "again.log")
    try:
        again.until_says("serving ")
        again.signal(signal.SIGTERM)
        assert again.wait() == 0
    finally:
        again.end()


def test_ctrl_c_while_loading_ends_up_and_its_server(runtime: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    owner = WorkerProcess([*lmpool_command(), "up", str(smollm2_folder)], tmp_path / "up.log", installed=True)
    try:
        owner.until_says("your server runs at")
        pid = server_pid(runtime)
        with redis.Redis(unix_socket_path=str(runtime / "redis.sock")) as client:
            until(lambda: client.hlen(Keys().loading()), "the model is being loaded")
        owner.signal(signal.SIGINT)
        owner.signal(signal.SIGINT)
        assert owner.wait() in (0, 130, -signal.SIGINT)
        until(lambda: not is_running(pid), "the server ends too")
        assert "Traceback" not in owner.text
    finally:
        owner.end()


def test_a_worker_logs_its_work_periodically(pool: Pool) -> None:
    worker = pool.start("--log-every-s", 0.5)
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        producer.batch_logprobs([[i] for i in range(40)])
        worker.until_says("prompts a batch")
    line = next(line for line in worker.text.splitlines() if "prompts a batch" in line)
    assert re.search(r"\d+\.\d rows/s, \d+\.\d prompts a batch, \d+ % of tokens from the prefix cache, ", line)
    assert re.search(r", \d+ prompts homed, 0 stolen, \d+ in flight, 0 failures", line)
    assert re.search(r"serving 'syn' \(synthetic, float32, V = 512, .*\) on \S+", worker.text)
    assert " 0.0 rows/s" not in worker.text, "an idle worker logs nothing"


def test_text_is_encoded_with_the_models_tokenizer(pool: Pool, smollm2_folder: Path) -> None:
    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    ended = on(pool, "logprobs", "The capital of France is", "--top", "3", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["top"][0]["token"] == " Paris"
    assert "' Paris'" in on(pool, "logprobs", "The capital of France is").stdout


def test_up_refuses_to_hide_from_the_programs_of_its_shell(runtime: Path) -> None:
    line = one_line(run(*UP, LMPOOL_REDIS_URL="redis://127.0.0.1:1"))
    assert "LMPOOL_REDIS_URL" in line
    assert not runtime.exists()


def test_flush_takes_the_prefix_literally(pool: Pool) -> None:
    pool.redis.set("foreign:row:x:y", 1, ex=60)
    assert run("flush", "--redis", pool.url, "--prefix", "*").stdout == "dropped 0 rows\n"
    assert pool.redis.exists("foreign:row:x:y")
    assert "prefix: " in one_line(run("flush", "--redis", pool.url, "--prefix", "{x}"))
