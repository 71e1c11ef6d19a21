"""lmpool counts the cores that a process may use, and sets OpenMP's variables before torch loads OpenMP."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from lmpool import settings
from lmpool.settings import count_cores, count_threads, cpu_limit
from tests.support.models.tiny_models import write_model
from tests.support.pool import Pool, lmpool_command

MAX = "max 100000\n"
HOST = "0::/user.slice/a.scope\n"
OLD_HOST = "9:name=systemd:/x\n5:cpu,cpuacct:/docker/c0ffee\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": MAX}, None),
        ("0::/\n", {}, None),
        (HOST, {"user.slice/cpu.max": "400000 100000\n", "user.slice/a.scope/cpu.max": MAX}, 4.0),
        (HOST, {"user.slice/cpu.max": "400000 100000\n", "user.slice/a.scope/cpu.max": "50000 100000\n"}, 0.5),
        # In this container, /proc names the host's path of the group, but the group is mounted at the root.
        ("0::/kubepods/pod1\n", {"cpu.max": "200000 100000\n"}, 2.0),
        (OLD_HOST, {"cpu/docker/c0ffee/cpu.cfs_quota_us": "300000\n",
                    "cpu/docker/c0ffee/cpu.cfs_period_us": "100000\n"}, 3.0),
        (OLD_HOST, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        (OLD_HOST, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_limit_of_a_container_is_found(
    tmp_path: Path, groups: str, files: dict[str, str], limit: float | None
) -> None:
    contents = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit(tmp_path) == limit


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "expected"), [("3", 3), ("3,1", 3), ("99", 8), ("0", 8), ("", 8), ("many", 8), ("-1", 8)]
)
def test_omp_num_threads_lowers_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    monkeypatch.setattr(settings, "count_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert count_threads() == expected


@pytest.mark.parametrize(("limit", "expected"), [(None, 8), (64.0, 8), (2.0, 2), (1.5, 2), (0.1, 1)])
def test_cores_are_limited_by_affinity_and_by_the_container(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(settings, "cpu_limit", lambda: limit)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count_cores() == count_threads() == expected
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    settings.set_openmp_defaults()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("ACTIVE", "5")
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name)
    settings.set_openmp_defaults()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    # OMP_NUM_THREADS stays unset if torch would choose the same number of threads.
    assert os.environ.get("OMP_NUM_THREADS") == (None if expected == 8 else str(expected))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_openmp_variables_are_set_before_torch_loads_and_the_log_names_the_threads(pool: Pool, tmp_path: Path) -> None:
    """OpenMP prints its settings when torch loads it, so they show the variables that lmpool has set."""
    worker = pool.start(
        "--backend", "hf", "--log-format", "json", "--kv-cache-bytes", 0,
        model=str(write_model(tmp_path / "tiny", "llama")),
        command=lambda: [
            "env", "-u", "OMP_WAIT_POLICY", "OMP_NUM_THREADS=1", "OMP_DISPLAY_ENV=VERBOSE", *lmpool_command()
        ],
    )  # fmt: skip
    # GOMP_SPINCOUNT is how often a thread spins before it sleeps: 300,000, or 0 if the wait policy is passive.
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\w+)'", worker.text)) == {"0"}
    lines = [json.loads(line) for line in worker.text.splitlines() if line.startswith("{")]
    (entry,) = [line for line in lines if line["message"].startswith("computing on cpu; ")]
    assert entry["message"].endswith("CPU threads: 1")
    assert entry["threads"] == 1
