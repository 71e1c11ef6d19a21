"""A worker publishes the vocabulary of its model's tokenizer, or logs in one line why there is no vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.smollm2 import gguf_path
from transformers import AutoTokenizer

from lmpool.protocol.model_info import ModelInfo
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends import tokenizer as texts
from lmpool.workers.backends.sglang.backend import device_of
from lmpool.workers.backends.tokenizer import read_texts
from tests.contract.model import PIECES, write_tokenizer
from tests.support.models.tiny_models import CONFIGS, write_model

INFO = ModelInfo(name="tiny", backend="hf", vocab_size=97, max_prompt_tokens=64, revision="1", dtype="float32")

BROKEN = {
    "no JSON": "{]",
    "empty": "",
    "no tokenizer": "[]",
    "no model": json.dumps({"added_tokens": []}),
    "a model of no known kind": json.dumps({"added_tokens": [], "model": {"type": "Oracle"}}),
    "a merge of what is no token": json.dumps(
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}
    ),
    "tokens that stand for no bytes": json.dumps(
        {
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": {"a": 0, "\u4e2d": 1}, "merges": []},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        }
    ),
}


def read(folder: Path, **changed: Any) -> Vocabulary | None:
    return read_texts(replace(INFO, source=str(folder), **changed), None, trust_remote_code=False).vocabulary


def warning(caplog: pytest.LogCaptureFixture) -> str:
    """The only warning that lmpool has logged."""
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the vocabulary of tiny is not published: ")
    assert line.endswith("passes its byte strings to producer.trie")
    assert "\n" not in line
    return line


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_vocabulary_of_smollm2_equals_that_of_its_tokenizer(smollm2_folder: Path, form: str) -> None:
    folder, file = (smollm2_folder, "") if form == "folder" else (gguf_path().parent, gguf_path().name)
    vocabulary = read(folder, vocab_size=49_152, gguf_file=file)
    assert vocabulary is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder)
    texts = tokenizer.batch_decode([[token] for token in range(49_152)], clean_up_tokenization_spaces=False)
    assert [token.decode(errors="replace") for token in vocabulary.tokens] == texts


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_folder_without_a_tokenizer_has_no_vocabulary(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For some architectures without tokenizer files, transformers creates a tokenizer with a few special tokens."""
    write_model(tmp_path, kind)
    caplog.clear()
    assert read(tmp_path) is None
    assert warning(caplog)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_tokenizer_leaves_out_only_the_vocabulary(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "llama")
    write_tokenizer(tmp_path)
    assert read(tmp_path) == Vocabulary([*PIECES.values(), *[b""] * (97 - len(PIECES))])
    (tmp_path / "tokenizer.json").write_text(text)
    caplog.clear()
    assert read(tmp_path) is None
    assert warning(caplog)


def test_a_missing_source_leaves_out_only_the_vocabulary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path / "gone") is None
    assert warning(caplog)


def test_a_tokenizer_is_loaded_as_the_model_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(source: str, **options: Any) -> Any:
        asked.append((source, options))
        raise OSError("not here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    trouble = ["", "no way there"]
    monkeypatch.setattr(texts, "hub_problem", lambda: trouble.pop(0))
    read_texts(replace(INFO, source="org/model"), "v2", trust_remote_code=True)
    read_texts(replace(INFO, source="org/model"), "v2", trust_remote_code=True)
    read_texts(replace(INFO, source=str(tmp_path), gguf_file="m.gguf"), None, trust_remote_code=False)
    hub = {"gguf_file": None, "revision": "v2", "trust_remote_code": True, "local_files_only": False}
    # transformers must read local files only, if the model is a folder or the hub does not respond.
    cached = {**hub, "local_files_only": True}
    local = {"gguf_file": "m.gguf", "revision": None, "trust_remote_code": False, "local_files_only": True}
    assert asked == [("org/model", hub), ("org/model", cached), (str(tmp_path), local)]


def test_another_exception_is_not_treated_as_a_bad_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mistake(Exception):
        pass

    def load(source: str, **options: Any) -> Any:
        raise Mistake

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    with pytest.raises(Mistake):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"device": "cpu", "base_gpu_id": 0}, "cpu"),
        ({"device": "cuda", "base_gpu_id": 0}, "cuda:0"),
        ({"device": "cuda", "base_gpu_id": 3}, "cuda:3"),
        ({"device": "cuda:3", "base_gpu_id": 3}, "cuda:3"),
    ],
    ids=str,
)
def test_the_device_of_sglang_has_its_index(options: dict[str, Any], device: str) -> None:
    assert device_of(options) == device
