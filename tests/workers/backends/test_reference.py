"""A worker with --verify compares its rows with transformers in float32: it refuses wrong rows and stale references."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft.tuners.lora import LoraLayer

from lmpool.errors import SettingsError
from lmpool.workers.backends import reference
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf import reference as hf_reference
from lmpool.workers.backends.hf.adapters import HfAdapters
from lmpool.workers.backends.hf.reference import compute_reference
from lmpool.workers.backends.reference import FILE, ReferenceRows
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendStats
from tests.contract import model as contract
from tests.support.models.tiny_models import MAX_TOKENS, VOCAB_SIZE, write_model
from tests.support.pool import run_lmpool


def opened(folder: Path, **values: Any) -> Any:
    return HfSettings(str(folder), device="cpu", verify=True, **values).open()


def refused(folder: Path, **values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        opened(folder, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a Gemma 2, which caps attention scores and has a sliding window, with a stored reference."""
    folder = write_model(tmp_path / "gemma2", "gemma2")
    compute_reference(HfSettings(str(folder))).write(folder / FILE)
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A model and an rsLoRA adapter in the form name=folder; `lmpool verify --write` has stored their reference."""
    place = tmp_path_factory.mktemp("adapted")
    folder, adapter = contract.write_model(place / "llama"), contract.write_adapter(place / "rslora", "rslora")
    said = run_lmpool("verify", str(folder), "--write", "--adapters", f"r={adapter}").stdout
    assert said == f"wrote the rows of 4 prompts, for the model and 1 adapter to {folder / FILE}\n"
    return folder, [f"r={adapter}"]


def test_a_correct_worker_agrees_with_the_stored_reference(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LAUNCH", "raise SystemExit('the stored reference is not used')")
    with closing(opened(stored)) as backend:
        assert backend.stats() == BackendStats(), "the compared rows do not count"


def test_the_reference_has_the_rows_of_the_merged_model(adapted: tuple[Path, list[str]]) -> None:
    folder, (named,) = adapted
    written = ReferenceRows.read(folder / FILE)
    for name, revision in {"": "", "rslora": checkpoint_revision(Path(named.removeprefix("r=")))}.items():
        rows = [contract.reference_row(ids, name) for ids in written.prompts]
        np.testing.assert_allclose(written.rows[revision], rows, atol=1e-4)


def test_a_prompt_exceeds_the_sliding_window_and_none_the_models_limit(stored: Path) -> None:
    lengths = list(map(len, ReferenceRows.read(stored / FILE).prompts))
    assert 4 < max(lengths) < MAX_TOKENS
    assert lengths == sorted({*lengths})


def test_attention_without_soft_capping_is_found(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hf_model, "_choose_attention", lambda forward, _, prompts: ("", hf_model._logits_alone(forward, prompts))
    )
    assert re.match(
        r"model: gemma2 cannot be served by hf: a row of \d+ tokens differs from transformers in float32 by \d",
        refused(stored),
    )


def test_an_adapter_without_its_scale_is_found(
    adapted: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, adapters = adapted
    opened(folder, adapters=adapters).close()
    load = HfAdapters.load

    def load_unscaled(self: HfAdapters, adapter: str, place: Path) -> None:
        load(self, adapter, place)
        for layer in self._forward.model.modules():
            if isinstance(layer, LoraLayer):
                layer.scaling = dict.fromkeys(layer.scaling, 1.0)

    monkeypatch.setattr(HfAdapters, "load", load_unscaled)
    assert "tokens with the adapter 'r' differs from transformers" in refused(folder, adapters=adapters)


def test_only_the_first_adapters_are_compared(adapted: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, (named,) = adapted
    wanted = [f"{name}={named.removeprefix('r=')}" for name in "abcde"]
    settings = HfSettings(str(folder), device="cpu", adapters=wanted)
    with closing(settings.open()) as backend:
        found = reference.compare(backend, ReferenceRows.read(folder / FILE))
    assert {each.adapter.partition("@")[0] for each in found} == {"", "a", "b", "c"}
    monkeypatch.setattr(reference, "LAUNCH", "import sys; raise SystemExit(str(sys.argv))")
    with pytest.raises(SettingsError) as caught:
        reference._run_writer(settings, folder / "unused", "")
    assert str(caught.value).count("--adapters=") == 3


def test_without_a_stored_reference_another_process_computes_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    files = sorted(folder.iterdir())
    opened(folder).close()
    assert sorted(folder.iterdir()) == files


def test_a_reference_of_other_weights_is_refused(stored: Path) -> None:
    write_model(stored, "gemma2", seed=1)
    assert refused(stored) == (
        f"verify: {stored / FILE} belongs to other files than {stored} has now: "
        f"write it again: lmpool verify {stored} --write"
    )


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"no numbers"])
def test_a_damaged_reference_is_refused(stored: Path, content: bytes) -> None:
    (stored / FILE).write_bytes(content)
    assert refused(stored).startswith(f"verify: {stored / FILE} is no reference: ")


def test_a_model_that_does_not_fit_is_refused_with_advice(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_reference, "free_bytes", lambda: 1000)
    with pytest.raises(SettingsError) as caught:
        compute_reference(HfSettings(str(stored)))
    assert str(caught.value) == (
        f"verify: {stored} takes 0.0 GiB in float32, and 0.0 GiB are free here. Run `lmpool verify {stored} --write` "
        f"on a machine with more memory, and copy {FILE} next to the checkpoint, or omit --verify"
    )


def test_the_end_of_the_process_that_computes_the_reference_is_reported(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored / FILE).unlink()
    monkeypatch.setattr(reference, "LAUNCH", "import os; os.kill(os.getpid(), 9)")
    assert "signal 9 ended the process that computes the reference: is memory full? Run `lmpool ver" in refused(stored)
    monkeypatch.setattr(reference, "LAUNCH", "raise SystemExit('lmpool: verify: the reason')")
    assert refused(stored) == "verify: the reason"


def test_the_process_that_computes_the_reference_gets_the_digest(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stored / FILE).unlink()
    monkeypatch.setattr(reference, "LAUNCH", "import os; raise SystemExit(os.environ['LMPOOL_REFERENCE_DIGEST'])")
    assert refused(stored) == checkpoint_revision(stored)
    monkeypatch.setenv("LMPOOL_REFERENCE_DIGEST", "given")
    assert compute_reference(HfSettings(str(stored))).digest == "given"


def test_the_command_prints_the_differences(stored: Path) -> None:
    done = run_lmpool("verify", str(stored), "--device", "cpu")
    assert "the rows agree with transformers in float32" in done.stdout
    written = ReferenceRows.read(stored / FILE)
    ReferenceRows(written.digest, written.prompts, {"": np.roll(written.rows[""], 1)}).write(stored / FILE)
    done = run_lmpool("verify", str(stored), "--device", "cpu")
    assert done.returncode == 1
    assert "the rows do not agree with transformers in float32" in done.stdout


def test_a_reference_may_be_written_to_another_file(stored: Path, tmp_path: Path) -> None:
    written = ReferenceRows.read(stored / FILE)
    written.write(tmp_path / "other.npz")
    again = ReferenceRows.read(tmp_path / "other.npz")
    assert again.prompts == written.prompts
    assert again.rows[""].shape == (len(written.prompts), VOCAB_SIZE)
    with pytest.raises(SettingsError, match=r"^to: /proc/none\.npz cannot be written: "):
        written.write(Path("/proc/none.npz"))
