"""What the hf backend computes with: the attention that the config asks for, and weights in memory of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.model import EAGER
from lmpool.workers.backends.settings import HfSettings
from tests.support.models.tiny_models import make_model, write_model
from tests.workers.backends.hf.hf_tiny import Reference, Tiny, random_prompts, serve

PROMPTS = random_prompts(4, (10, 30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def attention_of(backend: HfBackend) -> str | None:
    implementation: str | None = backend._forward.model.config._attn_implementation
    return implementation


@pytest.mark.parametrize("left_out", [hf_model._LEFT_OUT, ()], ids=["by-config", "by-comparison"])
def test_attention_keeps_the_soft_cap_that_the_config_asks_for(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, left_out: tuple[str, ...]
) -> None:
    monkeypatch.setattr(hf_model, "_LEFT_OUT", left_out)
    backend = tiny.backend("gemma2")
    assert attention_of(backend) == EAGER
    rows = serve(backend, PROMPTS)
    tiny.reference("gemma2").check(rows)
    uncapped = Reference(tiny.folder("gemma2"), "sdpa")
    assert max(np.abs(row - uncapped.row(prompt)).max() for prompt, row in rows.items()) > 0.1


def test_a_small_soft_cap_is_kept_although_no_row_of_the_check_shows_it(tmp_path: Path) -> None:
    model = make_model("gemma2")
    model.config.attn_logit_softcapping = 1e4
    model.save_pretrained(tmp_path)
    assert attention_of(HfBackend(HfSettings(str(tmp_path), device="cpu"))) == EAGER


def test_the_default_attention_stays_where_it_leaves_nothing_out(tiny: Tiny) -> None:
    for kind in ("llama", "gpt2", "mistral", "gemma3"):
        assert attention_of(tiny.backend(kind)) == "sdpa"


def test_rows_of_another_attention_have_another_fingerprint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were computed without the soft cap may still be in the cache."""
    capped = tiny.backend("gemma2").info
    monkeypatch.setattr(
        hf_model, "_choose_attention", lambda model, config, prompts: ("", hf_model._Check(model, prompts))
    )
    assert tiny.backend("gemma2").info.fingerprint != capped.fingerprint


def test_eager_attention_that_gives_no_numbers_is_not_chosen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models overflow in 16 bits there."""
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.eager_attention_forward",
        lambda module, query, *_, **__: (torch.full_like(query.transpose(1, 2), torch.nan), None),
    )
    assert attention_of(tiny.backend()) == "sdpa"


def test_a_model_that_cannot_run_with_eager_attention_is_served_without(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise NotImplementedError("no eager attention")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", fails)
    assert attention_of(tiny.backend()) == "sdpa"


def mapped_files(folder: Path) -> set[str]:
    """The files in a folder that this process has mapped into its memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if str(folder) in line}


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder with a model that is about to be changed."""
    return write_model(tmp_path / "served", "llama")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_files_that_change_leave_the_rows_of_a_running_worker_as_they_are(
    tiny: Tiny, served: Path, tmp_path: Path, suffix: str
) -> None:
    file = served / f"model.{suffix}"
    if suffix == "bin":
        (served / "model.safetensors").unlink()
        file = served / "pytorch_model.bin"
        torch.save(make_model("llama").state_dict(), file)
    other = write_model(tmp_path / "other", "llama", seed=1)
    backend = HfBackend(HfSettings(str(served), device="cpu", kv_cache_bytes=0))
    assert mapped_files(served) == set()  # Else the next lines would end the tests by SIGBUS.
    inode = file.stat().st_ino
    shutil.copyfile(other / "model.safetensors", file)
    assert file.stat().st_ino == inode
    tiny.reference("llama").check(serve(backend, PROMPTS))
    os.truncate(file, 100)
    tiny.reference("llama").check(serve(backend, PROMPTS))


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    make_model("gemma3").save_pretrained(tmp_path)
    served: Any = HfBackend(HfSettings(str(tmp_path), device="cpu"))._forward.model
    assert served.get_input_embeddings().weight.data_ptr() == served.get_output_embeddings().weight.data_ptr()
