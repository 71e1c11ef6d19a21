"""A model that vLLM spreads over two processes (ranks): the engine ends as a whole, and nothing remains of it."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from importlib import reload
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.backends.vllm import ranks as ranks_module
from lmpool.workers.backends.vllm.capture import KEY, Captured
from lmpool.workers.backends.vllm.engine import refusing
from lmpool.workers.backends.vllm.ranks import Answer, RanksExecutor, RowsInPlace
from tests.contract.vllm_subject import PIPELINE_PARALLEL
from tests.engines.spread import check_ctrl_c, start
from tests.engines.vllm_small import refused
from tests.support.pool import Pool

ENDED = r"^rank {} of the model has failed: its process was ended by signal 9 \(SIGKILL\)$"
_FORK = multiprocessing.get_context("fork")


async def test_ctrl_c_lets_the_ranks_of_two_machines_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker, other = (
        start(
            pool, PIPELINE_PARALLEL, model_folder,
            "--engine-args", f"nnodes=2 node_rank={machine} master_addr=127.0.0.1 master_port={port}",
        )
        for machine in (0, 1)
    )  # fmt: skip
    await check_ctrl_c(pool, PIPELINE_PARALLEL, worker, other)
    assert "still loading" not in other.text, "the second machine does not use Redis"
    assert "the worker on 127.0.0.1 has ended" in other.text


def test_the_start_fails_with_the_error_of_a_rank() -> None:
    def fail() -> None:
        reload(ranks_module)  # Each rank imports the module.
        try:
            raise MemoryError("no memory for keys and values\nand more lines")
        except MemoryError:
            logging.getLogger("vllm.v1.executor.multiproc_executor").exception("WorkerProc failed to start.")

    def start_ranks() -> None:
        with ranks_module.starting():
            rank = _FORK.Process(target=fail)
            rank.start()
            rank.join()
            raise Exception("WorkerProc initialization failed")  # vLLM raises this type.

    with pytest.raises(WorkerError, match="^no memory for keys and values$"):
        start_ranks()


def test_a_rank_that_is_killed_during_the_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [_FORK.Process(target=signal.pause), _FORK.Process(target=signal.raise_signal, args=(signal.SIGKILL,))]

    def start_ranks(executor: Any) -> None:
        for rank in ranks:
            rank.name = f"VllmWorker-{ranks.index(rank)}"
            rank.start()
        executor._ensure_worker_termination(ranks)
        raise Exception("WorkerProc initialization failed")  # vLLM raises this type.

    monkeypatch.setattr(MultiprocExecutor, "_init_executor", start_ranks)
    with pytest.raises(WorkerError, match=ENDED.format(1)):
        RanksExecutor.__new__(RanksExecutor)._init_executor()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2


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


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(model_folder: Path) -> None:
    assert "must be divisible by tensor parallel size (3)" in refused(model_folder, tensor_parallel_size=3)


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
