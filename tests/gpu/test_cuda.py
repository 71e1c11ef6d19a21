"""Tests on a CUDA device: the contract tests with each installed engine, and the pool's throughput.

Run this file in the environment of each engine: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.timeout(1800),
]


def run(*command: str, **environment: str) -> str:
    """Run a Python module on the device; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env={**os.environ, "LMPOOL_DEVICE": "cuda", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize(("backend", "package"), [("hf", "transformers"), ("vllm", "vllm"), ("sglang", "sglang")])
def test_every_installed_engine_keeps_the_contract_on_the_device(backend: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed in this environment")
    # Layers on two devices and on the disk run with accelerate.
    subjects = "hf,hf-offload" if backend == "hf" else backend
    print(run("pytest", "-q", "tests/contract", "--timeout", "600", LMPOOL_CONTRACT=subjects))


def test_the_pool_is_measured_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run("benchmarks", "hf-1b", "--quick")
    with capsys.disabled():  # Always print the throughput: this test exists to measure it.
        print(f"\n{torch.cuda.get_device_name()}\n{shown}")
    assert "hf-1b-rows" in shown
