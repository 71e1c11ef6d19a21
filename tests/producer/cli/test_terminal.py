"""Commands and logs escape texts of other programs, so that these texts cannot control a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmpool.embedded import EmbeddedServer
from lmpool.errors import (
    LMPoolError,
    LogFormatter,
    ProtocolError,
    SettingsError,
    UnknownModel,
    WorkerError,
    printable,
    to_json,
)
from lmpool.producer import SyncProducer
from lmpool.producer.cli import commands
from lmpool.protocol.adapter import Adapter
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import check_name
from lmpool.workers.cli.serve import start_log
from tests.support.pool import Pool, V, lmpool_command, until

# Hostile text: window title, cleared screen, C1's CSI, forged line, reversed text, markup and emoji of rich.
NASTY = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n12:00:00 all is well\u2028\u202e[red]x[/] [/nothing] :bomb: \x7f\u200b"
# A valid model name with characters that a terminal or rich would interpret.
ALLOWED = "[red]\u202esyn[/] [/nothing] :bomb:"


class Ended(NamedTuple):
    """The result of a command: its output and its error."""

    output: str
    error: str


def run(pool: Pool, *arguments: str) -> Ended:
    """Run a client command in this process, which is faster than starting a process."""
    app = typer.Typer()
    commands.register(app)
    options = ["--redis", pool.url, "--prefix", pool.prefix]
    ended = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*arguments, *options])
    assert ended.exception is None or isinstance(ended.exception, (LMPoolError, SystemExit)), repr(ended.exception)
    return Ended(ended.stdout + ended.stderr, str(ended.exception or ""))


def is_harmless(text: str) -> bool:
    """Whether a text has only printable characters, so that it cannot control a terminal."""
    return all(line.isprintable() for line in text.split("\n"))


def add_infos(pool: Pool) -> None:
    """Add hostile infos of models without workers."""
    for info in (
        ModelInfo(NASTY, "synthetic", V, 100, "r", "float32"),
        ModelInfo("bad", f"synthetic{NASTY}", V, 100, "r", "float32"),
        ModelInfo("noted", "synthetic", V, 100, "\u202e[/x]", "float32", note=":bomb:"),
    ):
        pool.redis.hset(pool.keys.models(), info.name, info.pack())


@pytest.fixture
def spoilt(pool: Pool) -> Pool:
    """A pool with a model whose name is full of markup, and with hostile data."""
    # A long lease: after a third of it, a worker removes the infos of models without workers.
    worker = pool.start("--lease-s", 60, model=ALLOWED)
    add_infos(pool)
    heartbeat: dict[Any, Any] = {"model": NASTY, "state": "loading", "backend": NASTY, "rows": NASTY}
    pool.redis.hset(pool.keys.worker(NASTY), mapping=heartbeat)
    pool.redis.hset(pool.keys.loading(), NASTY, NASTY)
    keys = pool.keys.model(ALLOWED)
    served: Any = pool.redis.hget(pool.keys.models(), ALLOWED)
    registry: dict[Any, Any] = {"": ModelInfo.unpack(served).fingerprint, "@": 1}
    registry["[/nothing]\u202e :bomb:"] = b"1 " + Adapter("/somewhere", "abc").pack()
    pool.redis.hset(keys.adapters, mapping=registry)
    pool.redis.xadd(keys.dead, {"e": Failure(NASTY, NASTY).pack(), "m": NASTY.encode()})
    assert is_harmless(worker.text)
    return pool


def test_commands_escape_texts_of_other_programs(spoilt: Pool) -> None:
    for command in (("status",), ("top", "--once")):

        def is_complete(command: tuple[str, ...] = command) -> Ended | None:
            add_infos(spoilt)  # Add the infos again: the worker may have removed them.
            ended = run(spoilt, *command)
            return ended if "│ noted" in ended.output else None

        ended = until(is_complete, "the command shows all models")
        assert not ended.error
        assert is_harmless(ended.output)
        # The command shows markup and emoji names as text, and escapes characters that reverse text.
        assert r"[red]\u202esyn[/] [/nothing] :bomb:" in ended.output
        assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\n12:00:00 all is well\u2028\u202e[red]x[/]" in ended.output
    model = ("--model", ALLOWED)
    for arguments, shown in (
        (("adapters", "list"), r"[/nothing]\u202e :bomb:"),
        (("dead", "list"), r"\x1b]0;owned\x07"),
        (("logprobs", "1", "--ids"), "log-probability"),
        (("flush",), "dropped"),
    ):
        ended = run(spoilt, *arguments, *model)
        assert not ended.error, arguments
        assert is_harmless(ended.output), arguments
        assert shown in ended.output, arguments
    for wrong in (("logprobs", "1", "--ids", "--timeout", "0.2"), ("bench", "--timeout", "0.2"), ("flush",)):
        for name in ("missing", NASTY, "bad"):
            ended = run(spoilt, *wrong, "--model", name)
            assert ended.error, wrong
            assert is_harmless(ended.output + ended.error), wrong


def test_json_is_ascii(spoilt: Pool) -> None:
    for arguments in (("status",), ("top", "--once"), ("adapters", "list", "--model", ALLOWED)):
        ended = run(spoilt, *arguments, "--json")
        (line,) = [line for line in ended.output.splitlines() if line[:1] in "[{"]
        assert line.isascii()
        assert line.isprintable()
        if arguments == ("status",):
            assert {ALLOWED, NASTY} <= {model["name"] for model in json.loads(line)}


def test_infos_with_control_characters_are_left_out_and_the_others_serve(spoilt: Pool) -> None:
    with SyncProducer(ALLOWED, redis=spoilt.url, prefix=spoilt.prefix) as producer:
        assert producer.logprobs([1]).shape == (V,)
    bad = ModelInfo("bad", f"synthetic{NASTY}", V, 100, "r", "float32")

    def refused() -> str:
        spoilt.redis.hset(spoilt.keys.models(), "bad", bad.pack())
        with pytest.raises((ProtocolError, UnknownModel)) as caught:
            SyncProducer("bad", redis=spoilt.url, prefix=spoilt.prefix)
        # The worker may have removed the info, because no worker serves the model 'bad'.
        return "" if isinstance(caught.value, UnknownModel) else str(caught.value)

    text = until(refused, "the info is read")
    assert re.search("'bad' cannot be read: .* backend = .* no control characters", text)
    for name in (NASTY, "a\x1b", "a\x9b", "a\u2028", "a\n"):
        with pytest.raises(SettingsError, match="control characters"):
            check_name("name", name)


def test_the_output_of_a_process_is_harmless_too(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "lmpool", tmp_path)
    pool.redis.hset(pool.keys.models(), NASTY, ModelInfo(NASTY, NASTY, V, 100, "r", "float32").pack())
    pool.redis.set(pool.keys.worker("w"), NASTY)
    pool.redis.hset(pool.keys.loading(), "w", NASTY)
    for arguments in (["status"], ["logprobs", "1", "--ids", "--model", f"no{NASTY}".replace("\0", "")]):
        done = subprocess.run(
            [*lmpool_command(), *arguments, "--redis", pool.url], capture_output=True, text=True, check=False
        )
        assert is_harmless(done.stdout + done.stderr)
        assert r"\x1b]0;owned" in done.stderr
    pool.end()


def test_no_text_can_forge_a_log_line() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log = logging.Logger("log")
    log.addHandler(handler)
    log.warning("the worker %s is left out", NASTY)
    try:
        raise ValueError(NASTY)
    except ValueError:
        log.exception("the backend broke: %s", NASTY)
    text = out.getvalue()
    assert is_harmless(text)
    entries = [line for line in text.splitlines() if not line.startswith("  ")]
    assert all(entry[9:].startswith(begin) for entry, begin in zip(entries, ("the worker", "the backend"), strict=True))
    assert "  12:00:00 all is well" in text
    assert "  Traceback (most recent call last):" in text


def test_a_json_log_is_ascii_without_control_characters() -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        start_log("json", NASTY)
        (handler,) = root.handlers
        line = handler.format(logging.LogRecord("n", logging.INFO, "f", 1, "said %s", (NASTY,), None))
        assert line.isascii()
        assert line.isprintable()
        assert json.loads(line)["message"] == f"said {NASTY}"
    finally:
        root.handlers = before
        logging.captureWarnings(False)


@pytest.mark.parametrize("kind", [LMPoolError, WorkerError, ProtocolError, SettingsError])
def test_the_text_of_an_exception_is_harmless(kind: type[LMPoolError]) -> None:
    error = kind(f"failed: {NASTY}")
    assert is_harmless(str(error))
    assert str(error).startswith(r"failed: \x1b]0;owned\x07")
    assert str(kind("a\nb")) == "a\nb"


@given(st.text())
def test_any_text_becomes_printable_and_printable_text_stays(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    if text.isprintable():
        assert printable(text) == text
    assert to_json(text).isprintable()
    assert json.loads(to_json(text)) == text
