"""The backends that the contract tests run on (subjects), with limits so low that the tests reach them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Protocol

import numpy as np
import torch
from examples import own_backend
from examples.own_backend import UnigramSettings
from safetensors.numpy import save_file

from lmpool.protocol.row import Row
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend
from tests.contract.model import V, reference_row, write_adapter, write_changes, write_weights
from tests.support.pool import lmpool_command

# Use limits so low that all cases occur: several steps per prompt, several batches, and a full KV cache.
MAX_BATCH = 8
MAX_BATCH_TOKENS = 64
KV_TOKENS = 1024
SYNTHETIC_MAX_TOKENS = 200

# Use fewer rounds with Triton's interpreter, in which kernels take a hundred times as long.
ROUNDS = 10 if os.environ.get("TRITON_INTERPRET") == "1" else 40
"""Number of rounds in which prompts grow: enough to need a new block of the KV cache, and to exceed its capacity."""

DEVICE = os.environ.get("LMPOOL_DEVICE", "cpu")
"""The device of the backends that have a setting for the device."""

LogitsSpy = Callable[[Backend], AbstractContextManager[list[torch.Tensor]]]
"""Function that returns a context manager, which collects all logits (n, V) that the engine's model computes."""


class Reference(Protocol):
    """Function that computes the correct row of a prompt."""

    def __call__(self, ids: Sequence[int], adapter: str = "", version: int = 0, /) -> Row: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """One backend that the contract tests run on.

    Attributes:
        name: name of the backend.
        make: (folder of the model, dtype, folders of adapters by name) -> the backend.
        options: (folder of the model, folders of adapters by name) -> `make`'s settings as options of `lmpool worker`.
        reference: (ids, adapter, version of the model, by default 0) -> the correct float32 row.
        changes_weights: whether the backend can replace its weights.
        weights: (path, version) -> writes all tensors of a version there; returns the path.
        changes: (path, version) -> writes a sparse file with the changes since the version before it.
        tolerance: max difference between an entry of a row and the reference.
        spy: a `LogitsSpy`, or None if no model runs in the process of the test.
        has_model: whether the rows come from a model.
        has_adapters: whether the backend serves adapters that are loaded at its start.
        loads_adapters: whether the backend can load other adapters later.
        refused: kind of adapter that the backend refuses -> beginning of the error text that follows the folder.
        narrow: whether the backend can compute in bfloat16.
        positions: whether the backend answers positions queries.
        has_hidden: whether the backend returns hidden states and its head.
        files: names of the test files to run on the subject; empty for all files.
        command: command that starts a worker, in place of `lmpool`.
        environment: environment variables of the worker.
        processes: number of processes that the model is spread over.
    """

    name: str
    make: Callable[[Path, str, dict[str, Path]], Backend]
    options: Callable[[Path, dict[str, Path]], list[str]]
    reference: Reference = reference_row
    changes_weights: bool = True
    weights: Callable[[Path, int], Path] = write_weights
    changes: Callable[[Path, int], Path] = write_changes
    tolerance: float = 3e-4 if DEVICE == "cpu" else 3e-3
    spy: LogitsSpy | None = None
    has_model: bool = True
    has_adapters: bool = False
    loads_adapters: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    narrow: bool = True
    positions: bool = False
    has_hidden: bool = False
    files: tuple[str, ...] = ()
    command: Callable[[], list[str]] = lmpool_command
    environment: dict[str, str] = field(default_factory=dict)
    processes: int = 1


def chosen() -> dict[str, Subject]:
    """The subjects that LMPOOL_CONTRACT names; by default the subjects without vLLM or SGLang."""
    names = os.environ.get("LMPOOL_CONTRACT", "synthetic,hf,hf-offload,unigram")
    return {name: _FINDERS[name]() for name in names.split(",")}


def _synthetic() -> Subject:
    def make(folder: Path, dtype: str, adapters: dict[str, Path]) -> Backend:
        encoding = "f32" if dtype == "float32" else "bf16"
        settings = SyntheticSettings(
            vocab_size=V, max_batch=MAX_BATCH, max_prompt_tokens=SYNTHETIC_MAX_TOKENS, encoding=encoding,
            adapters=[f"{name}={place}" for name, place in adapters.items()],
        )  # fmt: skip
        return SyntheticBackend(settings)

    def reference(ids: Sequence[int], adapter: str = "", version: int = 0) -> Row:
        revision = _synthetic_revision(adapter) if adapter else ""
        return synthetic_row(ids, vocab_size=V, seed=version, adapter_revision=revision)

    def weights(path: Path, version: int) -> Path:
        save_file({"seed": np.array(version)}, path)
        return path

    def changes(path: Path, version: int) -> Path:
        save_file({"seed.indices": np.array([0]), "seed.values": np.array([version])}, path)
        return path

    def options(folder: Path, adapters: dict[str, Path]) -> list[str]:
        named = [text for name, place in adapters.items() for text in ("--adapters", f"{name}={place}")]
        return ["--vocab-size", str(V), "--max-prompt-tokens", str(SYNTHETIC_MAX_TOKENS), *named]

    return Subject(
        "synthetic", make, options, reference, weights=weights, changes=changes, has_model=False, has_adapters=True,
        loads_adapters=True, positions=True,
    )  # fmt: skip


@cache
def _synthetic_revision(adapter: str) -> str:
    """The revision of an adapter of the contract tests; its files are the same in each run."""
    folder = Path(mkdtemp(prefix="lmp"))
    try:
        return SyntheticBackend(SyntheticSettings()).load_adapter(adapter, str(write_adapter(folder, adapter)))
    finally:
        rmtree(folder)


def _unigram() -> Subject:
    """The example `own_backend`, which shows users how to write a backend."""

    def make(folder: Path, dtype: str, adapters: dict[str, Path]) -> Backend:
        return UnigramSettings("unigram", V).open()

    def reference(ids: Sequence[int], adapter: str = "", version: int = 0) -> Row:
        counts = np.ones(V)
        for token in ids:
            counts[token] += 1
        row: Row = np.log(counts / counts.sum()).astype(np.float32)
        return row

    return Subject(
        "unigram", make, lambda folder, adapters: ["--vocab-size", str(V)], reference, changes_weights=False,
        has_model=False, narrow=False,
        environment={"PYTHONPATH": os.pathsep.join([str(_plugin().parent), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip


@cache
def _plugin() -> Path:
    """Write the files of an installed package with the example backend; returns the folder of its metadata."""
    folder = Path(mkdtemp(prefix="lmp")) / "unigram-1.0.dist-info"
    atexit.register(rmtree, folder.parent)
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: unigram\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[lmpool.backends]\nunigram = own_backend:UnigramSettings\n")
    (folder.parent / "own_backend.py").write_text(Path(own_backend.__file__).read_text())
    return folder


def _hf(is_offloaded: bool = False) -> Subject:
    """transformers with the whole model on one device, or with all layers but the embedding on the disk."""

    def settings(folder: Path, dtype: str) -> dict[str, Any]:
        return {
            "model": str(folder),
            **(_offloaded(dtype) if is_offloaded else {"device": DEVICE}),
            "dtype": dtype,
            "max_batch": MAX_BATCH,
            "max_batch_tokens": MAX_BATCH_TOKENS,
            "chunked_prefill_size": MAX_BATCH_TOKENS,
            # A token takes two layers, each with two heads of 32 keys and 32 values, times the bytes of the dtype.
            "kv_cache_bytes": KV_TOKENS * 2 * 2 * 2 * 32 * (4 if dtype == "float32" else 2),
        }

    def make(folder: Path, dtype: str, adapters: dict[str, Path]) -> Backend:
        named = [f"{name}={place}" for name, place in adapters.items()]
        return HfSettings(**settings(folder, dtype), adapters=named, verify=True).open()

    def options(folder: Path, adapters: dict[str, Path]) -> list[str]:
        named = [text for name, place in adapters.items() for text in ("--adapters", f"{name}={place}")]
        return [*as_options(settings(folder, "float32")), "--verify", *named]

    whole = Subject(
        "hf", make, options, spy=_hf_spy, has_adapters=True, loads_adapters=True, positions=True, has_hidden=True
    )
    if not is_offloaded:
        return whole
    # Only loading and the forward differ.
    files = ("test_rows.py", "test_scores.py", "test_reopening.py")
    return replace(whole, has_adapters=False, loads_adapters=False, files=files)


def _offloaded(dtype: str) -> dict[str, str]:
    """Settings whose memory suffices for the embedding, and on a GPU for one layer: other layers are on the disk."""
    kilobytes = 1000 if dtype == "float32" else 500
    gpu = "" if DEVICE == "cpu" else f"0={kilobytes // 2}KB,"
    return {"device_map": "sequential", "max_memory": f"{gpu}cpu={kilobytes}KB"}


@contextmanager
def _hf_spy(backend: Backend) -> Iterator[list[torch.Tensor]]:
    from lmpool.workers.backends.hf.backend import HfBackend

    assert isinstance(backend, HfBackend)
    model: Any = backend._forward.model
    with recorded(model.get_output_embeddings()) as seen:
        yield seen


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect copies of the tensors that a module returns in this context, each as (n, V)."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(
        lambda _, __, output: seen.append(output.detach().cpu().clone().reshape(-1, V))
    )
    try:
        yield seen
    finally:
        handle.remove()


def as_options(settings: dict[str, Any]) -> list[str]:
    """Write settings as options of `lmpool worker`, without the model, which is an argument of the command."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items() if name != "model"}
    return [text for pair in named.items() for text in pair]


def _engine(name: str, *shims: str, variant: str = "SUBJECT") -> Callable[[], Subject]:
    """A function that imports an engine's subject, whose own file needs the environment of the engine.

    The function first calls the shims, which enable parts of the engine that are disabled on a CPU. `variant` is the
    name of the subject in the file.
    """

    def find() -> Subject:
        for shim in shims:
            getattr(import_module(f"tests.engines.{name}_shims"), shim)()
        subject: Subject = getattr(import_module(f"tests.contract.{name}_subject"), variant)
        return subject

    return find


_FINDERS: dict[str, Callable[[], Subject]] = {
    "synthetic": _synthetic,
    "hf": _hf,
    "hf-offload": lambda: _hf(is_offloaded=True),
    "unigram": _unigram,
    "vllm": _engine("vllm"),
    "vllm-v2": _engine("vllm", "use_v2_runner"),
    "vllm-v2-async": _engine("vllm", "use_v2_runner", "use_async_scheduling"),
    "vllm-async": _engine("vllm", "use_async_scheduling"),
    "vllm-tensor": _engine("vllm", variant="TENSOR_PARALLEL"),
    "vllm-tensor-async": _engine("vllm", "use_async_scheduling", variant="TENSOR_PARALLEL"),
    "vllm-v2-tensor": _engine("vllm", "use_v2_runner", variant="TENSOR_PARALLEL"),
    "vllm-v2-tensor-async": _engine("vllm", "use_v2_runner", "use_async_scheduling", variant="TENSOR_PARALLEL"),
    "vllm-v2-pipeline-async": _engine("vllm", "use_v2_runner", "use_async_scheduling", variant="PIPELINE_PARALLEL"),
    "vllm-pipeline": _engine("vllm", variant="PIPELINE_PARALLEL"),
    "sglang": _engine("sglang"),
    "sglang-tp2": _engine("sglang", variant="TENSOR_PARALLEL"),
}
