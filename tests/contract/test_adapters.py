"""Adapters that are loaded and dropped while a backend serves: their rows are correct, and other rows do not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import name_of, qualify
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, KINDS, V
from tests.contract.subjects import Subject


@pytest.fixture(scope="module")
def opened(
    subject: Subject, model_folder: Path, adapter_folders: dict[str, Path], kind_folders: dict[str, Path]
) -> Iterator[Opened]:
    """The subject's backend with adapters of all kinds that the backend serves."""
    served = {kind: folder for kind, folder in kind_folders.items() if kind not in subject.refused}
    with Opened(subject, model_folder, "float32", adapter_folders | served) as opened:
        yield opened


def test_loading_and_dropping_adapters_leaves_rows_correct(
    changing: Opened, adapter_folders: dict[str, Path], draw: random.Random
) -> None:
    backend, (first, second) = changing.backend, ADAPTERS
    if not changing.subject.loads_adapters:
        with pytest.raises(SettingsError, match="^adapters: "):
            backend.load_adapter("warm", str(adapter_folders["warm"]))
        return
    before, prompts = set(backend.adapters), [prompt(draw, length) for length in (3, 33, 40, 70)]
    # Load two adapters under one name first, so that only their revisions differ.
    revisions = {name: backend.load_adapter("a", str(adapter_folders[name])) for name in (first, second)}
    assert set(backend.adapters) == before | {qualify("a", revision) for revision in revisions.values()}
    for revision in revisions.values():
        backend.drop_adapter(qualify("a", revision))
    assert set(backend.adapters) == before
    for name in (first, second, first):
        assert backend.load_adapter("later", str(adapter_folders[name])) == revisions[name]
        for _ in range(3):
            wanted = {"": changing.submit(prompts), name: changing.submit(prompts, "later")}
            for adapter, digests in wanted.items():
                changing.check(prompts, changing.finish(digests), adapter)
            prompts = [[*ids, draw.randrange(V)] for ids in prompts]
        backend.abort(changing.submit(prompts, "later"))
        backend.drop_adapter(qualify("later", revisions[name]))
        assert set(backend.adapters) == before
        changing.check(prompts, changing.ask(prompts))


def test_loading_a_present_or_a_bad_adapter_changes_nothing(
    opened: Opened, tmp_path: Path, draw: random.Random
) -> None:
    before = dict(opened.backend.adapters)
    for adapter, source in before.items():
        assert qualify(name_of(adapter), opened.backend.load_adapter(name_of(adapter), source)) == adapter
    with pytest.raises(SettingsError, match="^adapters: "):
        opened.backend.load_adapter("a", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="^adapters: "):
        opened.backend.load_adapter("a", str(tmp_path))
    assert dict(opened.backend.adapters) == before
    prompts = [prompt(draw, 5)]
    opened.check(prompts, opened.ask(prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_has_the_rows_of_the_merged_model_or_is_refused(
    opened: Opened, kind: str, kind_folders: dict[str, Path], model_folder: Path, draw: random.Random
) -> None:
    subject = opened.subject
    if kind in subject.refused:
        with pytest.raises(SettingsError) as caught:
            subject.make(model_folder, "float32", {kind: kind_folders[kind]})
        assert str(caught.value).startswith(f"adapters: {kind_folders[kind]} {subject.refused[kind]}")
        return
    if not subject.has_adapters:
        assert not opened.backend.adapters
        return
    prompts = [prompt(draw, length) for length in (3, 33, 40)]
    # Run prompts of several adapters in one batch, so that a backend that confuses adapters fails.
    wanted = {adapter: opened.submit(prompts, adapter) for adapter in (kind, "", ADAPTERS[0])}
    for adapter, digests in wanted.items():
        opened.check(prompts, opened.finish(digests), adapter)
    if opened.backend.info.positions:
        opened.check_scores(prompts[1], 1, opened.score(prompts[1:2], [1], kind)[0], kind)
