"""Adapters that come and go while a backend serves: their rows are right, and those of others stay what they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import name_of, qualify
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, V
from tests.contract.subjects import Subject


def test_adapters_that_come_and_go_leave_right_rows(
    subject: Subject, model_folder: Path, adapter_folders: dict[str, Path], draw: random.Random
) -> None:
    if not subject.loads_adapters:
        with Opened(subject, model_folder, "float32", {}) as opened, pytest.raises(SettingsError, match="^adapters: "):
            opened.backend.load_adapter("warm", str(adapter_folders["warm"]))
        return
    first, second = ADAPTERS
    with Opened(subject, model_folder, "float32", {}) as opened:
        backend = opened.backend
        prompts = [prompt(draw, length) for length in (3, 33, 40, 70)]
        # Under one name first, so that nothing but the weights tells them apart.
        revisions = {name: backend.load_adapter("a", str(adapter_folders[name])) for name in (first, second)}
        assert set(backend.adapters) == {qualify("a", revision) for revision in revisions.values()}
        for revision in revisions.values():
            backend.drop_adapter(qualify("a", revision))
        assert not backend.adapters
        for name in (first, second, first):
            assert backend.load_adapter(name, str(adapter_folders[name])) == revisions[name]
            for _ in range(3):
                wanted = {"": opened.submit(prompts), name: opened.submit(prompts, name)}
                for adapter, digests in wanted.items():
                    opened.check(prompts, opened.finish(digests), adapter)
                prompts = [[*ids, draw.randrange(V)] for ids in prompts]
            left = opened.submit(prompts, name)
            backend.abort(left)
            (loaded,) = (adapter for adapter in backend.adapters if name_of(adapter) == name)
            backend.drop_adapter(loaded)
            assert not backend.adapters
            opened.check(prompts, opened.ask(prompts))


def test_an_adapter_that_is_there_or_cannot_be_loaded_leaves_the_backend_as_it_was(
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
