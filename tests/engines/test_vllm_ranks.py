"""A model that vLLM spreads over two processes (ranks): the engine ends as a whole, and nothing remains of it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.adapter import name_of
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.backends.vllm import ranks as ranks_module
from lmpool.workers.backends.vllm.capture import KEY, Captured
from lmpool.workers.backends.vllm.engine import refusing
from lmpool.workers.backends.vllm.ranks import Answer, RanksExecutor, RowsInPlace
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, write_adapter
from tests.contract.subjects import Subject
from tests.contract.vllm_subject import PIPELINE_PARALLEL, TENSOR_PARALLEL
from tests.engines.vllm_small import refused
from tests.support.pool import Pool, children_of, is_running, shared_by, until, until_async

STEP_S = 5
ENDED = r"^rank {} of the model has failed: its process was ended by signal 9 \(SIGKILL\)$"


@contextmanager
def opened(folder: Path, subject: Subject = TENSOR_PARALLEL) -> Iterator[Opened]:
    """The subject's backend, without adapters."""
    with Opened(subject, folder, "float32", {}) as driver:
        yield driver


def ranks_of(backend: Any) -> list[int]:
    """Process ids of the backend's ranks."""
    return [rank.proc.pid for rank in backend._core.engine_core.model_executor.workers]


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks of a worker, in their order."""
    return sorted(
        child for child, command in children_of(pid).items() if b"VLLM" in command or b"spawn_main" in command
    )


def interfaces_of(pid: int) -> set[str]:
    """The addresses on which a process listens for connections, in hexadecimal digits as in /proc."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in links}


def test_an_idle_engine_reports_the_end_of_a_rank(model_folder: Path) -> None:
    draw, errors = random.Random(1), SimpleQueue[BaseException]()
    with opened(model_folder) as driver:
        backend: Any = driver.backend
        assert backend.devices == ["cpu", "cpu"]
        assert backend.info.revision == checkpoint_revision(model_folder), "the fingerprint does not depend on the size"
        ranks = ranks_of(backend)
        assert [shared_by(pid) for pid in (os.getpid(), *ranks)] == [set()] * 3, (
            "killed processes would leave the names"
        )
        assert [interfaces_of(pid) for pid in ranks] == [{"0100007F"}] * 2, "other machines cannot connect to the ranks"
        prompts = [prompt(draw, 20) for _ in range(3)]
        driver.check(prompts, driver.ask(prompts))
        backend.when_broken(errors.put)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=ENDED.format(1)):
            raise errors.get(timeout=60)
        backend.when_broken(errors.put)
        assert re.match(ENDED.format(1), str(errors.get(timeout=60))), "an end before the call is reported too"
        until(lambda: not Path(f"/proc/{ranks[0]}").exists(), "the other rank ends")


def test_a_rank_that_is_killed_during_forwards_ends_the_engine(model_folder: Path) -> None:
    draw = random.Random(2)
    with opened(model_folder) as driver:
        digests = driver.submit([prompt(draw, 200) for _ in range(200)])
        driver.step()
        os.kill(ranks_of(driver.backend)[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=ENDED.format(0)):
            driver.finish(digests)


async def test_a_frozen_rank_ends_the_worker_within_the_step_timeout(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(4)
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), "--step-timeout-s", STEP_S,
        model=str(model_folder), wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    ranks = ranks_below(worker.process.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # `make test-ranks` also stops the output rank.
    async with pool.producer("two") as producer:
        requested = asyncio.ensure_future(producer.logprobs(prompt(draw, 100)))
        assert await asyncio.to_thread(worker.wait)
        requested.cancel()
    assert f"it has been in one step for {STEP_S} s" in worker.text
    assert "released 1 prompts for other workers" in worker.text
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


async def test_ctrl_c_lets_the_ranks_of_two_machines_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [option for option in PIPELINE_PARALLEL.options(model_folder, {}) if option != "--verify"]
    other, worker = (
        pool.start(
            "--backend", "vllm", "--name", "two", *options, "--engine-args",
            f"nnodes=2 node_rank={machine} master_addr=127.0.0.1 master_port={port}", model=str(model_folder),
            wait=False, command=PIPELINE_PARALLEL.command, installed=True,
        )
        for machine in (1, 0)
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    ranks = [*ranks_below(worker.process.pid), *ranks_below(other.process.pid)]
    assert len(ranks) == 2
    async with pool.producer("two") as producer:
        prompts = [prompt(draw, 100) for _ in range(8)]
        requested = asyncio.ensure_future(producer.batch_logprobs(prompts))

        async def is_taken() -> bool:
            return pool.held("two") > 0 or requested.done()

        await until_async(is_taken, "the worker has taken the prompts")
        for number in (other.process.pid, worker.process.pid, *ranks):  # A terminal sends the signal to all processes.
            os.kill(number, signal.SIGINT)
        rows = await requested
    expected = np.stack([PIPELINE_PARALLEL.reference(ids, "") for ids in prompts])
    assert np.abs(rows - expected).max() <= PIPELINE_PARALLEL.tolerance
    assert [await asyncio.to_thread(process.wait) for process in (worker, other)] == [0, 0]
    assert "still loading" not in other.text, "the second machine does not use Redis"
    assert "the worker on 127.0.0.1 has ended" in other.text
    assert "Traceback" not in worker.text + other.text
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


def test_a_rank_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    assert "must be divisible by tensor parallel size (3)" in refused(model_folder, tensor_parallel_size=3)
    message = refused(model_folder, tensor_parallel_size=2, kv_cache_bytes=1 << 50)
    assert "memory" in message
    until(lambda: not multiprocessing.active_children(), "no rank remains in a process that goes on")


def test_a_killed_worker_leaves_no_rank(model_folder: Path, pool: Pool) -> None:
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    until(lambda: len(ranks_below(worker.process.pid)) == 2, "the ranks start")
    ranks = ranks_below(worker.process.pid)
    os.kill(worker.process.pid, signal.SIGKILL)  # While the ranks load.
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


def _write_large_adapter(folder: Path) -> Path:
    """Write an adapter whose rank exceeds the rank that a worker with --max-adapters reserves memory for."""
    write_adapter(folder, ADAPTERS[0])
    tensors = {
        name: tensor.repeat(64, 1) if "lora_A" in name else tensor.repeat(1, 64)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 64 * config["r"]}))
    return folder


def test_an_adapter_that_the_ranks_refuse_leaves_them_running(model_folder: Path, tmp_path: Path) -> None:
    draw, large = random.Random(5), _write_large_adapter(tmp_path / "large")
    prompts = [prompt(draw, length) for length in (3, 40)]
    with opened(model_folder) as driver:
        backend = driver.backend
        for name in ADAPTERS:
            with pytest.raises(SettingsError, match=r"^adapters: .* LoRA rank \d+ is greater than max_lora_rank 64"):
                backend.load_adapter("large", str(large))
            backend.load_adapter(name, str(write_adapter(tmp_path / name, name)))
            driver.check(prompts, driver.finish(driver.submit(prompts, name)), name)
        assert sorted(map(name_of, backend.adapters)) == sorted(ADAPTERS)
        driver.check(prompts, driver.ask(prompts))


def test_no_row_of_an_aborted_prompt_remains(model_folder: Path) -> None:
    draw = random.Random(6)
    with opened(model_folder, PIPELINE_PARALLEL) as driver:
        backend: Any = driver.backend
        kept = [prompt(draw, 20) for _ in range(2)]
        for round_ in range(6):
            # Two batches are in flight: abort after different numbers of steps.
            digests = driver.submit([prompt(draw, 20) for _ in range(12)])
            for _ in range(round_ % 3):
                driver.step()
            backend.abort(digests)
            driver.check(kept, driver.ask(kept))
        assert not backend._engine.captured._captured


def test_ranks_are_spawned_and_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/mine")
    for name in ("killed", "alive"):
        (tmp_path / f"lmpool-ranks-{name}").mkdir()
    (tmp_path / "lmpool-ranks-killed" / "lock").touch()
    with (tmp_path / "lmpool-ranks-alive" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ranks_module.starting():
            assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
            folder = Path(os.environ["VLLM_RPC_BASE_PATH"])
            used = {folder.name, "lmpool-ranks-alive"}
            assert {path.name for path in tmp_path.iterdir()} == used, "the folder of a killed worker is removed"
    assert not folder.exists()
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/mine"


def test_a_rank_maps_only_the_memory_of_its_worker(tmp_path: Path) -> None:
    other, own, rank = tmp_path / "other", tmp_path / "own", ranks_module.RankExtension()
    other.write_bytes(bytes(4096))
    own.write_bytes(b"mark" + bytes(4092))
    assert "another file" in rank.lmpool_map(str(other), b"mark", 4096)
    assert rank.lmpool_map(str(tmp_path), b"mark", 4096)
    assert rank.lmpool_map(str(own), b"mark", 8192)
    assert rank.lmpool_map(str(own), b"mark", 4096) == ""
    memory: Any = rank._lmpool_memory
    memory[:4] = 1
    assert own.read_bytes()[:4] == bytes([1] * 4)
    assert other.read_bytes() == bytes(4096)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("kv_offloading_size=1", "kv_offloading_size need a model in one process"),
        ("nnodes=2 node_rank=1 master_addr=127.0.0.1", "node_rank=1 serves no prompts: use it with `lmpool worker`"),
        ("quantization=fp8", "quantization cannot be set here: --quantization sets it"),
    ],
)
def test_options_that_exclude_each_other_are_refused(model_folder: Path, given: str, text: str) -> None:
    more: dict[str, Any] = {"quantization": "fp8"} if "fp8" in given else {"tensor_parallel_size": 2}
    assert text in refused(model_folder, engine_args=[given], **more)


def test_only_ranks_of_several_machines_use_the_network(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, interface in (["nnodes=2"], None), ([], "lo"):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        VllmSettings(str(model_folder), tensor_parallel_size=2, engine_args=given)._prepare_vllm()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    with pytest.raises(SettingsError, match="^model: another program has the port master_port: "), refusing("model"):
        raise WorkerError("The server socket has failed to listen: code: -98, name: EADDRINUSE")


def test_a_machine_beyond_the_number_of_machines_is_refused(model_folder: Path) -> None:
    settings = VllmSettings(str(model_folder), tensor_parallel_size=2, engine_args=["node_rank=1"])
    with pytest.raises(SettingsError, match="^engine_args: node_rank=1 needs nnodes=2 or more: add nnodes and master_"):
        settings.follow(lambda: None)


def test_a_row_has_the_encoding_of_its_own_step() -> None:
    """While a step runs, the answer of the step before may change the encoding that later steps expect."""
    executor, futures = RanksExecutor.__new__(RanksExecutor), [SimpleNamespace(), SimpleNamespace()]
    requests = {
        name: SimpleNamespace(is_prefill_chunk=False, sampling_params=SimpleNamespace(extra_args={KEY: name.encode()}))
        for name in ("a", "b")
    }
    encoder = RowEncoder(torch.bfloat16, lossy=False)
    encoder.new_rows = lambda count, vocab_size, encoding: np.zeros((count, vocab_size), encoding.dtype)
    executor._captured, executor._scheduler = Captured(4, encoder), SimpleNamespace(requests=requests)
    executor._positions, executor._encoding, executor._base = None, Encoding.F32, 0
    answers: list[Any] = []
    setattr(executor, "_call", lambda *_, **__: futures[len(answers)])  # noqa: B010  mypy refuses the assignment.
    for name in requests:
        executor._step = SimpleNamespace(num_scheduled_tokens={name: 1})
        answers.append(executor.sample_tokens(None, non_block=True))
    own = RowBlock([b"a"], np.zeros((1, 4), Encoding.BF16.dtype), np.zeros(1, np.float32), Encoding.BF16)
    futures[0].aggregate(Answer(None, [own], {}, {}))
    futures[1].aggregate(Answer(None, [RowsInPlace([b"b"], None)], {}, {}))
    (block,), _ = executor._captured.take([b"b"])
    assert block.encoding is Encoding.F32
    assert block.numbers.dtype == np.float32
