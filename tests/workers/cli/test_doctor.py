"""`lmpool doctor`: its findings, and exit code 1 if the pool or the model cannot work."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from lmpool.embedded import EmbeddedServer
from lmpool.rows import segment
from lmpool.workers.cli import doctor
from tests.contract.model import write_model
from tests.support.pool import PATIENCE, Pool, lmpool_command, run_lmpool, until


def examine(code: int, *arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Run `lmpool doctor`, expecting an exit code; returns name of each check -> finding."""
    ended = run_lmpool("doctor", "--json", *arguments, **environment)
    assert (ended.returncode, ended.stderr) == (code, "")
    report = json.loads(ended.stdout)
    assert report["ok"] == (code == 0)
    assert any(check["state"] == "wrong" for check in report["checks"]) == (code == 1)
    return {check["check"]: check for check in report["checks"]}


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in found.items() if check["state"] == "wrong"]


def test_a_working_pool_has_no_wrong_finding(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    folder = write_model(tmp_path / "model")
    found = examine(0, str(folder), "--redis", pool.url, "--prefix", pool.prefix, CUDA_VISIBLE_DEVICES="", PATH="/bin")
    assert found["server"]["found"] == f"{pool.url.partition('?')[0]} (--redis)"
    assert found["models"]["found"] == "syn (1 worker)"
    assert "MiB of weights" in found["model"]["found"]
    assert found["server's version"]["found"].split()[0] in ("valkey", "redis")
    assert "hf" in found["extras"]["found"].partition("; not installed")[0]
    named = {**os.environ, "LMPOOL_REDIS_URL": pool.url}
    assert "(LMPOOL_REDIS_URL)" in examine(0, "--prefix", pool.prefix, **named)["server"]["found"]
    table = run_lmpool("doctor", "--redis", pool.url, "--prefix", pool.prefix)
    assert table.returncode == 0
    assert all(check in table.stdout for check in found if check != "model")
    # Output that is not a terminal has one line per finding, and no table.
    lines = table.stdout.splitlines()
    assert "models: ok: syn (1 worker)" in lines
    assert all(re.match(r"[^:]+: (ok|look|wrong): \S", line) for line in lines), lines


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (None, "none of yours runs in"),
        ("redis://127.0.0.1:1", "nothing listens there"),
        ("nonsense", "redis: "),
        ("redis://user:secret@127.0.0.1:1", "nothing listens there"),
    ],
)
def test_a_server_that_cannot_be_used_is_wrong(short_dir: Path, url: str | None, text: str) -> None:
    found = examine(1, *([] if url is None else ["--redis", url]), LMPOOL_RUNTIME_DIR=str(short_dir / "run"))
    assert wrong(found) == ["server"]
    assert text in found["server"]["found"]
    assert found["server"]["advice"]
    assert "secret" not in json.dumps(found)


def test_a_server_that_may_evict_queues_or_refuse_writes_is_wrong(own_server: EmbeddedServer) -> None:
    client = redis.Redis.from_url(own_server.url, **PATIENCE)
    for policy in ("noeviction", "allkeys-lru"):
        client.config_set("maxmemory-policy", policy)
        found = examine(1, "--redis", own_server.url)
        assert wrong(found) == ["server's memory"]
        assert policy in found["server's memory"]["advice"]
        assert found["models"]["state"] == "look"
    client.close()


def test_a_folder_that_holds_no_model_is_wrong(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    for name, text in (("empty", "it has no config.json"), ("bare", "has no weights")):
        found = examine(1, str(tmp_path / name), "--redis", pool.url)
        assert wrong(found) == ["model"]
        assert text in found["model"]["found"]
    assert "its cache" in examine(1, "org/model", "--redis", pool.url)["model"]["found"]


def test_weights_that_do_not_fit_the_gpu_are_wrong(pool: Pool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    smi = tmp_path / "nvidia-smi"
    calls = tmp_path / "calls"
    smi.write_text(f"#!/bin/sh\necho called >> {calls}\necho 'NVIDIA H100, 0, GPU-aa, 81559, 1'\n")
    smi.chmod(0o755)
    found = examine(1, str(folder), "--redis", pool.url, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "model" in wrong(found)
    assert "1 MiB free on a GPU" in found["model"]["found"]
    assert "NVIDIA H100, 1 MiB of 79.6 GiB free" in found["GPU"]["found"]
    assert calls.read_text() == "called\n"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("weights_gib", "free_gib", "heads", "state", "text"),
    [
        (60, [79] * 8, (64, 8), "ok", "79.0 GiB free on a GPU: it fits one GPU"),
        (130, [79] * 8, (64, 8), "look", "it fits 2, 4 or 8 GPUs like this one — --backend vllm or sglang, with "
                                         "--tensor-parallel-size 2"),
        (72, [79, 79, 10], (32, 8), "look", "it fits 2 GPUs"),
        (130, [79], (64, 8), "wrong", "it fits 2 GPUs like this one — --tensor-parallel-size 2 on such a machine"),
        (130, [79, 10], (64, 8), "wrong", "it fits 2 GPUs"),
        (130, [79] * 8, (14, 2), "look", "it fits 2 GPUs"),
        (230, [79] * 8, (14, 2), "wrong", "it fits 14 GPUs"),
        (200, [79] * 8, (12, 4), "look", "it fits 4 GPUs"),
        (130, [79] * 8, (1, 1), "wrong", "and a worker needs 156.0 GiB — free memory, take"),
        (70, [79], (64, 8), "look", "and a worker needs 84.0 GiB: it fits 2 GPUs like this one"),
    ],
)  # fmt: skip
def test_a_model_larger_than_a_gpu_fits_as_many_as_can_divide_its_heads(
    tmp_path: Path, weights_gib: int, free_gib: list[int], heads: tuple[int, int], state: str, text: str
) -> None:
    config = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Files without content: only their sizes count, also for quantised weights.
    for part in range(2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(weights_gib * GIB // 2)
    for written in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        found = doctor._model(str(tmp_path), [("H100", 80 * GIB, free * GIB) for free in free_gib])
        assert (found.state, text in f"{found.found} — {found.advice}") == (state, True), found


def test_a_model_on_the_hub_has_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--big" / "snapshots" / ("a" * 40)
    cached.mkdir(parents=True)
    (cached / "config.json").write_text('{"num_attention_heads": 8}')
    (cached.parents[1] / "refs").mkdir()
    (cached.parents[1] / "refs" / "main").write_text(cached.name)
    gpus = [("H100", 80 * GIB, 79 * GIB)]
    found = doctor._model("org/big", gpus)
    assert (found.state, found.found) == ("wrong", "neither the hub nor its cache provides weights of org/big")
    with (cached / "model.safetensors").open("wb") as file:
        file.truncate(130 * GIB)
    assert "130.0 GiB of weights" in doctor._model("org/big", gpus).found
    on_hub = {"a.safetensors": 150, "b.safetensors": 150, "pytorch_model.bin": 500, "original/c.safetensors": 900}
    files = [SimpleNamespace(rfilename=name, size=gib * GIB) for name, gib in on_hub.items()]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    found = doctor._model("org/big", gpus)
    assert found.found.startswith("300.0 GiB of weights"), "the cache may have a part of the files"
    assert "it fits 8 GPUs" in found.found


@pytest.mark.parametrize(
    ("visible", "free_mib"),
    [(None, [10, 20, 30]), ("", []), ("1", [20]), ("GPU-bb2,0", [10, 30]), ("MIG-cc", [10, 20, 30]), ("0,-1,2", [10])],
)
def test_only_visible_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, free_mib: list[int]
) -> None:
    rows = [["H100", str(at), uuid, "99", f"{at + 1}0"] for at, uuid in enumerate(("GPU-aa", "GPU-bb1", "GPU-bb2"))]
    monkeypatch.setattr(doctor, "query_gpus", lambda *_: rows)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [free >> 20 for *_, free in doctor._visible_gpus()] == free_mib


def test_shared_memory_must_be_large_enough_for_rows(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    """Rows are in anonymous shared memory; the runtime folder holds only a socket, so its size does not matter."""
    monkeypatch.setenv("LMPOOL_SHM_DIR", str(short_dir))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 26))
    with socket.socket(socket.AF_UNIX) as listener:
        (place := short_dir / f"lmpool-{os.geteuid()}").mkdir(mode=0o700)
        listener.bind(str(place / "lmpool-00"))
        listener.listen()
        for free, state, size in ((1 << 34, "ok", "2.0 GiB"), (1 << 28, "look", "32 MiB")):
            monkeypatch.setattr(segment, "free_bytes", lambda free=free: free)
            found = {check.check: check for check in doctor._machine()}
            assert found["shared memory"].state == state
            assert f"{size} for the next worker" in found["shared memory"].found
            assert f"sockets in {place}, now 1" in found["shared memory"].found
    assert "/dev/shm" not in found
    assert [path.name for path in place.iterdir()] == ["lmpool-00"]
    monkeypatch.setattr(doctor, "_version", lambda package: "1" if package == "vllm" else "")
    found = {check.check: check for check in doctor._machine()}
    assert (found["/dev/shm"].state, "--shm-size" in found["/dev/shm"].advice) == ("look", True)
    monkeypatch.setenv("LMPOOL_SHM_DIR", str(short_dir / "nowhere"))
    without = doctor._shared_memory()
    assert without.state == "look"
    assert "No such file or directory" in without.found


def test_a_system_that_does_not_report_free_memory_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """macOS has neither /proc, which reports free memory, nor memfd_create: the checks must not fail."""

    def refuse() -> int:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(segment, "free_bytes", refuse)
    monkeypatch.delattr(os, "memfd_create")
    found = {check.check: check for check in [*doctor._machine(), doctor._model(str(write_model(tmp_path)), [])]}
    assert found["memory"].state == found["model"].state == "ok"
    assert "in all, free memory unknown" in found["memory"].found
    assert "in all on this machine" in found["model"].found
    assert found["shared memory"].state == "look"


def test_a_package_of_an_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"msgpack": "1.0.8", "torch": "2.9.1+cu128"}
    theirs = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package) or theirs(package))
    found = {(check.check, check.state): check for check in doctor._installed()}
    assert found["packages", "wrong"].found == "msgpack 1.0.8 is installed, and >=1.2.3 is needed"
    assert found["packages", "wrong"].advice == "in the clone: pip install --upgrade ."
    assert "torch 2.9.1+cu128 is installed, and >=2.10 is needed" in found["extra hf", "look"].found


@pytest.mark.parametrize(
    ("package", "installed", "needed", "is_supported"),
    [
        ("torch", "2.10.0rc1", "torch>=2.10", False),
        ("torch", "2.10.0+cpu", "torch>=2.10", True),
        ("sglang", "0.5.23.post1", "sglang<=0.5.23,>=0.5.21", False),
        ("sphinx", "8.2", "sphinx>=8.2.0", True),
    ],
)
def test_versions_are_compared_as_pip_compares_them(
    monkeypatch: pytest.MonkeyPatch, package: str, installed: str, needed: str, is_supported: bool
) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: [f'{needed}; extra == "x"', 'other; extra == "y"'])
    monkeypatch.setattr(doctor, "version", lambda name: installed)
    assert (list(doctor._troubles("x")) == []) == is_supported
    assert list(doctor._troubles("")) == []


def test_the_shell_completes_commands_and_names_of_models(pool: Pool, tmp_path: Path) -> None:
    pool.start()

    def complete(words: str) -> list[str]:
        environment = {"_LMPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return run_lmpool(**environment, LMPOOL_REDIS_URL=pool.url).stdout.split()

    assert complete("lmpool doc") == ["doctor"]
    assert "--workers" in complete("lmpool up m --wor")
    words = f"lmpool logprobs x --prefix {pool.prefix} --model "
    until(lambda: complete(words) == ["syn"], "the model is completed")
    assert complete(words.replace(pool.prefix, "empty")) == []
    home = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [*lmpool_command(), "--install-completion", "bash"]
    done = subprocess.run(command, env=home, capture_output=True, text=True, check=True, timeout=60)
    assert "completion installed" in done.stdout
    assert "_LMPOOL_COMPLETE" in next((tmp_path / ".bash_completions").iterdir()).read_text()
