"""Opens one backend at a time: a subject in one dtype, for all tests that use it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.driver import Opened
from tests.contract.model import ADAPTERS, write_adapter, write_model
from tests.contract.subjects import Subject, chosen

_seeds = itertools.count()


@pytest.fixture
def draw() -> random.Random:
    """Random prompts, different in each test, so that no test finds cached prefixes of another."""
    return random.Random(next(_seeds))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all subjects serve."""
    return write_model(tmp_path_factory.mktemp("contract") / "llama")


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, name) for name in ADAPTERS}


@pytest.fixture(scope="session", params=chosen(), ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """One of the backends under test in this run."""
    subject: Subject = request.param
    return subject


@pytest.fixture(scope="module")
def opened(subject: Subject, model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[Opened]:
    """The subject's backend in float32; one per module, because a process cannot open an engine twice."""
    with Opened(subject, model_folder, "float32", adapter_folders) as opened:
        yield opened
