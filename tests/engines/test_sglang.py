"""The sglang backend: refused prompts fail, wrong results are errors, and SGLang does not change the process."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PhiConfig, PhiForCausalLM

from lmpool.errors import SettingsError, WorkerError
from lmpool.workers.backends import settings as settings_module
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.engines import row_deciding
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.backends.sglang import backend as options
from lmpool.workers.execution.contract import BackendJob
from tests.contract.driver import Opened, prompt
from tests.contract.model import MAX_TOKENS, V, write_adapter, write_model
from tests.contract.subjects import KV_TOKENS, MAX_BATCH, MAX_BATCH_TOKENS, Subject
from tests.engines.newest import WANTED
from tests.support.pool import until

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed in this environment", allow_module_level=True)

from tests.contract.sglang_subject import SUBJECT, settings_of

ADAPTERS: dict[str, Path] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama model of the contract tests."""
    return write_model(tmp_path_factory.mktemp("sglang") / "llama")


@pytest.fixture
def draw() -> random.Random:
    """Random numbers for prompts."""
    return random.Random(5)


@contextmanager
def opened(folder: Path, **changes: Any) -> Iterator[Opened]:
    """The sglang backend of the contract tests, with changed settings."""

    def make(model: Path, dtype: str, adapters: dict[str, Path]) -> Any:
        return SglangSettings(**{**settings_of(model, dtype, adapters), **changes}).open()

    subject: Subject = replace(SUBJECT, make=make)
    with Opened(subject, folder, "float32", ADAPTERS) as subject_opened:
        yield subject_opened


def scheduler_of(backend: Any) -> Any:
    """SGLang's scheduler of a backend."""
    return backend._engine.scheduler


def job(ids: list[int], number: int = 1) -> BackendJob:
    """A job that was not checked against the limits in the model's info."""
    return BackendJob(number.to_bytes(16, "little"), np.asarray(ids, "<u4").tobytes())


def spoil(backend: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """Call `change` with each batch and its result before SGLang processes the result."""
    scheduler = scheduler_of(backend)
    run = scheduler.run_batch

    def run_and_change(batch: Any, *more: Any, **named: Any) -> Any:
        result = run(batch, *more, **named)
        change(batch, result)
        return result

    monkeypatch.setattr(scheduler, "run_batch", run_and_change)


# Prompts that SGLang refuses


def test_a_prompt_that_sglang_refuses_is_a_failure_of_that_prompt_alone(folder: Path, draw: random.Random) -> None:
    with opened(folder) as driver:
        most = driver.backend.info.max_prompt_tokens
        for length in (most + 1, MAX_TOKENS, 3 * KV_TOKENS):
            long, fits = job(prompt(draw, length), length), [prompt(draw, 9), prompt(draw, most)]
            driver.backend.submit([long])
            driver.check(fits, driver.ask(fits))
            assert "SGLang refuses the prompt" in driver.failures[long.digest]
            assert str(length) in driver.failures[long.digest]
            assert long.digest not in driver.rows


def test_a_prompt_that_sglang_drops_silently_is_a_failure(folder: Path, draw: random.Random) -> None:
    with opened(folder) as driver:
        scheduler_of(driver.backend).max_queued_requests = 0
        asked = job(prompt(draw, 7))
        driver.backend.submit([asked])
        while not driver.failures:
            driver.step()
        assert driver.failures == {asked.digest: "SGLang has dropped the prompt without an answer"}
        scheduler_of(driver.backend).max_queued_requests = None
        prompts = [prompt(draw, 7)]
        driver.check(prompts, driver.ask(prompts))


def test_dropping_a_prompt_drops_no_other(folder: Path, draw: random.Random) -> None:
    with opened(folder) as driver:
        prompts = [prompt(draw, 5) for _ in range(200)]
        digests = driver.submit(prompts)
        # The abort must end no other prompt, although SGLang aborts all requests whose names start with the given name.
        driver.backend.abort(digests[:8])
        driver.check(prompts[8:], driver.finish(digests[8:]))
        assert len(driver.rows) == len(prompts) - 8
        assert not driver.failures
        assert driver.backend.step().blocks == []  # The backend holds no prompt, so the step does not wait.


# Results that must not become rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits[:, :-1], rf"logits of shape \(2, {V - 1}\) for 2 prompts and V = {V}"),
        (lambda logits: torch.cat([logits, logits], -1), rf"logits of shape \(2, {2 * V}\)"),
        (lambda logits: logits[:-1], rf"logits of shape \(1, {V}\) for 2 prompts"),
        (lambda logits: None, "logits of shape None for 2 prompts"),
    ],
    ids=["too narrow", "too wide", "too few", "none"],
)
def test_logits_of_another_shape_are_an_error(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    def reshape(batch: Any, result: Any) -> None:
        result.logits_output.next_token_logits = change(result.logits_output.next_token_logits)

    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, reshape)
        driver.submit([prompt(draw, 5), prompt(draw, 6)])
        with pytest.raises(WorkerError, match=message):
            driver.step()
        with pytest.raises(WorkerError, match=message):
            driver.step()


def test_the_row_of_a_prompt_that_sglang_has_shortened_is_an_error(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as driver:
        module: Any = import_module("sglang.srt.managers.scheduler")
        shorten = module.validate_input_length
        # Let SGLang truncate long prompts, as it would with the option `allow_auto_truncate`.
        monkeypatch.setattr(module, "validate_input_length", lambda request, most, _: shorten(request, most, True))
        length = driver.backend.info.max_prompt_tokens + 3
        driver.backend.submit([job(prompt(draw, length))])
        with pytest.raises(WorkerError, match=rf"SGLang has computed \d+ tokens of a prompt of {length}"):
            driver.finish([bytes(16)])


def test_a_row_that_follows_a_sampled_token_is_an_error(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = import_module("lmpool.workers.backends.sglang.engine")
    with opened(folder) as driver:
        make = engine.make_request

        def ask_for_tokens(*arguments: Any) -> Any:
            request = make(*arguments)
            request.sampling_params.max_new_tokens = 2
            return request

        monkeypatch.setattr(engine, "make_request", ask_for_tokens)
        driver.submit([prompt(draw, 5)])
        with pytest.raises(WorkerError, match="in a forward that is no prefill"):
            driver.finish([bytes(16)])


def test_a_crash_of_the_engine_ends_the_step_that_waits_for_it(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: Any, result: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")

    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, fail)
        driver.submit([prompt(draw, 5)])
        for _ in range(2):
            with pytest.raises(WorkerError, match="SGLang's engine died: CUDA error: an illegal memory access was .*"):
                driver.step()
    prompts = [prompt(draw, 5)]
    with opened(folder) as driver:
        driver.check(prompts, driver.ask(prompts))


# Computed tokens


def test_an_extension_computes_one_token(folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, lambda batch, result: computed.append(batch.extend_num_tokens))
        ids = prompt(draw, 50)
        driver.ask([ids])
        before = driver.backend.stats().reused
        for _ in range(3):
            ids = [*ids, draw.randrange(V)]
            driver.check([ids], driver.ask([ids]))
        assert computed == [50, 1, 1, 1]
        assert driver.backend.stats().reused - before == 50 + 51 + 52


def test_contexts_that_grow_together_compute_only_the_new_tokens(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, lambda batch, result: computed.append(batch.extend_num_tokens))
        contexts = [prompt(draw, length) for length in (3, 17, 33, 40, 50)]
        driver.ask(contexts)
        for new in (1, 3, 2, 8, 40, 1):
            longer, before = [[*ids, *prompt(draw, new)] for ids in contexts], driver.backend.stats()
            computed.clear()
            driver.check(longer, driver.ask(longer))
            after = driver.backend.stats()
            assert sum(computed) == new * len(contexts)
            assert after.tokens - before.tokens == sum(map(len, longer))
            assert after.reused - before.reused == sum(map(len, contexts))
            contexts = longer


def test_every_token_is_either_reused_or_computed(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters add up for prompts that branch, grow, repeat, take several forwards, or follow an eviction."""
    computed = []
    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, lambda batch, result: computed.append(batch.extend_num_tokens))
        before = driver.backend.stats()
        stem = prompt(draw, 60)
        branches = [[*stem, *prompt(draw, new)] for new in (1, 2, 5, 30)]
        long = [prompt(draw, 3 * MAX_BATCH_TOKENS + 5 + at) for at in range(2 * KV_TOKENS // (3 * MAX_BATCH_TOKENS))]
        longer = [[*ids, *prompt(draw, 3)] for ids in branches]
        for prompts in ([stem], branches, [stem[:20]], branches, long, longer, branches, long[-1:]):
            driver.check(prompts, driver.ask(prompts))
        after = driver.backend.stats()
        assert after.tokens - before.tokens - sum(computed) == after.reused - before.reused
        assert after.reused > before.reused


def test_a_prompt_that_takes_several_forwards_has_one_row(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, lambda _, result: sizes.append(len(result.logits_output.next_token_logits)))
        ids = prompt(draw, 3 * MAX_BATCH_TOKENS + 5)
        before = driver.backend.stats()
        driver.check([ids], driver.ask([ids]))
        after = driver.backend.stats()
        assert len(sizes) == 4  # A forward of a part of a prompt returns logits, which are no row.
        assert (after.rows - before.rows, after.steps - before.steps) == (1, 4)


def test_a_row_does_not_change_when_the_engine_overwrites_its_logits(
    folder: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.empty(MAX_BATCH, V)

    def reuse(batch: Any, result: Any) -> None:
        logits = result.logits_output.next_token_logits
        buffer.fill_(torch.nan)
        buffer[: len(logits)] = logits
        result.logits_output.next_token_logits = buffer[: len(logits)]

    with opened(folder) as driver:
        spoil(driver.backend, monkeypatch, reuse)
        # Use prompts so short that a forward completes all prompts of its batch.
        prompts = [prompt(draw, 4) for _ in range(5 * MAX_BATCH)]
        digests = driver.submit(prompts)
        results = driver.backend._engine._results  # type: ignore[attr-defined]
        until(lambda: results.qsize() >= 5, "the engine has computed several batches")
        driver.check(prompts, driver.finish(digests))


# Settings


def test_options_of_the_user_replace_options_of_the_backend(folder: Path, draw: random.Random) -> None:
    given = ["max_running_requests=3 chunked_prefill_size=32", "context_length=100 device=cpu"]
    with opened(folder, engine_args=given, device="cuda:7") as driver:
        scheduler = scheduler_of(driver.backend)
        assert (driver.backend.batch, driver.backend.capacity()) == (3, 6)
        assert scheduler.chunked_prefill_size == 32
        assert driver.backend.info.max_prompt_tokens == 100 - options.RESERVED_TOKENS
        prompts = [prompt(draw, 80) for _ in range(5)]
        driver.check(prompts, driver.ask(prompts))


def test_the_longest_prompt_may_be_set(folder: Path, draw: random.Random) -> None:
    with opened(folder, max_prompt_tokens=100) as driver:
        assert driver.backend.info.max_prompt_tokens == 100
        too_long = job(prompt(draw, 101))
        driver.backend.submit([too_long])
        prompts = [prompt(draw, 100)]
        driver.check(prompts, driver.ask(prompts))
        assert too_long.digest in driver.failures


def test_kv_cache_bytes_limit_the_cached_tokens(folder: Path) -> None:
    with opened(folder) as driver:
        assert scheduler_of(driver.backend).max_total_num_tokens == KV_TOKENS


def known() -> dict[str, bool]:
    """SGLang's options: name -> whether the option takes a text."""
    names: dict[str, bool] = import_module("lmpool.workers.backends.sglang.engine").known_options()
    return names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model_path=x", "engine_args: model_path cannot be set here: it is the MODEL of the command"),
        ("skip_tokenizer_init=false", "engine_args: skip_tokenizer_init cannot be set here: prompts are token ids"),
        ("tp_size=2", "engine_args: tp_size cannot be set here: use --tensor-parallel-size"),
        ("ep_size=2", "engine_args: ep_size cannot be set here: use --expert-parallel-size"),
        ("--pp-size=2", "engine_args: pp_size cannot be set here: one rank must have the whole rows of all prompts"),
        ("dp_size=4", "engine_args: dp_size cannot be set here: start more workers for more copies of a model"),
        ("nnodes=2", "engine_args: nnodes cannot be set here: all ranks of a model run on the worker's machine"),
        ("enable_dp_attention=true", "engine_args: enable_dp_attention cannot be set here: one rank must have"),
        ("enable_tp_lm_head_all_to_all=true", "cannot be set here: one rank must have the whole rows"),
        ("speculative_algorithm=EAGLE", "engine_args: speculative_algorithm cannot be set here: each request computes"),
        ("disable_overlap_schedule=false", "engine_args: disable_overlap_schedule cannot be set here"),
        ("allow_auto_truncate=true", "engine_args: allow_auto_truncate cannot be set here"),
        ("lora_paths=a", "engine_args: lora_paths cannot be set here: name adapters with --adapters name=folder"),
        ("mem_fraction_statik=0.5", "has no option 'mem_fraction_statik'; did you mean 'mem_fraction_static'?"),
        ("tensor_parallel_size=2", "engine_args: SGLang 0.5.x has no option 'tensor_parallel_size'"),
        ("quantization=fp8", "engine_args: quantization cannot be set here: --quantization sets it"),
    ],
)
def test_options_that_cannot_be_set_are_refused(given: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        options.user_options(SglangSettings("m", quantization="int8", engine_args=[given]), known(), "0.5.x")
    assert message in str(caught.value)


def test_other_options_are_passed_on() -> None:
    given = ["page-size=16", "schedule_policy=lpm", "json_model_override_args={a={b=0.5}}"]
    assert options.user_options(SglangSettings("m", engine_args=given), known(), "") == {
        "page_size": 16,
        "schedule_policy": "lpm",
        "json_model_override_args": '{"a": {"b": 0.5}}',
    }


def test_options_have_the_names_of_sglangs_command_line() -> None:
    names: dict[str, str] = import_module("lmpool.workers.backends.sglang.engine").option_names()
    given = ["--no-enable-tf32-matmul --enable-hicache"]
    assert options.user_options(SglangSettings("m", engine_args=given), known(), "", names) == {
        "enable_tf32_matmul": False,
        "enable_hierarchical_cache": True,
    }


def test_every_refused_or_harmless_option_exists_in_sglang() -> None:
    # The option `attn_dp_size` may be missing in the oldest supported release of SGLang.
    assert {*options._REFUSED, *options._HARMLESS} - known().keys() <= {"attn_dp_size"}


def test_options_that_change_rows_change_the_revision(folder: Path) -> None:
    given = {"kv_cache_dtype": "fp8_e4m3", "load_format": "dummy", "page_size": 16, "schedule_policy": "lpm"}
    assert row_deciding(given, options._HARMLESS) == {"kv_cache_dtype": "fp8_e4m3", "load_format": "dummy"}
    revisions = []
    for engine_args in (["schedule_policy=lpm"], ["json_model_override_args='{\"rms_norm_eps\": 0.1}'"]):
        with opened(folder, engine_args=engine_args) as driver:
            revisions.append(driver.backend.info.revision)
    assert revisions[0] == checkpoint_revision(folder) != revisions[1]


def test_memory_for_keys_and_values_is_counted_in_tokens() -> None:
    def tokens(memory: int | None, device: str = "cuda", **more: Any) -> int | None:
        given = {"device": device, "dtype": "bfloat16", **more}
        return options.kv_tokens(SglangSettings("m", kv_cache_bytes=memory), given, 100)

    assert tokens(20_000) == 100
    assert tokens(20_000, dtype="float32") == 50
    assert tokens(20_000, kv_cache_dtype="fp8_e5m2") == 200
    assert tokens(None) is None
    assert tokens(None, device="cpu") == (1 << 30) // 200
    no_attention: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    assert options.kv_tokens(SglangSettings("m"), no_attention, 0) is None
    with pytest.raises(SettingsError, match="kv_cache_bytes: this model keeps no keys and values"):
        options.kv_tokens(SglangSettings("m", kv_cache_bytes=10_000), no_attention, 0)
    with pytest.raises(SettingsError, match="kv_cache_bytes: 1400 is too little: the keys and values of a token"):
        tokens(1400)


# Errors when the engine starts


@pytest.mark.skipif(WANTED, reason="newer versions are accepted in this run")
@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.4.9.post1", "1.0"])
def test_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(settings_module, "version", lambda name: version)
    with pytest.raises(SettingsError, match=rf"^backend: sglang {version} is installed; .* >=0.5.21,<0.5.24") as seen:
        SglangSettings("m")
    assert "\n" not in str(seen.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"^backend: needs sglang; install with: pip install \"lmpool\[sglang"):
        SglangSettings("m")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": ""}, "device: '' is not a name"),
        ({"adapters": ["warm"]}, "adapters: 'warm' is not name=folder"),
        ({"adapters": ["a=b", "a=c"]}, "adapters: 'a' is given twice"),
        ({"adapters": ["a@b=c"]}, "adapters: 'a@b' must be 1 to 100 characters"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 must be a whole number from 1 to 1024"),
        (
            {"tensor_parallel_size": 3, "expert_parallel_size": 2},
            "expert_parallel_size: 2 does not divide tensor_parallel_size, 3",
        ),
    ],
)
def test_malformed_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        SglangSettings("m", **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/nowhere/at/all"}, "model: /nowhere/at/all cannot be loaded: there is no such folder"),
        ({"model": "EMPTY"}, "model: EMPTY cannot be loaded"),
        ({"model": "STRANGE"}, "model: SGLang .* cannot serve STRANGE: .*Strange"),
        ({"model": "WEIGHTLESS"}, "model: SGLang .* cannot serve WEIGHTLESS: "),
        ({"device": "cuda:7"}, "device: 'cuda:7' cannot be used"),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes: 10 is too little"),
        ({"kv_cache_bytes": 50 * 1024, "max_prompt_tokens": 44}, "max_prompt_tokens: 44 is more than the 43 tokens"),
        ({"max_prompt_tokens": 257}, "max_prompt_tokens: 257 is more than the 256 positions of the model"),
        ({"max_prompt_tokens": 250}, "max_prompt_tokens: 250 is more than the 249 tokens SGLang has memory for"),
        ({"engine_args": ["attention_backend=guesswork"]}, "model: SGLang .* cannot serve .*guesswork"),
        ({"adapters": ["a=EMPTY"]}, "adapters: EMPTY holds no adapter_config.json"),
        ({"adapters": ["a=STRAY"]}, "adapters: STRAY does not fit .*, which has no place for .*layers.7"),
    ],
)
def test_an_error_at_the_start_is_reported_in_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if torch.cuda.is_available() and "device" in changes:
        pytest.skip("this machine may have such a device")
    places = {name: str(tmp_path / name.lower()) for name in ("EMPTY", "STRANGE", "WEIGHTLESS", "STRAY")}
    for place in places.values():
        Path(place).mkdir()
    config = json.loads((folder / "config.json").read_text())
    (Path(places["WEIGHTLESS"]) / "config.json").write_text(json.dumps(config))
    (Path(places["STRANGE"]) / "config.json").write_text(json.dumps({**config, "architectures": ["Strange"]}))
    write_adapter(Path(places["STRAY"]), "warm")
    stray = {"model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(1)}
    save_file(stray, Path(places["STRAY"]) / "adapter_model.safetensors")
    for name, place in places.items():
        message = message.replace(name, place)
        if "model" in changes:
            changes = {"model": changes["model"].replace(name, place)}
        if "adapters" in changes:
            changes = {"adapters": [text.replace(name, place) for text in changes["adapters"]]}
    with pytest.raises(SettingsError, match=f"^{message}") as caught, opened(folder, **changes):
        pass
    assert "\n" not in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name == "lmpool-sglang"]


def test_a_port_of_another_program_is_reported_in_one_line(folder: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        given = [f"nccl_port={taken.getsockname()[1]}"]
        with pytest.raises(SettingsError, match="program has taken the port of .*: start the worker again$") as caught:
            opened(folder, engine_args=given).__enter__()
    assert "\n" not in str(caught.value)


def test_a_model_whose_bias_sglang_leaves_out_is_refused(tmp_path: Path) -> None:
    config = PhiConfig(vocab_size=V, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = PhiForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is partly untyped
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    message = "^model: .* cannot be served by sglang: SGLang leaves out the bias of the model's head; use --backend hf"
    with pytest.raises(SettingsError, match=message), opened(tmp_path):
        pass


def test_a_failed_start_does_not_affect_the_next_one(folder: Path, tmp_path: Path, draw: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError), opened(tmp_path):
        pass
    prompts = [prompt(draw, 8)]
    with opened(folder) as driver:
        driver.check(prompts, driver.ask(prompts))


# Effects of SGLang on the process

_PROGRAM = """
import ctypes, faulthandler, json, logging, os, signal, sys, tempfile, threading, warnings
from pathlib import Path

def state():
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
    return {
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "signal when its parent ends": death.value,
        "dumps on faults": faulthandler.is_enabled(),
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "title": Path("/proc/self/cmdline").read_bytes().decode() + Path("/proc/self/comm").read_text(),
        "log": [logging.getLogger().level, [str(handler) for handler in logging.getLogger().handlers]],
        "affinity": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "files": sorted(os.listdir(tempfile.gettempdir())),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }

logging.basicConfig(level=logging.INFO)
before = state()
from tests.engines.sglang_cpu.shim import install
install()
from sglang.srt.managers import load_snapshot
load_snapshot.shm_path_for = lambda name: sys.exit("SGLang writes a file into shared memory")
settings = json.loads(sys.argv[1])
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.execution.contract import BackendJob
backend = SglangSettings(**settings).open()
backend.submit([BackendJob(bytes(16), bytes(40))])
while not backend.step().blocks:
    pass
seen = {"open": state()}
backend.close()
seen["closed"] = state()
print("\\n" + json.dumps({when: [before, found] for when, found in seen.items()}))
"""


def test_sglang_does_not_change_the_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    settings = json.dumps(settings_of(folder, "float32", {}))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _PROGRAM, settings], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    for before, after in json.loads(done.stdout.splitlines()[-1]).values():
        assert after == before
    assert "it/s" not in done.stderr, "SGLang printed progress bars"
    assert "INFO:sglang" not in done.stderr, "SGLang logs more than warnings"


def test_a_closed_engine_leaves_no_thread_and_no_memory(folder: Path) -> None:
    with opened(folder) as driver:
        weights = next(scheduler_of(driver.backend).tp_worker.model_runner.model.parameters())
        seen = weakref.ref(weights)
        del weights
    assert seen() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "lmpool-sglang"]


def test_the_folder_of_an_adapter_may_have_any_name() -> None:
    assert SglangSettings("m", adapters=["a=/x", "b=y/z=1"]).adapter_folders == {"a": "/x", "b": "y/z=1"}
