"""How many workers `lmpool up --workers` starts, and the devices or threads of each worker."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from lmpool.errors import SettingsError
from lmpool.workers.cli import commands
from lmpool.workers.cli.supervisor import plan_workers
from tests.support.pool import run_lmpool


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, until a test names GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("wanted", ["0", "-1", "two", "", "1.5", "99", "ALL"])
def test_a_number_of_workers_beyond_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    for visible in ("", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(SettingsError, match="^workers: "):
            plan_workers(wanted, "hf", None)


def test_an_impossible_number_of_workers_is_reported_in_one_line() -> None:
    for wanted, reason in (
        ("0", "'0' is neither a number of at least 1 nor `all`"),
        ("99", "99 would take 99 cores, and this machine has "),
    ):
        ended = run_lmpool("up", "syn", "--backend", "synthetic", "--workers", wanted)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith(f"lmpool: --workers: {reason}")
        assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_more_workers_than_ports_for_metrics_are_refused(detach: list[str]) -> None:
    ended = run_lmpool("up", "syn", "--backend", "synthetic", "--workers", "2", "--metrics-port", "65535", *detach)
    reason = "65535 must be a whole number from 0 to 65534, because 2 workers take consecutive ports"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"lmpool: --metrics-port: {reason}\n")


def test_a_worker_on_all_devices_is_refused_next_to_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = run_lmpool("up", str(tmp_path), "--backend", "hf", "--device-map", "auto", "--workers", "2")
    reason = "it spreads one worker over all devices of the machine, so 2 workers have none left: leave out --workers"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"lmpool: --device-map: {reason}\n")


def test_each_gpu_has_one_worker_and_cores_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert plan_workers("all", "hf", None) == plan_workers("1", "hf", None) == [{}]
    monkeypatch.setattr("lmpool.workers.cli.supervisor.count_cores", lambda: 8)
    monkeypatch.setattr("lmpool.workers.cli.supervisor.count_threads", lambda: 8)
    assert plan_workers("3", "hf", None) == [{"OMP_NUM_THREADS": "2"}] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-aa, 7")
    assert plan_workers("all", "vllm", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("4", "GPU-aa", "7")]
    assert len(plan_workers("2", "hf", "auto")) == 2
    uuids = ["GPU-5ebe2bbf-9f1d-4a6c-8b1c-0b6d8f9e7a11", "MIG-GPU-5ebe2bbf-9f1d-4a6c/7/0", "MIG-41b8ea11-d2b8"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(uuids))
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in uuids]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,-1,2")
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "10"]
    assert plan_workers("all", "hf", "cpu") == plan_workers("all", "synthetic", None) == [{}]
    with pytest.raises(SettingsError, match="^device: 'cuda:1' is one device"):
        plan_workers("all", "hf", "cuda:1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "01"]


def test_a_worker_of_several_devices_gets_a_group_of_gpus_and_processes_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    groups = [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3", "4,5", "6,7")]
    # vLLM is not installed here, so check what `lmpool up` would start.
    for name in ("require", "require_version"):
        monkeypatch.setattr(f"lmpool.workers.backends.settings.{name}", lambda *_: None)
    plans: list[Any] = []
    monkeypatch.setattr(commands, "supervise", lambda *given: plans.append(given[:2]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(typer.Exit):
        commands.up(str(tmp_path), "vllm", workers="all", tensor_parallel_size=2)
    arguments, plan = plans[-1]
    assert plan == groups
    assert "--tensor-parallel-size=2" in arguments
    more: dict[str, Any] = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    with pytest.raises(typer.Exit):
        commands.up(str(tmp_path), "vllm", engine_args=["nnodes=2"], **more)
    assert plans[-1][1] == [{}], "8 of 16 ranks run on this machine"
    with pytest.raises(SettingsError, match=r"^workers: 2 workers with the same nnodes would use "):
        commands.up(str(tmp_path), "vllm", workers="2", engine_args=["nnodes=4"], **more)
    assert plan_workers("2", "vllm", None, 2) == groups[:2]
    assert plan_workers("1", "vllm", None, 8) == plan_workers("all", "vllm", None, 8) == [{}]
    assert [len(plan_workers(wanted, "vllm", None, 3)) for wanted in ("1", "2")] == [1, 2]
    for wanted, ranks, reason in (
        ("all", 3, "all, with 3 GPUs each, would leave 2 of 8 GPUs without work: start --workers 2 "),
        ("5", 2, "5 would take 10 GPUs, and this machine has 8: at most 4, or `all`"),
        ("1", 16, "1 would take 16 GPUs, and this machine has 8: take smaller parallel sizes"),
        ("all", 16, "1 would take 16 GPUs, and this machine has 8: take smaller parallel sizes"),
    ):
        with pytest.raises(SettingsError, match=f"^workers: {re.escape(reason)}"):
            plan_workers(wanted, "vllm", None, ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("lmpool.workers.cli.supervisor.count_cores", lambda: 8)
    monkeypatch.setattr("lmpool.workers.cli.supervisor.count_threads", lambda: 8)
    assert plan_workers("2", "vllm", None, 2) == [{"OMP_NUM_THREADS": "2"}] * 2
    assert plan_workers("all", "vllm", None, 2) == [{"OMP_NUM_THREADS": "4"}]
    assert plan_workers("1", "vllm", None, 16) == [{"OMP_NUM_THREADS": "1"}]
    with pytest.raises(SettingsError, match="^workers: 5 would take 10 cores, and this machine has 8: at most 4"):
        plan_workers("5", "vllm", None, 2)
