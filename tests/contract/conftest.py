"""Fixtures of the contract tests: each backend under test (a subject) is opened once, and one at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.contract.driver import Opened
from tests.contract.model import ADAPTERS, KINDS, write_adapter, write_model, write_reference
from tests.contract.subjects import Subject, chosen

_seeds = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests in files that a subject does not name in `files`, and tests of abilities that it lacks."""
    items[:] = [item for item in items if _is_wanted(item)]


def _is_wanted(item: pytest.Item) -> bool:
    subject = item.callspec.params.get("subject") if hasattr(item, "callspec") else None
    if not isinstance(subject, Subject):
        return True
    if item.path.name == "test_spread.py" and subject.processes == 1:
        return False
    if item.path.name == "test_weights.py" and not subject.changes_weights:
        return False
    return item.path.name in subject.files or not subject.files


@pytest.fixture
def draw() -> random.Random:
    """Random numbers for prompts, different in each test, so that no test finds prefixes cached by another test."""
    return random.Random(next(_seeds))


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, adapter_folders: dict[str, Path], kind_folders: dict[str, Path]
) -> Path:
    """The model that all subjects serve, with the reference that each subject must agree with when it starts."""
    folder = write_model(tmp_path_factory.mktemp("contract") / "llama")
    write_reference(folder, {"": None} | adapter_folders | kind_folders)
    return folder


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of each adapter -> its folder."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, name) for name in ADAPTERS}


@pytest.fixture(scope="session")
def kind_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of each adapter -> its folder."""
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: write_adapter(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session", params=[pytest.param(subject, id=name) for name, subject in chosen().items()])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Description of one of the backends under test in this run."""
    subject: Subject = request.param
    return subject


def _scope_of_opened(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """Open an engine with several processes only once, because this takes long; tests that open another run first."""
    return "session" if all(subject.processes > 1 for subject in chosen().values()) else "module"


@pytest.fixture(scope=_scope_of_opened)
def with_adapters(subject: Subject, model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[Opened]:
    """The subject's backend in float32, opened once per module."""
    with Opened(subject, model_folder, "float32", adapter_folders) as opened:
        yield opened


@pytest.fixture
def opened(with_adapters: Opened) -> Opened:
    """The same; a module may define a backend with other adapters."""
    return with_adapters


@pytest.fixture
def changing(request: pytest.FixtureRequest, subject: Subject, model_folder: Path) -> Iterator[Opened]:
    """A backend that begins without adapters. An engine with several processes begins with those of the other tests."""
    if subject.processes > 1:
        yield request.getfixturevalue("with_adapters")
        return
    with Opened(subject, model_folder, "float32", {}) as opened:
        yield opened
