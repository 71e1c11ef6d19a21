"""Weights that are replaced while a backend serves: all rows are those of the new weights, or nothing has changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmpool.errors import SettingsError
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import unpack_numbers, width_of
from lmpool.protocol.tensors import read_types
from lmpool.workers.execution.contract import ChangesWeights
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, V
from tests.contract.subjects import Subject


class Versions:
    """The files of versions of the subject's model. Version 1 has other numbers than 0; 2 and 3 change a few of 1."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.full = {version: subject.weights(folder / f"full-{version}", version) for version in (0, 1)}
        self.sparse = [subject.changes(folder / f"sparse-{version}", version) for version in (2, 3)]

    def load(self, opened: Opened, full: int, later: int = 0, held: int = -1) -> None:
        """Load a full version, with the first `later` sparse files if it is version 1."""
        assert isinstance(opened.backend, ChangesWeights)
        opened.backend.load_weights(self.full[full], self.sparse[:later], held)
        opened.version = full + later


@pytest.fixture(scope="module")
def versions(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """The files of the versions of the subject's model."""
    return Versions(subject, tmp_path_factory.mktemp("versions"))


@pytest.fixture
def changed(opened: Opened, versions: Versions) -> Iterator[Opened]:
    """The opened backend with version 0, which it has again after the test."""
    yield opened
    versions.load(opened, 0)


def check(opened: Opened, prompts: list[list[int]]) -> None:
    """Check that rows, scores and hidden states, also with an adapter, are those of the version that is loaded."""
    info, longest = opened.backend.info, max(prompts, key=len)
    for adapter in ("", ADAPTERS[0]) if opened.subject.has_adapters else ("",):
        rows = opened.ask(prompts, adapter)
        opened.check(prompts, rows, adapter)
        if info.positions:
            opened.check_scores(longest, 1, opened.score([longest], [1], adapter)[0], adapter)
    if info.hidden:
        query = PositionsQuery(len(longest) - 1, values="hidden", size=width_of(info.hidden, info.dtype))
        (packed,) = opened.expect([longest], query)
        states = unpack_numbers(packed, 1, info.hidden, info.dtype)
        opened.check([longest], list(opened.head().logprobs(states)))


def test_all_rows_after_a_change_are_those_of_the_new_weights(
    changed: Opened, versions: Versions, draw: random.Random
) -> None:
    prompts, grown = [prompt(draw, length) for length in (1, 33, 40, 70)], prompt(draw, 70)
    check(changed, prompts)
    for version in (1, 0, 1):
        # Grow one prompt alone, so that each cache that a backend has holds the prompt's keys and values.
        for _ in range(4):
            grown = [*grown, draw.randrange(V)]
            changed.check([grown], changed.ask([grown]))
        versions.load(changed, version)
        grown = [*grown, draw.randrange(V)]
        changed.check([grown], changed.ask([grown]))
        check(changed, prompts)


def test_sparse_files_give_the_rows_of_the_whole_version(
    changed: Opened, versions: Versions, draw: random.Random
) -> None:
    prompts = [prompt(draw, length) for length in (3, 40)]
    for later, held in ((0, -1), (1, 0), (2, 1), (2, 2), (0, -1), (2, 0), (0, -1), (2, -1)):
        versions.load(changed, 1, later, held)
        check(changed, prompts)


def test_loading_everything_mends_mixed_weights(changed: Opened, versions: Versions, draw: random.Random) -> None:
    prompts = [prompt(draw, length) for length in (3, 40)]
    # The backend has version 0, not version 1, so the changes give weights of no version.
    versions.load(changed, 1, 1, held=0)
    versions.load(changed, 0)
    check(changed, prompts)


def _with_nan(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = np.full_like(tensors[name], np.nan if tensors[name].dtype.kind == "f" else -1)


def _without(tensors: dict[str, Any], name: str) -> None:
    del tensors[name]


def _in_another_shape(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = tensors[name].reshape(*tensors[name].shape, 1)


def _in_another_dtype(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = tensors[name].astype(np.float64)


def _with_another(tensors: dict[str, Any], name: str) -> None:
    tensors["another"] = tensors[name]


@pytest.mark.parametrize("damage", [_with_nan, _without, _in_another_shape, _in_another_dtype, _with_another])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_unfitting_weights_are_refused_and_change_nothing(
    changed: Opened,
    versions: Versions,
    draw: random.Random,
    tmp_path: Path,
    damage: Callable[[dict[str, Any], str], None],
    is_sparse: bool,
) -> None:
    backend, prompts = changed.backend, [prompt(draw, length) for length in (3, 40)]
    assert isinstance(backend, ChangesWeights)
    tensors = load_file(versions.sparse[0] if is_sparse else versions.full[1])
    # Damage the new numbers of a sparse file: without them, the places are left alone.
    damage(tensors, max(name for name in tensors if name.endswith(".values") or not is_sparse))
    save_file(tensors, tmp_path / "damaged")
    path = (versions.full[0], [tmp_path / "damaged"], 0) if is_sparse else (tmp_path / "damaged", [], -1)
    with pytest.raises(SettingsError, match="^weights: "):
        backend.load_weights(*path)
    check(changed, prompts)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_truncated_file_is_refused_and_changes_nothing(
    changed: Opened, versions: Versions, draw: random.Random, tmp_path: Path, is_sparse: bool
) -> None:
    backend, whole = changed.backend, versions.sparse[0] if is_sparse else versions.full[1]
    assert isinstance(backend, ChangesWeights)
    (path := tmp_path / "cut").write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(SettingsError, match="^weights: "):
        backend.load_weights(*((versions.full[0], [path], 0) if is_sparse else (path, [], -1)))
    check(changed, [prompt(draw, length) for length in (3, 40)])


def test_the_tensors_are_those_of_the_checkpoint(changed: Opened, versions: Versions) -> None:
    assert isinstance(changed.backend, ChangesWeights)
    assert changed.backend.tensors() == read_types(versions.full[0])
