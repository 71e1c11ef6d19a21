"""Fixtures of the engines' tests. LMPOOL_CONTRACT names the engine to test, and `make test` tests all engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.model import ADAPTERS, write_adapter, write_model, write_reference
from tests.contract.subjects import chosen

_ENGINE = os.environ.get("LMPOOL_CONTRACT", "").partition("-")[0]

if _ENGINE:
    chosen()  # Call `chosen` for its side effect: it installs the shims of this run before a test imports the engine.

collect_ignore_glob = [f"test_{name}*.py" for name in ("vllm", "sglang") if name != _ENGINE]

# Tests of models in several processes run once, not once per variant of a model in one process.
collect_ignore_glob += ["test_*_rank*.py"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama model of the contract tests, with its reference."""
    folder = write_model(tmp_path_factory.mktemp("engine") / "llama")
    write_reference(folder, {"": None})
    return folder


@pytest.fixture(scope="session")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter for the model of the contract tests."""
    return write_adapter(tmp_path_factory.mktemp("adapter") / "warm", ADAPTERS[0])
