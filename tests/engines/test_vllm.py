"""The vllm backend: model runners, sessions, options, and checks of the results that vLLM returns."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.sample.logits_processor import MoveDirectionality

from lmpool.errors import SettingsError, WorkerError
from lmpool.workers.backends import engines
from lmpool.workers.backends import settings as settings_module
from lmpool.workers.backends.vllm import engine
from lmpool.workers.backends.vllm.backend import VllmBackend
from lmpool.workers.backends.vllm.capture import KEY, CaptureProcessor
from lmpool.workers.execution.contract import BackendJob
from tests.contract.model import MAX_TOKENS, V, reference_row
from tests.engines.newest import WANTED
from tests.engines.vllm_small import BLOCK, SESSIONS, answer, draw, job, refused, settings


@pytest.fixture(scope="module")
def backend(model_folder: Path) -> Iterator[VllmBackend]:
    """One small backend that tests share if they leave the backend usable."""
    made = settings(model_folder).open()
    assert isinstance(made, VllmBackend)
    yield made
    made.close()


# The variant of vLLM in this run


def test_the_engine_runs_in_the_wanted_variant(backend: VllmBackend) -> None:
    core: Any = backend._core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    variant = os.environ["LMPOOL_CONTRACT"]
    assert (".gpu.model_runner" in type(runner).__module__ or "gpu.model_runner" in str(type(runner).__mro__)) == (
        variant == "vllm-v2"
    )
    assert (core.batch_queue is not None) == (variant == "vllm-async")


def test_signals_stay_as_they_were(model_folder: Path, backend: VllmBackend) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Sessions


def test_a_session_is_opened_when_a_prompt_begins_to_grow(backend: VllmBackend) -> None:
    before = len(backend._sessions)
    ids = draw(1, 40)
    answer(backend, ids)
    assert len(backend._sessions) == before, "a single prompt opens no session"
    answer(backend, [*ids, 1])
    assert len(backend._sessions) == min(before + 1, SESSIONS)
    reused = backend.stats().reused
    answer(backend, [*ids, 1, 2])
    assert backend.stats().reused - reused == 41, "all tokens but the new one"


@contextmanager
def computed(backend: VllmBackend) -> Iterator[list[int]]:
    """Record the number of tokens of each step that the backend computes while the context manager is open."""
    scheduler: Any = backend._scheduler
    schedule, tokens = scheduler.schedule, []

    def noted(*args: Any, **named: Any) -> Any:
        scheduled = schedule(*args, **named)
        tokens.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    scheduler.schedule = noted
    try:
        yield tokens
    finally:
        del scheduler.schedule


def test_a_prompt_that_continues_a_session_computes_only_the_new_tokens(backend: VllmBackend) -> None:
    ids = draw(2, 40)
    answer(backend, ids)
    answer(backend, [*ids, 1, 2, 3])
    ids = [*ids, 1, 2, 3]
    for new in (3, 1, 7, 2, BLOCK, 5):
        longer, before = [*ids, *draw(new, new)], backend.stats()
        with computed(backend) as tokens:
            answer(backend, longer)
        assert sum(tokens) == new
        after = backend.stats()
        assert (after.tokens - before.tokens, after.reused - before.reused) == (len(longer), len(ids))
        ids = longer


def test_a_prompt_longer_by_more_than_a_block_reuses_the_full_blocks(backend: VllmBackend) -> None:
    ids = draw(3, 40)
    answer(backend, ids)
    answer(backend, [*ids, 1])
    longer, before = [*ids, 1, *draw(4, BLOCK + 1)], backend.stats().reused
    with computed(backend) as tokens:
        answer(backend, longer)
    assert sum(tokens) == len(longer) - BLOCK
    assert backend.stats().reused - before == BLOCK


def test_sessions_whose_new_tokens_do_not_fit_a_step_are_continued_in_parts(backend: VllmBackend) -> None:
    contexts = [draw(seed, 30) for seed in range(20, 20 + SESSIONS)]
    for new in (0, 3, 25, 1):
        contexts, before = [[*ids, *draw(new, new)] for ids in contexts], backend.stats().reused
        with computed(backend) as tokens:
            answer(backend, *contexts)
        if new not in (0, 3):
            assert sum(tokens) == new * len(contexts)
            assert backend.stats().reused - before == sum(len(ids) - new for ids in contexts)
    assert len(backend._sessions) == SESSIONS


def test_tokens_of_a_preempted_session_are_not_counted_as_reused(backend: VllmBackend) -> None:
    ids = draw(5, 40)
    answer(backend, ids)
    answer(backend, [*ids, 1])
    before = backend.stats()
    longer = job([*ids, 1, 2, 3])
    backend.submit([longer])
    # Count a preemption, as the scheduler does when it preempts a running request.
    backend._scheduler.requests[backend._held[longer.digest]].num_preemptions += 1
    while not backend.step().blocks:
        pass
    after = backend.stats()
    assert (after.tokens - before.tokens, after.reused - before.reused) == (43, 0)
    answer(backend, [*ids, 1, 2, 3, 4])
    assert backend.stats().reused - after.reused == 43, "the session was kept again"


def test_the_number_of_sessions_is_limited_and_the_oldest_is_closed_first(backend: VllmBackend) -> None:
    contexts = [draw(seed, 20) for seed in range(10, 10 + 3 * SESSIONS)]
    for _ in range(3):
        answer(backend, *contexts)
        assert len(backend._sessions) <= SESSIONS
        assert len(backend._scheduler.requests) == len(backend._sessions)
        contexts = [[*ids, 5] for ids in contexts]


def test_sessions_are_closed_for_a_prompt_that_needs_their_memory(backend: VllmBackend) -> None:
    contexts = [draw(seed, 60) for seed in range(30, 30 + SESSIONS)]
    for token in range(3):
        answer(backend, *contexts)
        contexts = [[*ids, token] for ids in contexts]
    assert len(backend._sessions) > 1
    answer(backend, *[draw(seed, MAX_TOKENS - 1) for seed in range(40, 44)])
    assert not backend._requests


@pytest.mark.parametrize("runs", [False, True])
def test_a_dropped_extension_closes_its_session(backend: VllmBackend, runs: bool) -> None:
    ids = draw(50 + runs, 30)
    answer(backend, ids)
    answer(backend, [*ids, 1])
    held = len(backend._sessions)
    backend.submit([job([*ids, 1, 2])])
    assert len(backend._sessions) == held - 1
    if runs:
        backend.step()
    backend.abort([job([*ids, 1, 2]).digest])
    assert len(backend._scheduler.requests) == len(backend._sessions)
    answer(backend, [*ids, 1, 2])


# Fresh rows


def test_a_fresh_row_uses_no_cached_keys_and_values(backend: VllmBackend) -> None:
    ids = draw(59, 64)
    answer(backend, ids)
    before = backend.stats().reused
    fresh = job(ids, "fresh")._replace(fresh=True)
    backend.submit([fresh])
    while not (finished := backend.step()).blocks:
        pass
    assert np.abs(finished.blocks[0].numbers[0] - reference_row(ids)).max() <= 3e-4
    assert backend.stats().reused == before


# Checks of vLLM's results


@pytest.fixture
def in_flight(backend: VllmBackend) -> Iterator[BackendJob]:
    """A prompt in flight, which the fixture aborts after the test."""
    held = job(draw(60, 10))
    backend.submit([held])
    name = backend._held[held.digest]
    yield held
    backend.abort([held.digest])
    # Abort the request in the engine too, because a test may have made the backend discard the request.
    backend._core.abort_requests([name])


def test_a_result_for_an_unknown_request_breaks_the_backend(
    backend: VllmBackend, in_flight: BackendJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = EngineCoreOutput("unknown", [1], finish_reason=FinishReason.LENGTH)
    monkeypatch.setattr(backend._core, "get_output", lambda: EngineCoreOutputs(outputs=[stranger]))
    with pytest.raises(WorkerError, match="request unknown, which it was not asked"):
        backend.step()


def test_an_end_without_logits_breaks_the_backend(
    backend: VllmBackend, in_flight: BackendJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = EngineCoreOutput(backend._held[in_flight.digest], [1], finish_reason=FinishReason.LENGTH)
    monkeypatch.setattr(backend._core, "get_output", lambda: EngineCoreOutputs(outputs=[ended]))
    with pytest.raises(WorkerError, match="without giving its logits"):
        backend.step()


def test_an_aborted_request_is_a_failure_of_its_prompt_alone(
    backend: VllmBackend, in_flight: BackendJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = backend._held[in_flight.digest]
    with monkeypatch.context() as patched:
        ended = EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT)
        patched.setattr(backend._core, "get_output", lambda: EngineCoreOutputs(outputs=[ended]))
        finished = backend.step()
    backend._core.abort_requests([name])
    assert not finished.blocks
    assert finished.failures == {in_flight.digest: "vLLM has ended the prompt: abort"}
    answer(backend, draw(61, 5))


@pytest.mark.parametrize("shape", [(1, V - 1), (2, V)], ids=["other V", "other number of rows"])
def test_logits_of_another_shape_break_the_backend(backend: VllmBackend, shape: tuple[int, int]) -> None:
    with pytest.raises(WorkerError, match=rf"logits of shape \({shape[0]}, {shape[1]}\) for 1 prompts and V = {V}"):
        backend._engine.captured.add([bytes(16)], torch.zeros(shape))


# Options


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("max_num_seq=3", "has no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("tensor_parallel_size=2", "tensor_parallel_size cannot be set here: use --tensor-parallel-size"),
        ("pipeline_parallel_size=2", "pipeline_parallel_size cannot be set here"),
        ("model=other", "model cannot be set here: it is the MODEL of the command"),
        ("logits_processors=[]", "logits_processors cannot be set here"),
        ("kv_cache_dtype=fp7", "cache_dtype: Input should be"),
        ("distributed_executor_backend=mp", "distributed_executor_backend cannot be set here: lmpool sets it"),
        ("data_parallel_size=2", "data_parallel_size cannot be set here: start more workers instead"),
        *(
            (f"kv_cache_dtype={dtype}", f"engine_args: kv_cache_dtype={dtype} gives wrong rows on a CPU. Leave it out")
            for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")
        ),
        ("max_model_len=100000", "max_model_len"),
    ],
)
def test_impossible_options_are_refused_in_one_line(model_folder: Path, given: str, text: str) -> None:
    assert text in refused(model_folder, engine_args=[given])


def test_a_checkpoint_with_narrow_keys_and_values_is_refused(model_folder: Path, tmp_path: Path) -> None:
    narrow = shutil.copytree(model_folder, tmp_path / "narrow")
    config = json.loads((narrow / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (narrow / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    assert "kv_cache_dtype=fp8" in refused(narrow)


def test_too_little_memory_is_reported_in_one_line(model_folder: Path) -> None:
    assert "No available memory" in refused(model_folder, kv_cache_bytes=1000)


def test_a_prompt_limit_beyond_the_model_is_refused(model_folder: Path) -> None:
    assert str(MAX_TOKENS) in refused(model_folder, max_prompt_tokens=MAX_TOKENS + 5)


def test_a_missing_and_a_broken_model_are_refused_in_one_line(model_folder: Path, tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "it has no config.json" in refused(tmp_path / "empty")
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nonsense")
    assert "broken" in refused(broken)


def test_a_folder_without_an_adapter_is_refused(model_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no adapter_config.json" in refused(model_folder, adapters=[f"a={tmp_path / 'empty'}"])
    assert "is not name=folder" in refused(model_folder, adapters=["a"])
    assert "given twice" in refused(model_folder, adapters=[f"a={adapter_folder}"] * 2)
    large = shutil.copytree(adapter_folder, tmp_path / "large")
    config = json.loads((large / "adapter_config.json").read_text())
    (large / "adapter_config.json").write_text(json.dumps(config | {"r": 600}))
    assert "has rank 8, and adapter_config.json says 600" in refused(model_folder, adapters=[f"a={large}"])
    tensors = load_file(large / "adapter_model.safetensors")
    stretched = {
        name: torch.zeros(600, tensor.shape[1]) if "lora_A" in name else torch.zeros(tensor.shape[0], 600)
        for name, tensor in tensors.items()
    }
    save_file(stretched, large / "adapter_model.safetensors")
    assert "has rank 600: vLLM takes at most 512" in refused(model_folder, adapters=[f"a={large}"])
    (large / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ".*_proj"}))
    assert "target_modules is '.*_proj', a pattern" in refused(model_folder, adapters=[f"a={large}"])


def test_an_adapter_of_another_model_is_refused(model_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(adapter_folder, tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name.replace("self_attn", "nowhere"): t for name, t in tensors.items()},
              other / "adapter_model.safetensors")  # fmt: skip
    assert "no place for" in refused(model_folder, adapters=[f"a={other}"])
    # vLLM would copy the factors of a smaller model into a corner of its memory.
    narrow = {name: t[:, : t.shape[1] // (1 + ("lora_A" in name))].clone() for name, t in tensors.items()}
    save_file(narrow, other / "adapter_model.safetensors")
    assert "have the shapes [8, 64] and [128, 8]" in refused(model_folder, adapters=[f"a={other}"])


def test_an_adapter_that_vllm_refuses_takes_no_slot(
    model_folder: Path, adapter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = shutil.copytree(adapter_folder, tmp_path / "wide")
    tensors = load_file(wide / "adapter_model.safetensors")
    save_file({name: torch.ones(4 * t.shape[0], t.shape[1]) if "B" in name else t for name, t in tensors.items()},
              wide / "adapter_model.safetensors")  # fmt: skip
    backend = settings(model_folder, max_adapters=1).open()
    assert isinstance(backend, VllmBackend)
    with monkeypatch.context() as patched:
        patched.setattr(engines, "check_adapter", lambda source, *_: Path(source))
        for _ in range(2):
            with pytest.raises(SettingsError, match="cannot load"):
                backend.load_adapter("a", str(wide))
    answer(backend, draw(31, 9), draw(32, 33))
    revision = backend.load_adapter("a", str(adapter_folder))
    core: Any = backend._core.engine_core
    assert core.list_loras() == {backend._engine.loras[f"a@{revision}"].lora_int_id}
    backend.close()


@pytest.mark.skipif(WANTED, reason="newer versions are accepted in this run")
@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_other_versions_of_vllm_are_refused_with_the_range(
    model_folder: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "version", lambda name: version)
    with pytest.raises(SettingsError, match=rf"vllm {version} is installed; .* >=0\.32,<0\.34"):
        settings(model_folder)


def test_a_missing_vllm_is_refused_with_the_command_that_installs_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(SettingsError, match=r'backend: needs vllm; .* "lmpool\[vllm\]"'):
        settings(model_folder)


# Plugins of other packages


@pytest.fixture
def shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package whose logits processor changes every row."""
    (tmp_path / "tinkered.py").write_text(
        "from lmpool.workers.backends.vllm.capture import CaptureProcessor\n"
        "class Shift(CaptureProcessor):\n"
        "    def apply(self, logits, ctx=None):\n"
        "        logits[:, 3] += 9\n"
        "        return logits\n"
    )
    info = tmp_path / "tinkered-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinkered\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\nshift = tinkered:Shift\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_installed_logits_processor_is_refused_by_name(model_folder: Path, shift: None) -> None:
    error = refused(model_folder)
    assert error.startswith("logits_processors: 'shift' (tinkered:Shift of tinkered 1.2) is installed"), error
    assert "--logits-processors shift" in error
    error = refused(model_folder, logits_processors=["shift", "lift"])
    assert error == "logits_processors: no entry point 'lift' of vllm.logits_processors is installed"


def test_general_plugins_of_other_packages_are_described_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine._foreign_plugins() == []
    info = tmp_path / "tinkered-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinkered\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npatch = tinkered:patch\nmore = tinkered:more\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(engine._foreign_plugins()) == 2
    monkeypatch.setattr(engine, "envs", SimpleNamespace(VLLM_PLUGINS=["patch"]))
    caplog.clear()
    assert engine._foreign_plugins() == ["'patch' (tinkered:patch of tinkered 1.2)"]
    assert "'patch' (tinkered:patch of tinkered 1.2)" in caplog.text


def test_a_named_logits_processor_is_part_of_the_fingerprint(
    model_folder: Path, backend: VllmBackend, shift: None
) -> None:
    made = settings(model_folder, logits_processors=["shift"]).open()
    assert isinstance(made, VllmBackend)
    try:
        ids = draw(70, 30)
        made.submit([job(ids)])
        while not (blocks := made.step().blocks):
            pass
        shifted = reference_row(ids).astype(np.float64)
        shifted[3] += 9
        shifted -= np.logaddexp.reduce(shifted)
        np.testing.assert_allclose(blocks[0].numbers[0], shifted, atol=3e-4)
        assert made.info.fingerprint != backend.info.fingerprint
        assert not made.info.positions, "vLLM scores without them"
    finally:
        made.close()


def test_engine_options_reach_the_engine_and_some_change_the_fingerprint(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.toml").write_text("block_size = 16\nmax_num_seqs = 20\nhf_overrides = {rope_theta = 5.0}\n")
    given_settings = settings(model_folder, engine_args=[str(tmp_path / "engine.toml"), "seed=3 max_num_seqs=24"])
    given = engine.user_arguments(given_settings)
    made = engine.engine_arguments(given_settings, model_folder) | given
    assert (made["block_size"], made["max_num_seqs"], made["seed"]) == (16, 24, 3)
    assert engines.row_deciding(given, engine._HARMLESS) == {"hf_overrides": {"rope_theta": 5.0}, "seed": 3}


def test_the_last_of_several_rows_of_a_prompt_counts(backend: VllmBackend) -> None:
    captured = backend._engine.captured
    captured.add([b"a" * 16, b"b" * 16], torch.zeros(2, V))
    captured.add([b"a" * 16], torch.arange(V)[None].float())
    blocks, failures = captured.take([b"a" * 16, b"b" * 16])
    assert not failures
    rows = {digest: row for block in blocks for digest, row in zip(block.digests, block.numbers, strict=True)}
    assert rows[b"a" * 16].argmax() == V - 1
    assert np.ptp(rows[b"b" * 16]) < 1e-5
    with pytest.raises(WorkerError):
        captured.take([b"a" * 16])


def test_only_complete_prompts_of_the_second_runner_are_captured() -> None:
    requests = SimpleNamespace(prefill_len=SimpleNamespace(np=np.array([10, 20, 30, 40])))
    processor: Any = CaptureProcessor(None, requests)
    for slot in (0, 1, 3):
        assert processor.add_request(slot, SimpleNamespace(extra_args={KEY: bytes([slot])}))
    assert not processor.add_request(2, SimpleNamespace(extra_args=None))
    step = SimpleNamespace(idx_mapping_np=np.array([3, 1, 2, 0]), seq_lens_upper_bound_np=np.array([40, 19, 30, 10]))
    captured: list[tuple[list[bytes], list[int]]] = []
    processor.captured = SimpleNamespace(add=lambda digests, rows: captured.append((digests, rows[:, 0].tolist())))
    logits = torch.arange(4)[:, None]
    assert processor.apply(logits, step) is logits
    assert captured == [([b"\3", b"\0"], [0, 3])]


def test_logits_that_are_no_distribution_fail_their_prompt_alone(backend: VllmBackend) -> None:
    logits = torch.zeros(2, V)
    logits[1, 3] = float("nan")
    captured = backend._engine.captured
    captured.add([b"a" * 16, b"b" * 16], logits)
    blocks, failures = captured.take([b"a" * 16, b"b" * 16])
    assert [block.digests for block in blocks] == [[b"a" * 16]]
    assert "NaN" in failures[b"b" * 16]


def test_the_first_runner_moves_requests_in_its_batch() -> None:
    processor: Any = CaptureProcessor(None, None, False)

    def params(name: str) -> Any:
        return SimpleNamespace(extra_args={KEY: name.encode()})

    def update(**given: Any) -> dict[int, bytes]:
        processor.update_state(SimpleNamespace(**({"removed": [], "added": [], "moved": []} | given)))
        digests: dict[int, bytes] = dict(processor._digests)
        return digests

    assert update(added=[(i, params(name), [], []) for i, name in enumerate("abcd")]) == dict(enumerate(
        (b"a", b"b", b"c", b"d")))  # fmt: skip
    assert update(removed=[1], moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)]) == {0: b"a", 1: b"d", 2: b"c"}
    assert update(moved=[(0, 2, MoveDirectionality.SWAP)]) == {0: b"c", 1: b"d", 2: b"a"}
    assert update(added=[(0, SimpleNamespace(extra_args=None), [], [])]) == {1: b"d", 2: b"a"}
    processor.update_state(None)
    assert processor._digests == {1: b"d", 2: b"a"}
