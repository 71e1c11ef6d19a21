"""`load_model_by_name`: models of the pool, and models with a private worker that never outlives the program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmpool.errors import AdapterRefused, ModelError, ProducerClosed
from lmpool.producer.genlm import load_model_by_name
from tests.genlm.small import SIZE, expected, write_tokenizer
from tests.support.pool import DEADLINE_S, Pool, until

ENDS_WITHIN_S = DEADLINE_S
IDS = [72, 105]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def temporary_folder(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of private pools, which must be empty at the end unless the test kills a program."""
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    monkeypatch.setenv("TMPDIR", str(short_dir))
    yield short_dir
    until(lambda: not processes_in(short_dir), "all processes have ended")


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of the processes that use a folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in line and "pytest" not in line:
            lines.append(line)
    return lines


def test_the_pool_is_the_default(small_pool: Pool, tokenizer: Any) -> None:
    opts = {"redis": small_pool.url, "prefix": small_pool.prefix, "tokenizer": tokenizer}
    for backend in (None, "pool"):
        with load_model_by_name("syn", backend, opts) as model:
            assert torch.equal(model.next_token_logprobs_sync(IDS), expected(IDS))


def test_a_private_worker_serves_and_ends_with_close(tokenizer_folder: str, temporary_folder: Path) -> None:
    with load_model_by_name(tokenizer_folder, "mock", {"seed": 3, "timeout": ENDS_WITHIN_S}) as model:
        assert model.info.vocab_size == SIZE == len(model.byte_vocab)
        assert torch.equal(model.next_token_logprobs_sync(IDS), expected(IDS, 3))
        assert torch.equal(asyncio.run(model.next_token_logprobs(IDS)), expected(IDS, 3))
        assert len(processes_in(temporary_folder)) == 3  # The worker, the server and its supervisor.
        with pytest.raises(AdapterRefused, match="org/poet' cannot be read"):  # A private worker accepts hub names.
            model.add_new_lora("org/poet")
    assert processes_in(temporary_folder) == []
    assert list(temporary_folder.iterdir()) == []
    with pytest.raises(ProducerClosed):
        model.next_token_logprobs_sync(IDS)


def test_a_dropped_model_ends_its_worker(tokenizer_folder: str, temporary_folder: Path) -> None:
    model = load_model_by_name(tokenizer_folder, "synthetic")
    del model
    gc.collect()
    until(lambda: not list(temporary_folder.iterdir()), "server and worker of the dropped model end")


@pytest.mark.parametrize(
    ("opts", "message"),
    [({"colour": 3}, "No such option: --colour"), ({"max_batch": 0}, "--max-batch: 0 must be a whole number")],
    ids=["unknown", "malformed"],
)
def test_the_worker_s_refusal_is_quoted(opts: Any, message: str, tokenizer_folder: str, short_dir: Path) -> None:
    with pytest.raises(ModelError, match=f"ended with code 2 before it served:\n(.|\n)*{message}"):
        load_model_by_name(tokenizer_folder, "synthetic", opts)
    assert list(short_dir.iterdir()) == []


def test_a_worker_that_takes_too_long_is_ended(tokenizer_folder: str, short_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"not served within load_timeout = 0\.01 s"):
        load_model_by_name(tokenizer_folder, "synthetic", {"load_timeout": 0.01})
    assert list(short_dir.iterdir()) == []


def test_a_fork_leaves_the_worker_to_its_parent(tokenizer_folder: str) -> None:
    with load_model_by_name(tokenizer_folder, "synthetic") as model:
        child = os.fork()
        if child == 0:
            row = model.next_token_logprobs_sync(IDS)
            model.close()
            os._exit(0 if torch.equal(row, expected(IDS)) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(model.next_token_logprobs_sync([1]), expected([1]))


PROGRAM = """
import os, sys, time
from lmpool.producer.genlm import load_model_by_name
model = load_model_by_name(sys.argv[1], "synthetic")
model.next_token_logprobs_sync([1])
{then}
"""


def start(then: str, folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(then=then), folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_program_that_ends_without_close_leaves_no_process(tokenizer_folder: str, short_dir: Path) -> None:
    program = start("", tokenizer_folder)
    out, err = program.communicate(timeout=ENDS_WITHIN_S)
    assert (program.returncode, out, err) == (0, "", "")
    assert processes_in(short_dir) == []
    assert list(short_dir.iterdir()) == []


def test_a_killed_program_leaves_no_process(tokenizer_folder: str, short_dir: Path) -> None:
    # The program forks a child that survives the program and must not keep the worker alive.
    then = "child = os.fork() or time.sleep(60) or os._exit(0)\nprint(child, flush=True)\ntime.sleep(60)"
    program = start(then, tokenizer_folder)
    assert program.stdout is not None
    fork = int(program.stdout.readline())
    try:
        assert len(processes_in(short_dir)) == 3
        program.send_signal(signal.SIGKILL)
        program.wait(ENDS_WITHIN_S)
        until(lambda: not processes_in(short_dir), "server and worker end with the killed program")
        os.kill(fork, 0)  # This call fails unless the forked child still runs.
    finally:
        os.kill(fork, signal.SIGKILL)
        program.communicate(timeout=ENDS_WITHIN_S)
