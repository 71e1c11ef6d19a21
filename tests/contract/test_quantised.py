"""Quantised checkpoints: each format is served with the rows of the dequantised model, or is refused in one sentence.

The table in docs/backends.md has the result of each format and backend. With LMPOOL_WRITE_TABLE=1 the tests write the
column of their backend instead of comparing it.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lmpool.errors import SettingsError
from lmpool.protocol.row import Row
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.settings import HfSettings, ModelSettings, SglangSettings, VllmSettings
from lmpool.workers.execution.contract import Backend
from tests.contract.driver import Opened, prompt
from tests.contract.model import ADAPTERS, merge, write_adapter
from tests.contract.subjects import DEVICE, KV_TOKENS, MAX_BATCH_TOKENS, Subject, chosen
from tests.support.models.hf_fixtures import MODELS
from tests.support.models.quantised import FORMATS, plain_folder

ENGINE = os.environ.get("LMPOOL_CONTRACT")
if ENGINE not in ("hf", "vllm", "sglang"):
    pytest.skip("LMPOOL_CONTRACT names no single backend with a model", allow_module_level=True)

FOLDER = MODELS / "quantised"
DOCS = Path(__file__).parents[2] / "docs" / "backends.md"
BEGIN, END = "<!-- quantised checkpoints: tests/contract/test_quantised.py -->", "<!-- end of quantised checkpoints -->"
LABELS = {
    "w8a8": "compressed-tensors W8A8 INT8",
    "fp8": "compressed-tensors FP8",
    "w4a16": "compressed-tensors W4A16",
    "gptq": "GPTQ, 4 bits",
    "awq": "AWQ, 4 bits",
    "bitsandbytes": "bitsandbytes, 8 bits",
    "torchao": "torchao, int8",
    "gguf": "GGUF, Q8_0",
}
# Formats that vLLM computes on an x86 CPU only with AVX-512 VNNI, and the error on other x86 CPUs.
NEED_VNNI = ("w8a8", "w4a16", "gptq", "awq") if ENGINE == "vllm" else ()
HAS_VNNI = platform.machine() != "x86_64" or torch.cpu._is_vnni_supported()
NO_VNNI = r"model: vLLM .* computes integer weights \(.*\) on a CPU only with AVX-512 VNNI, which .*; use --backend hf"
# Max difference of a prompt's row alone and with other prompts: some kernels compute in float16 or bfloat16.
ALONE = {"float32": 5e-3, "bfloat16": 0.15}
# Max difference of a row from the float64 log-softmax of its logits, if the row holds the logits without loss.
EXACT = 2e-5


@pytest.fixture(scope="module", autouse=True)
def _no_compiler(written: Path) -> None:
    """Let gptqmodel run its operators as they are: compiling them would take a minute."""
    torch._dynamo.config.disable = True


@pytest.fixture(scope="module")
def written() -> Path:
    """The folder of the quantised checkpoints, which `make` writes once with the packages that quantise models."""
    assert (FOLDER / "written").exists(), f"{FOLDER} is not written: run make test-quantised"
    return FOLDER


@pytest.fixture(scope="module")
def engine() -> Subject:
    """The backend of this run, in the form of the other contract tests."""
    (subject,) = chosen().values()
    return subject


@functools.cache
def reference(folder: Path, merged: str = "") -> Callable[[Sequence[int], str], Row]:
    """The rows of the model in a folder in transformers' float32, one prompt at a time; with the adapter `merged`."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    if merged:
        merge(model, merged)

    @torch.inference_mode()
    def row(ids: Sequence[int], adapter: str) -> Row:
        logits: Row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1).numpy()
        return logits

    return row


def dtype_of(name: str) -> str:
    """The dtype in which a format is measured: vLLM's kernels need bfloat16, except for torchao's float32 numbers."""
    return "bfloat16" if ENGINE == "vllm" and name != "torchao" else "float32"


def worst(opened: Opened, row: Callable[[Sequence[int], str], Row], draw: random.Random, agree: float) -> float:
    """The largest difference of rows from the reference: of ragged prompts together and alone, and of growing ones."""
    lengths = (1, 2, 17, 33, MAX_BATCH_TOKENS + 1, 3 * MAX_BATCH_TOKENS - 1)  # The last two take several steps.
    prompts = [prompt(draw, length) for length in lengths]
    rows = opened.ask(prompts)
    for ids, together in zip(prompts, rows, strict=True):
        assert np.abs(opened.ask([ids])[0] - together).max() <= agree
    contexts = [prompt(draw, length) for length in (5, 16, 31)]
    for _ in range(4):
        prompts, rows = [*prompts, *contexts], [*rows, *opened.ask(contexts)]
        contexts = [[*ids, draw.randrange(opened.backend.info.vocab_size)] for ids in contexts]
    return max(float(np.abs(found - row(ids, "")).max()) for ids, found in zip(prompts, rows, strict=True))


def check_exact(opened: Opened, draw: random.Random) -> None:
    """Check that rows in 16 bits hold the engine's logits without loss."""
    assert opened.subject.spy is not None
    with opened.subject.spy(opened.backend) as seen:
        rows = opened.ask([prompt(draw, length) for length in (3, 20)])
    logits = torch.cat(seen)[:, : opened.backend.info.vocab_size].double()
    expected = torch.log_softmax(logits, -1).numpy()
    assert all(np.abs(expected - row).max(-1).min() <= EXACT for row in rows)


def measured(engine: Subject, name: str) -> str:
    """The cell of a format: the worst difference from the dequantised model, or the error."""
    folder, dtype, draw = FOLDER / name, dtype_of(name), random.Random(name)
    model = folder / "model.gguf" if name == "gguf" else folder
    try:
        with Opened(engine, model, dtype, {}) as opened:
            difference = worst(opened, reference(plain_folder(folder)), draw, ALONE[dtype])
            if dtype == "bfloat16":
                check_exact(opened, draw)
    except SettingsError as error:
        return str(error).replace(str(model), "MODEL")
    return f"yes, {difference:.2g} in {dtype}"


def cells() -> dict[str, list[str]]:
    """Name of each row in the table -> the row's cells."""
    table = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines() if line.startswith("|")
    ]
    return {line[0]: line[1:] for line in lines}


def write(name: str, cell: str) -> None:
    """Write the cell of a format and of this run's backend into the table."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    rows = {"format": ["hf", "vllm", "sglang"], "---": ["---"] * 3}
    rows |= {label: cells().get(label, ["", "", ""]) for label in LABELS.values()}
    rows[LABELS[name]][rows["format"].index(ENGINE or "")] = cell
    lines = [f"| {' | '.join([label, *row])} |" for label, row in rows.items()]
    DOCS.write_text("\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{rest.partition(END)[2]}"]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_is_served_or_refused_as_the_documentation_says(engine: Subject, name: str) -> None:
    cell = measured(engine, name)
    assert "\n" not in cell
    if os.environ.get("LMPOOL_WRITE_TABLE"):
        write(name, cell)
    stated = cells()[LABELS[name]][cells()["format"].index(ENGINE or "")]
    if name in NEED_VNNI and not HAS_VNNI:
        assert re.fullmatch(NO_VNNI, cell)
        return
    pattern = r"yes, (\S+) in (\w+)"
    if (found := re.fullmatch(pattern, cell)) and (said := re.fullmatch(pattern, stated)):
        assert found[2] == said[2]
        # Other processors have other kernels, which round differently.
        assert float(found[1]) <= 2 * float(said[1])
    else:
        assert cell == stated


@pytest.mark.skipif(ENGINE != "hf", reason="the test of the documentation has run in bfloat16")
@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_16_bits_hold_the_logits_of_quantised_models_exactly(engine: Subject, name: str) -> None:
    model = FOLDER / name / "model.gguf" if name == "gguf" else FOLDER / name
    with Opened(engine, model, "bfloat16", {}) as opened:
        assert opened.backend.info.encoding == "bf16"
        check_exact(opened, random.Random(name))


# Quantisation on load


def opened_with(engine: Subject, folder: Path, dtype: str, quantization: str | None, **options: Any) -> Opened:
    """This run's backend, which quantises a plain model on load, with more options."""
    common: dict[str, Any] = {"model": str(folder), "dtype": dtype, "quantization": quantization, "max_batch": 8}
    more: dict[str, Any] = {"max_batch_tokens": MAX_BATCH_TOKENS, "kv_cache_bytes": KV_TOKENS * 2 * 2 * 2 * 32 * 4}

    def make(*_: object) -> Backend:
        kinds: dict[str, Callable[..., ModelSettings]] = {
            "hf": functools.partial(HfSettings, device=DEVICE),
            "vllm": VllmSettings,
            "sglang": functools.partial(SglangSettings, device=DEVICE),
        }
        return kinds[engine.name](**common, **more, **options).open()

    return Opened(replace(engine, make=make), folder, dtype, {})


ON_LOAD = {
    # The scales are those of the checkpoint of torchao or compressed-tensors, so the rows are too.
    "hf": [("int8_weight_only", "torchao", "float32", 1e-4), ("float8_weight_only", "fp8", "float32", 0.2)],
    "vllm": [("fp8_per_channel", "fp8", "bfloat16", 3.0)],
    "sglang": [],
}


@pytest.mark.parametrize(("quantization", "same", "dtype", "most"), ON_LOAD[ENGINE])
def test_weights_are_quantised_on_load(engine: Subject, quantization: str, same: str, dtype: str, most: float) -> None:
    with opened_with(engine, FOLDER / "plain", dtype, quantization) as opened:
        revision = opened.backend.info.revision
        row = reference(FOLDER / f"{same}-plain")
        assert worst(opened, row, random.Random(1), ALONE[dtype]) <= most
    plain = checkpoint_revision(FOLDER / "plain")
    if engine.name == "hf":
        with opened_with(engine, FOLDER / "plain", dtype, None) as opened:
            plain = opened.backend.info.revision
    assert revision != plain, "workers share the cached rows of one revision"


REFUSED: dict[str, list[tuple[str | None, str, str]]] = {
    "hf": [
        ("int8", "plain", "quantization: 'int8' is not one of int8_weight_only, int8_dynamic_activation_int8_weight, "),
        ("int8_weight_only", "gptq", r"quantization: .*gptq is quantised already \(gptq\); leave it out"),
    ],
    "vllm": [
        ("int8_per_channel_weight_only", "plain", "quantization: int8_per_channel_weight_only quantises only experts"),
        ("int7", "plain", "model: vLLM .* cannot serve .*: Unknown quantization method: int7.$"),
        ("fp8", "gptq", r"model: vLLM .* cannot serve .* \(gptq\) does not match .* \(fp8\)"),
        (None, "torchao", r"model: vLLM .* cannot load .* in bfloat16 \(try --dtype auto for weights of torchao\)"),
    ],
    "sglang": [
        ("fp8", "plain", r"model: SGLang .* computes quantised weights \(fp8\) on a CPU only with its AMX kernels"),
        ("int7", "plain", "model: SGLang .* cannot serve .*: Unknown quantization method: int7.$"),
    ],
}


@pytest.mark.parametrize(("quantization", "name", "message"), REFUSED[ENGINE])
def test_a_quantisation_that_cannot_be_is_refused_in_one_line(
    engine: Subject, quantization: str | None, name: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{message}") as caught:
        opened_with(engine, FOLDER / name, "bfloat16", quantization).__enter__()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(ENGINE != "vllm", reason="a limit of vLLM's kernels")
def test_a_dtype_that_a_kernel_cannot_compute_is_named(engine: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    with pytest.raises(SettingsError, match=r"^model: vLLM .* in float32 \(try --dtype bfloat16 for quantised weights"):
        Opened(engine, FOLDER / "w4a16", "float32", {}).__enter__()


@pytest.mark.skipif(ENGINE != "vllm", reason="a limit of vLLM's kernels")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a limit of x86 CPUs")
@pytest.mark.parametrize("name", NEED_VNNI)
def test_integer_weights_are_refused_on_a_cpu_that_computes_them_wrongly(
    engine: Subject, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(SettingsError, match=f"^{NO_VNNI}$"):
        Opened(engine, FOLDER / name, "bfloat16", {}).__enter__()


@pytest.mark.skipif(ENGINE != "vllm", reason="vLLM's kernel for int8 drops weights on CPUs without AMX")
@pytest.mark.skipif(not HAS_VNNI, reason="vLLM computes integer weights on an x86 CPU only with AVX-512 VNNI")
def test_an_adapter_of_int8_weights_has_the_rows_of_the_merged_model(engine: Subject, tmp_path: Path) -> None:
    draw, adapter = random.Random(1), ADAPTERS[0]
    prompts = [prompt(draw, length) for length in (3, 33, MAX_BATCH_TOKENS)]
    with opened_with(engine, FOLDER / "w8a8", "bfloat16", None, max_adapters=1) as opened:
        opened.backend.load_adapter(adapter, str(write_adapter(tmp_path / adapter, adapter)))
        rows = opened.ask(prompts, adapter)
    merged, plain = (reference(FOLDER / "w8a8-plain", name) for name in (adapter, ""))
    for ids, row in zip(prompts, rows, strict=True):
        assert np.abs(row - merged(ids, "")).max() < 1 < np.abs(row - plain(ids, "")).max()
