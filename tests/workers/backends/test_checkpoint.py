"""Checkpoints: a folder or hub name is found or refused in one line, and a digest changes with any byte of a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import SettingsError
from lmpool.workers.backends import checkpoint
from lmpool.workers.backends.checkpoint import (
    check_model_path,
    checkpoint_dtype,
    checkpoint_folder,
    checkpoint_revision,
)
from lmpool.workers.backends.hf.model import load_model
from lmpool.workers.backends.settings import HfSettings

Write = Callable[..., Path]

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "rope_scaling": {"factor": 2.0}}
WEIGHTS = bytes(range(256)) * 50
"""Content of a weight file: 1600 words of 64 bits."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a checkpoint and returns its folder."""

    def written(
        name: str = "model",
        config: Mapping[str, Any] | None = CONFIG,
        config_name: str = "config.json",
        **weights: bytes,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if config is not None:
            (folder / config_name).write_text(json.dumps(config))
        for stem, data in (weights or {"model": WEIGHTS}).items():
            (folder / f"{stem}.safetensors").write_bytes(data)
        return folder

    return written


# Folders and the hub


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub; in tests, huggingface_hub sends no request."""
    from huggingface_hub import constants

    assert constants.is_offline_mode(), "no test may ask the hub"
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def test_a_folder_is_its_own_checkpoint(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(folder)
    for name in (str(folder), "model", "./model", "~/model", "link", f"{folder}/../model/"):
        assert checkpoint_folder("model", name) == folder.resolve()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../nowhere/model", "~/nowhere", "some/where/deep"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError) as caught:
        checkpoint_folder("adapters", name)
    assert str(caught.value) == f"adapters: {name} cannot be loaded: there is no such folder"


def test_the_home_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(SettingsError, match="^model: ~nobody-here/model cannot be loaded: "):
        checkpoint_folder("model", "~nobody-here/model")


@pytest.mark.parametrize("name", ["a" * 300, "/" + "a" * 300])
def test_a_name_that_is_too_long_for_a_path_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="^adapters: "):
        checkpoint_folder("adapters", name)


@pytest.mark.parametrize(
    ("file", "beside", "message"),
    [
        ("model.gguf", "config.json", "it is a GGUF file, which only --backend hf serves"),
        ("model.safetensors", "config.json", "it is a file, and a model is a folder with .*: name {folder}"),
        ("model.bin", "config.json", "it is a file, and a model is a folder with .*: name {folder}"),
        (
            "model.pt",
            "model.bin",
            "it is a file, and a model is a folder with config.json, weights and tokenizer$",
        ),
        ("tokenizer.json", "config.json", "it is a file, and a model is a folder with .*: name {folder}"),
    ],
)
@pytest.mark.parametrize("written_as", ["from the root", "from here", "like a hub name"])
def test_a_file_is_refused(
    file: str, beside: str, message: str, written_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / file).write_bytes(b"GGUF")
    (folder / beside).write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)
    name = {"from the root": str(folder / file), "from here": f"./m/{file}", "like a hub name": f"m/{file}"}[written_as]
    with pytest.raises(SettingsError, match=f"^model: {name} cannot be loaded: {message.format(folder=folder)}"):
        checkpoint_folder("model", name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "it has no config.json$"),
        (
            ("adapter_config.json", "adapter_model.safetensors"),
            "it holds a LoRA adapter .* its base model 'org/base', with",
        ),
        (("model.safetensors", "tokenizer.json"), "it has no config.json$"),
        (("b.gguf", "a.gguf"), "it has no config.json. .* name the file: .*a.gguf"),
        (("inner/config.json",), "it has no config.json. Models are in .*/inner$"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_a_hint(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(SettingsError, match=f"^model: {tmp_path} cannot be loaded: {message}"):
        checkpoint_folder("model", str(tmp_path))


def test_a_misspelt_name_gets_a_suggestion(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("smollm2")
    monkeypatch.chdir(tmp_path)
    for name in ("./smolm2", str(tmp_path / "smolm2"), "smolm2"):
        with pytest.raises(SettingsError, match=r"; did you mean .*smollm2\?$"):
            checkpoint_folder("model", name)
        # An error about an adapter must not name folders of the worker's machine, because clients see the error.
        with pytest.raises(SettingsError) as caught:
            checkpoint_folder("adapters", name)
        assert "smollm2" not in str(caught.value)


def test_a_missing_path_is_refused_before_anything_is_loaded(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("smollm2-float32")
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for name, what, meant in (("./smollm2", "folder", "smollm2-float32"), ("./modle.gguf", "file", "model.gguf")):
        with pytest.raises(SettingsError) as caught:
            check_model_path(name)
        place = tmp_path / Path(name).name
        told = f"there is no such {what} ({place}); did you mean {meant}?"
        assert str(caught.value) == f"model: {name} cannot be loaded: {told}"
    # The backend accepts these three names: the first is a folder, and the others may be names on the hub.
    for name in ("./smollm2-float32", "smollm2", "org/smollm2"):
        check_model_path(name)


@pytest.mark.parametrize(
    "name",
    [
        "nobody/nothing",
        "nothing",
        "a b",
        "a--b",
        "-a",
        "é",
        "a/b:c",
        "x" * 200,
        "owner/",
        "model.gguf",
        "\N{SNOWMAN}/x",
    ],
)
@pytest.mark.usefixtures("hub_cache")
def test_a_hub_name_without_a_copy_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        checkpoint_folder("model", name)
    text = str(caught.value)
    assert re.match(f"model: '?{name}'? is no folder here, and the hub cannot provide it: ", text)
    assert text.count("\n") == 0
    assert len(text) < 600


@pytest.mark.parametrize("message", ["no\nway", "\n\n no \nway", "no " * 1000])
def test_an_error_of_the_hub_is_shown_in_one_line(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise OSError(message)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(SettingsError, match="the hub cannot provide it: no") as caught:
        checkpoint_folder("model", "nobody/nothing")
    assert "way" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_copy_in_the_cache_is_found_without_the_hub(hub_cache: Path) -> None:
    repository = hub_cache / "models--nobody--tiny"
    commits = {"main": "a" * 40, "other": "b" * 40}
    for branch, commit in commits.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    assert checkpoint_folder("model", "nobody/tiny") == repository / "snapshots" / commits["main"]
    assert checkpoint_folder("model", "nobody/tiny", "other") == repository / "snapshots" / commits["other"]
    with pytest.raises(
        SettingsError, match="^model: '?nobody/tiny'? is no folder here, and the hub cannot provide it: "
    ):
        checkpoint_folder("model", "nobody/tiny", "none")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a hub that cannot be reached; returns the list of requests that `huggingface_hub` tried."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    asked: list[str] = []

    def unreachable(self: object, method: str, url: str, **_: object) -> object:
        asked.append(f"{method} {url}")
        raise ConnectionError("no way")

    client = type(_http.get_session())
    monkeypatch.setattr(client, "request", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # No server listens on port 1, and the system never assigns it to a program.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    return asked


def test_no_files_are_requested_from_a_hub_that_cannot_be_reached(hub_cache: Path, asked: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        checkpoint_folder("model", "nobody/nothing")
    refusal = "model: 'nobody/nothing' is no folder here, and the hub cannot provide it: "
    assert str(caught.value).startswith(f"{refusal}http://127.0.0.1:1 cannot be reached (")
    assert f"its cache {hub_cache} has no copy" in str(caught.value)
    assert "`hf download nobody/nothing`" in str(caught.value)
    copy = hub_cache / "models--nobody--tiny"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("a" * 40)
    (copy / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert checkpoint_folder("model", "nobody/tiny") == copy / "snapshots" / ("a" * 40)
    assert asked == []


def test_a_silent_hub_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "HUB_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached (" in checkpoint.hub_problem()


@pytest.mark.parametrize("status", [200, 401, 503])
def test_any_answer_of_the_hub_counts(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Answer) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        thread = threading.Thread(target=hub.handle_request)
        thread.start()
        assert checkpoint.hub_problem() == ""
        thread.join()


class Hub(BaseHTTPRequestHandler):
    """A simulated Hugging Face hub with one repository."""

    commit = "c" * 40
    files: ClassVar[dict[str, bytes]] = {}
    downloaded: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(self.path.partition(f"/resolve/{self.commit}/")[2])

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/org/tiny"):
            name = self.path.partition(f"/resolve/{self.commit}/")[2]
            self.downloaded.extend([name] if name in self.files else [])
            self._answer(name, self.files.get(name, b""))
            return
        siblings = [{"rfilename": name} for name in self.files]
        facts = {"id": "org/tiny", "modelId": "org/tiny", "sha": self.commit, "siblings": siblings, "tags": []}
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": blake2b(data, digest_size=20).hexdigest()}
            for name, data in self.files.items()
        ]
        body = json.dumps(entries if "/tree/" in self.path else facts | {"private": False, "downloads": 0}).encode()
        self._answer("", body)

    def _answer(self, name: str, body: bytes = b"") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body or self.files.get(name, b""))))
        self.send_header("ETag", f'"{blake2b(self.files.get(name, b""), digest_size=20).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("files", "downloaded"),
    [
        (
            ("config.json", "a.safetensors", "a.bin", "a.onnx", "original/a.pth", "a.gguf"),
            ("a.safetensors", "config.json"),
        ),
        (("config.json", "a.bin", "a.pt", "b.bin"), ("a.bin", "b.bin", "config.json")),
    ],
)
def test_weights_are_downloaded_in_one_format(
    files: tuple[str, ...], downloaded: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "files", {name: name.encode() for name in files})
    monkeypatch.setattr(Hub, "downloaded", [])
    code = (
        "from lmpool.workers.backends.checkpoint import checkpoint_folder\n"
        "print(*(path.name for path in sorted(checkpoint_folder('model', 'org/tiny').iterdir())))"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        environment = {
            **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        hub.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert tuple(done.stdout.split()) == downloaded
    assert tuple(sorted(Hub.downloaded)) == downloaded


# The digest


def test_a_copy_elsewhere_has_the_same_digest(write: Write, tmp_path: Path) -> None:
    folder = write(first=WEIGHTS, second=b"")
    copy = Path(shutil.copytree(folder, tmp_path / "else" / "where"))
    for path in copy.iterdir():
        os.utime(path, (0, 0))
    (copy / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=8))
    (copy / "tokenizer.json").write_text("{}")
    (copy / "README.md").write_text("Weights.")
    digest = checkpoint_revision(folder)
    assert len(bytes.fromhex(digest)) == 16
    assert checkpoint_revision(copy) == digest
    assert checkpoint_revision(copy) == digest


@given(st.data())
def test_the_digest_changes_with_any_bit_of_a_file_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # The digest reads tables (2 MiB) of rows (4 KiB): draw less than a row, several rows, or more than a table.
    size = data.draw(st.one_of(st.integers(1, 40), st.integers(80_000, 80_016), st.integers(2_100_000, 2_200_000)))
    folder = tmp_path_factory.mktemp("model")
    weights = bytearray(range(251)) * 9000
    del weights[size:]
    (folder / "model.bin").write_bytes(weights)
    before = checkpoint_revision(folder)
    weights[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "model.bin").write_bytes(weights)
    assert checkpoint_revision(folder) != before


@pytest.mark.parametrize(
    ("first", "second"), [(0, 1), (700, 100_000), (5, 512 + 5), (5, 512**2 + 5), (-1, -2), (7, -1)]
)
def test_two_swapped_weights_change_the_digest(write: Write, first: int, second: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**63, 2 * 512**2 + 9, dtype=np.uint64)
    before = checkpoint_revision(write("before", model=words.tobytes()))
    words[[first, second]] = words[[second, first]]
    assert checkpoint_revision(write("after", model=words.tobytes())) != before


def test_the_order_of_the_files_does_not_matter(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(a=WEIGHTS, b=WEIGHTS[:8], c=b"")
    digest = checkpoint_revision(folder)
    listed = list(folder.iterdir())
    for turn in range(len(listed)):
        monkeypatch.setattr(Path, "iterdir", lambda _, turn=turn: iter(listed[turn:] + listed[:turn]))
        assert checkpoint_revision(folder) == digest


def test_the_files_are_read_again_only_after_a_change(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_SETTLED_NS", -1)
    folder, read = write(), list[Path]()

    def read_config(path: Path) -> dict[str, Any]:
        read.append(path)
        return {}

    monkeypatch.setattr(checkpoint, "read_config", read_config)
    assert checkpoint_revision(folder) == checkpoint_revision(folder) != checkpoint_revision(folder, {"dtype": "fp8"})
    assert len(read) == 1
    (folder / "model.safetensors").write_bytes(WEIGHTS + b"more")
    assert checkpoint_revision(folder) == checkpoint_revision(folder)
    assert len(read) == 2


def test_different_checkpoints_have_different_digests(write: Write) -> None:
    folders = {
        "plain": write("plain"),
        "no config": write("no config", config=None),
        "an empty config": write("an empty config", config={}),
        "another value": write("another value", config=CONFIG | {"hidden_size": 16}),
        "a value deep inside": write("a value deep inside", config=CONFIG | {"rope_scaling": {"factor": 4.0}}),
        "one value more": write("one value more", config=CONFIG | {"tie_word_embeddings": True}),
        "another name of the file": write("another name of the file", weights=WEIGHTS),
        "an empty file": write("an empty file", model=b""),
        "an empty file more": write("an empty file more", model=WEIGHTS, other=b""),
        "a byte more": write("a byte more", model=WEIGHTS + b"\0"),
        "a word of zeros more": write("a word of zeros more", model=WEIGHTS + bytes(8)),
        "a byte less": write("a byte less", model=WEIGHTS[:-1]),
        "two files": write("two files", a=WEIGHTS[:96], b=WEIGHTS[96:]),
        "two files, swapped": write("two files, swapped", b=WEIGHTS[:96], a=WEIGHTS[96:]),
        "two files, cut elsewhere": write("two files, cut elsewhere", a=WEIGHTS[:104], b=WEIGHTS[104:]),
    }
    digests = {name: checkpoint_revision(folder) for name, folder in folders.items()}
    assert len(set(digests.values())) == len(folders), digests


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt", "pth", "gguf"])
def test_weights_of_every_format_count(write: Write, suffix: str) -> None:
    folder = write()
    (folder / "model.safetensors").rename(folder / f"model.{suffix}")
    before = checkpoint_revision(folder)
    (folder / f"model.{suffix}").write_bytes(WEIGHTS[::-1])
    assert checkpoint_revision(folder) != before


def test_weights_in_an_unused_format_do_not_count(write: Write) -> None:
    folder = write()
    before = checkpoint_revision(folder)
    for name in ("model.bin", "training_args.bin", "model.gguf"):
        (folder / name).write_bytes(WEIGHTS)
    (folder / "more.safetensors").mkdir()
    assert checkpoint_revision(folder) == before


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_the_quantisation_counts(write: Write, name: str) -> None:
    folder = write()
    before = checkpoint_revision(folder)
    (folder / name).write_text('{"bits": 4}')
    assert checkpoint_revision(folder) != before


@pytest.mark.parametrize(("content", "reason"), [("{", "cannot be read: Expecting"), ("[1]", r"holds \[1\]: expected")])
def test_a_broken_config_is_refused_in_one_line(write: Write, content: str, reason: str) -> None:
    folder = write()
    (folder / "config.json").write_text(content)
    for look in (checkpoint_revision, lambda folder: checkpoint_dtype(folder, "auto")):
        with pytest.raises(SettingsError, match=rf"^model: .*config\.json {reason}"):
            look(folder)


def test_an_adapters_config_counts(write: Write) -> None:
    folders = [write(f"r{r}", config={"r": r}, config_name="adapter_config.json") for r in (8, 16)]
    assert len({checkpoint_revision(folder) for folder in folders}) == 2


@pytest.mark.parametrize("config_name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize(
    "name", ["_name_or_path", "transformers_version", "torch_dtype", "dtype", "base_model_name_or_path"]
)
def test_config_fields_that_do_not_change_rows_do_not_count(write: Write, name: str, config_name: str) -> None:
    configs = [CONFIG | {"text_config": inner} for inner in ({}, {name: "a"}, {name: "b"})]
    configs += [config | {name: "c"} for config in configs]
    folders = [write(f"model-{i}", config=config, config_name=config_name) for i, config in enumerate(configs)]
    assert len({checkpoint_revision(folder) for folder in folders}) == 1


def test_options_that_change_rows_count(write: Write) -> None:
    folder = write()
    options: list[dict[str, Any]] = [
        {"quantization": "fp8"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"seed": 0},
        {"seed": False},
        {"hf_overrides": {"rope_theta": 1e6}},
        {"hf_overrides": {"rope_theta": 1e5}},
        {"names": ["a", "b"]},
        {"names": ["b", "a"]},
    ]
    digests = [checkpoint_revision(folder), *(checkpoint_revision(folder, also) for also in options)]
    assert len(set(digests)) == len(options) + 1
    assert checkpoint_revision(folder, {}) == checkpoint_revision(folder)
    pair = {"quantization": "fp8", "seed": 1}
    assert checkpoint_revision(folder, pair) == checkpoint_revision(folder, dict(reversed(pair.items())))


# The dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"dtype": "float8_e4m3fn", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "auto"}, "auto"),
        ({"dtype": "int8"}, "auto"),
        ({"dtype": ["float32"]}, "auto"),
        ({"text_config": None}, "auto"),
        ({"text_config": "bfloat16"}, "auto"),
        ({}, "auto"),
        (None, "auto"),
    ],
)
def test_the_dtype_auto_is_that_of_the_checkpoint(write: Write, config: dict[str, Any] | None, dtype: str) -> None:
    assert checkpoint_dtype(write(config=config), "auto") == dtype


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_another_dtype_stays(write: Write, wanted: str) -> None:
    assert checkpoint_dtype(write(config={"dtype": "float32"}), wanted) == wanted


def test_a_revision_of_a_folder_is_refused_by_the_hf_backend_too(write: Write) -> None:
    settings = HfSettings(str(write(model=WEIGHTS)), revision="main", device="cpu")
    with pytest.raises(SettingsError, match=r"^revision: .* needs a name on the hub, and .* is a folder$"):
        load_model(settings)
