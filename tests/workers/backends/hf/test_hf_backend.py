"""The hf backend compared with transformers: rows, reuse of prefixes, limits, failures and settings."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.smollm2 import gguf_path
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from lmpool.errors import SettingsError
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Encoding, widen_bf16
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.forward import ROOT, Forward, PrefixSlots
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendJob
from tests.support.models.tiny_models import CONFIGS, MAX_TOKENS, VOCAB_SIZE, make_model, write_model
from tests.workers.backends.hf.hf_tiny import Reference, Tiny, decode, drain, job, random_prompts, serve


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


ATTENTION = pytest.mark.parametrize("kind", ["llama", "gpt2"])
EVERY_KIND = pytest.mark.parametrize("kind", list(CONFIGS))


@EVERY_KIND
def test_ragged_prompts_have_the_rows_of_transformers(tiny: Tiny, kind: str) -> None:
    tiny.reference(kind).check(serve(tiny.backend(kind), random_prompts(20, (1, MAX_TOKENS))))


@EVERY_KIND
def test_extensions_and_branches_have_the_rows_of_transformers(tiny: Tiny, kind: str) -> None:
    backend = tiny.backend(kind, max_batch=8)
    stem = random_prompts(1, (20, 20))[0]
    tails = random_prompts(6, (12, 12), seed=1)
    for size in (0, 1, 2, 5, 6, 12):
        tiny.reference(kind).check(serve(backend, [stem + tail[:size] for tail in tails]))
    tiny.reference(kind).check(serve(backend, [stem[:size] + tails[0] for size in (1, 7, 13, 19)]))
    assert (backend.stats().reused > 0) == (kind not in ("longrope", "mamba", "rwkv"))


@ATTENTION
def test_an_extension_computes_only_its_new_tokens(tiny: Tiny, kind: str) -> None:
    backend = tiny.backend(kind)
    stem, *tails = random_prompts(5, (20, 20))
    serve(backend, [stem])
    assert backend.stats().reused == 0
    tiny.reference(kind).check(serve(backend, [stem + tail[:3] for tail in tails]))
    assert backend.stats().reused == 4 * 20
    tiny.reference(kind).check(serve(backend, [stem[:12] + tail[:1] for tail in tails]))
    assert backend.stats().reused == 4 * 20 + 4 * 12


@ATTENTION
def test_a_repeated_prompt_computes_only_its_last_token(tiny: Tiny, kind: str) -> None:
    backend = tiny.backend(kind)
    (prompt,) = random_prompts(1, (30, 30))
    for _ in range(2):
        tiny.reference(kind).check(serve(backend, [prompt]))
    assert backend.stats().reused == 29


def test_a_digest_submitted_twice_is_computed_once(tiny: Tiny) -> None:
    backend = tiny.backend()
    prompts = random_prompts(3, (5, 9))
    backend.submit([job(prompt) for prompt in prompts])
    tiny.reference("llama").check(serve(backend, prompts))
    assert backend.stats().rows == 3


def test_a_long_prefix_shared_by_waiting_prompts_is_computed_once(tiny: Tiny) -> None:
    backend = tiny.backend()
    (stem,) = random_prompts(1, (50, 50))
    tiny.reference("llama").check(serve(backend, [(*stem, token) for token in range(8)]))
    assert backend.stats() == (2, 8, 8 * 51, 7 * 50)


@EVERY_KIND
@pytest.mark.parametrize("slots", [0, 1, 3, 30])
def test_rows_survive_evictions(tiny: Tiny, kind: str, slots: int) -> None:
    backend = tiny.backend(kind)
    if backend._pool is not None:
        backend = tiny.backend(kind, kv_cache_bytes=backend._pool.layout.slot_bytes * (slots + 1))
        assert (backend._pool.capacity if backend._pool else 0) == slots
    (stem,) = random_prompts(1, (20, 20))
    for seed in range(5):
        branches = [stem[: 4 * seed] + tail for tail in random_prompts(4, (1, 15), seed)]
        tiny.reference(kind).check(serve(backend, branches))
        if backend._pool is not None:
            assert len(backend._pool.slots) <= slots


@EVERY_KIND
def test_any_split_into_batches_gives_the_same_rows(tiny: Tiny, kind: str) -> None:
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)

    @settings(max_examples=8, derandomize=True)
    @given(
        rounds=st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=3),
        max_batch=st.integers(1, 7),
        max_batch_tokens=st.integers(1, 40),
        kv_cache_bytes=st.sampled_from([0, 20_000, 1 << 24]),
    )
    def check(rounds: list[list[list[int]]], **limits: int) -> None:
        backend = tiny.backend(kind, **limits)
        for prompts in rounds:
            tiny.reference(kind).check(serve(backend, prompts))

    check()


def test_a_model_that_cannot_be_padded_is_not(tiny: Tiny) -> None:
    backend = tiny.backend("rwkv")
    serve(backend, random_prompts(3, (4, 4)) + random_prompts(2, (6, 6)))
    assert backend.stats().steps == 2


def test_reuse_is_switched_off_where_it_gives_other_rows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def forgetful(self: LlamaForCausalLM, *arguments: Any, **named: Any) -> Any:
        cache = named.get("past_key_values")
        reuses = cache is not None and cache.get_seq_length() > 0
        output = forward(self, *arguments, **named)
        if reuses:
            output.logits = output.logits + torch.linspace(0, 0.1, VOCAB_SIZE)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forgetful)
    backend = tiny.backend()
    for size in (5, 9):
        tiny.reference("llama").check(serve(backend, [range(size)]))
    assert backend.stats().reused == 0


def test_reuse_continues_below_the_horizon(tiny: Tiny) -> None:
    backend = tiny.backend("longrope")
    for size in (10, 16, 17, 18, 11):
        tiny.reference("longrope").check(serve(backend, [range(size)]))
    assert backend.stats().reused == 0 + 10 + 0 + 0 + 10


def test_a_window_too_long_to_be_tried_is_a_horizon(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "_LONGEST_WINDOW", 3)
    backend = tiny.backend("mistral")
    for size in (3, 4, 5, 6):
        tiny.reference("mistral").check(serve(backend, [range(size)]))
    assert backend.stats().reused == 3


def test_models_that_return_the_logits_of_all_positions_are_sliced(tiny: Tiny) -> None:
    backend = tiny.backend()
    backend._forward.takes -= {"logits_to_keep"}
    tiny.reference("llama").check(serve(backend, random_prompts(6, (1, 20))))


def test_smollm2_has_the_rows_of_transformers(smollm2_folder: Path) -> None:
    reference = Reference(smollm2_folder)
    backend = HfBackend(HfSettings(str(smollm2_folder), device="cpu"))
    paris = (504, 3575, 282, 4649, 314)  # Token ids of "The capital of France is".
    generator = np.random.default_rng(0)
    ragged = [tuple(generator.integers(0, 49_152, size).tolist()) for size in (1, 9, 17)]
    rows = serve(backend, [paris, *ragged])
    reference.check(rows)
    assert int(rows[paris].argmax()) == 7042  # The token " Paris".
    reference.check(serve(backend, [(*paris, 7042), (*paris, 253, 3575), *((*ids[:-1], 101, 202) for ids in ragged)]))
    assert backend.stats().reused == 4 + 5 + 0 + 8 + 16
    assert (backend.info.vocab_size, backend.info.encoding, backend.info.max_prompt_tokens) == (49_152, "f32", 8192)


def record_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the logits of every forward from now on."""
    recorded: list[Tensor] = []
    forward = Forward.last_logits

    def last_logits(self: Forward, *arguments: Any) -> Tensor:
        logits = forward(self, *arguments)
        recorded.append(logits[:, -1])
        return logits

    monkeypatch.setattr(Forward, "last_logits", last_logits)
    return recorded


@pytest.mark.parametrize(("dtype", "encoding"), [(torch.bfloat16, Encoding.BF16), (torch.float16, Encoding.F16)])
def test_rows_of_a_16_bit_model_keep_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, encoding: Encoding
) -> None:
    backend = HfBackend(HfSettings(str(write_model(tmp_path, "llama", dtype)), device="cpu"))
    assert (backend.info.encoding, backend.info.lossy) == (encoding.name.lower(), False)
    recorded = record_logits(monkeypatch)
    backend.submit([job(prompt) for prompt in random_prompts(5, (3, 9))])
    (block,) = backend.step().blocks
    assert block.encoding is encoding
    for logits, row in zip(recorded[-1].float(), decode([block]).values(), strict=True):
        assert np.array_equal(row, (logits - torch.logsumexp(logits, -1)).numpy())


@pytest.mark.parametrize(("scale", "encoding"), [(1.0, Encoding.BF16), (1.001, Encoding.F32)])
def test_float32_logits_of_a_bfloat16_model_are_narrowed_only_if_they_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, encoding: Encoding
) -> None:
    backend = HfBackend(HfSettings(str(write_model(tmp_path, "llama", torch.bfloat16)), device="cpu"))
    forward = Forward.last_logits
    monkeypatch.setattr(Forward, "last_logits", lambda self, *rest: forward(self, *rest).float() * scale)
    backend.submit([job((1, 2, 3))])
    (block,) = backend.step().blocks
    assert block.encoding is encoding


def test_float16_rows_are_lossy_and_only_on_request(tiny: Tiny) -> None:
    backend = tiny.backend(encoding="f16")
    assert (backend.info.encoding, backend.info.lossy) == ("f16", True)
    assert backend.info.fingerprint != tiny.backend().info.fingerprint
    prompts = random_prompts(5, (3, 9))
    for prompt, row in serve(backend, prompts).items():
        np.testing.assert_allclose(row, tiny.reference("llama").row(prompt), atol=0.02)


def break_lm_head(folder: Path, values: dict[int, float]) -> HfBackend:
    """A backend that returns the logits `values` (token -> logit) for any prompt."""
    backend = HfBackend(HfSettings(str(write_model(folder, "llama")), device="cpu"))

    def put(_: Any, __: Any, output: Tensor) -> Tensor:
        for token, value in values.items():
            output[..., token] = value
        return output

    model: Any = backend._forward.model
    model.lm_head.register_forward_hook(put)
    return backend


def test_a_model_whose_batches_have_mixed_up_rows_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    last_logits = Forward.last_logits
    monkeypatch.setattr(Forward, "last_logits", lambda *given: last_logits(*given).flip(0))
    with pytest.raises(SettingsError, match="cannot be served by hf: a prompt's row differs by .* when others run"):
        tiny.backend()


def test_nan_weights_fail_the_prompts_that_use_them(tiny: Tiny, tmp_path: Path) -> None:
    model: Any = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    model.save_pretrained(tmp_path)
    backend = HfBackend(HfSettings(str(tmp_path), device="cpu"))
    good, bad = [(1, 2, 3), (4, 5, 6, 7, 8)], [(1, 50), (9, 50, 3, 2)]
    backend.submit([job(prompt) for prompt in good + bad])
    (finished,) = drain(backend)
    assert set(finished.failures) == {job(prompt).digest for prompt in bad}
    assert all("as NaN" in message and "\n" not in message for message in finished.failures.values())
    rows = decode(finished.blocks)
    tiny.reference("llama").check({prompt: rows[job(prompt).digest] for prompt in good})


def test_a_failure_does_not_change_the_encoding_of_other_rows(tmp_path: Path) -> None:
    model: Any = make_model("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    model.save_pretrained(tmp_path)
    backend = HfBackend(HfSettings(str(tmp_path), device="cpu"))
    backend.submit([job((1, 2)), job((1, 50))])
    (finished,) = drain(backend)
    assert [(block.digests, block.encoding) for block in finished.blocks] == [([job((1, 2)).digest], Encoding.BF16)]
    assert set(finished.failures) == {job((1, 50)).digest}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({3: float("inf")}, "1 of 97 logits as +inf"),
        ({96: float("nan")}, "1 of 97 logits as NaN"),
        (dict.fromkeys(range(97), float("-inf")), "-inf for all 97 logits"),
    ],
)
def test_logits_without_a_distribution_are_a_failure(tmp_path: Path, values: dict[int, float], message: str) -> None:
    backend = break_lm_head(tmp_path, values)
    backend.submit([job((1, 2))])
    (finished,) = drain(backend)
    assert finished.blocks == []
    assert message in finished.failures[job((1, 2)).digest]


def test_tokens_of_probability_zero_are_allowed(tmp_path: Path) -> None:
    (row,) = serve(break_lm_head(tmp_path, {0: float("-inf"), 5: float("-inf")}), [(1, 2)]).values()
    assert row[0] == row[5] == -np.inf
    assert np.exp(row).sum() == pytest.approx(1, abs=1e-5)


def limit_forward(monkeypatch: pytest.MonkeyPatch, fail: Callable[[Tensor], None]) -> list[int]:
    """Let Llama's forward first call `fail` with its input ids; returns the list of the sizes of batches that ran."""
    sizes: list[int] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def limited(self: LlamaForCausalLM, *arguments: Any, **named: Any) -> Any:
        fail(named["input_ids"])
        sizes.append(len(named["input_ids"]))
        return forward(self, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)
    return sizes


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_too_little_memory_halves_the_batch(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    backend = tiny.backend(max_batch=16)

    def fail(ids: Tensor) -> None:
        if len(ids) > 3:
            raise error

    sizes = limit_forward(monkeypatch, fail)
    rows = serve(backend, random_prompts(16, (8, 8)))
    assert sizes == [2] * 8
    tiny.reference("llama").check(rows)


def test_a_prompt_that_never_fits_fails_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny.backend()

    def fail(ids: Tensor) -> None:
        if ids.shape[1] > 20:
            raise RuntimeError("out of memory\nand a long explanation")

    limit_forward(monkeypatch, fail)
    short, long = random_prompts(3, (10, 15)), random_prompts(1, (30, 30))
    backend.submit([job(prompt) for prompt in short + long])
    finished = drain(backend)
    failures = {digest: message for step in finished for digest, message in step.failures.items()}
    assert failures == {job(long[0]).digest: "the model failed on this prompt: out of memory"}
    assert sum(len(block.digests) for step in finished for block in step.blocks) == 3


def test_a_prompt_that_fits_once_memory_was_freed_for_it_is_answered(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that runs alone and gets an out-of-memory error runs again after the backend has freed memory."""
    backend = tiny.backend()
    freed: list[bool] = []
    monkeypatch.setattr(backend, "_free_memory", lambda: freed.append(True))

    def fail(_: Tensor) -> None:
        if not freed:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    sizes = limit_forward(monkeypatch, fail)
    rows = serve(backend, [(1, 2, 3)])
    assert (sizes, freed) == ([1], [True])
    tiny.reference("llama").check(rows)


def test_an_exception_fails_only_the_prompt_that_causes_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny.backend()

    def fail(ids: Tensor) -> None:
        if (ids == 90).any():
            raise IndexError("token 90 is cursed")

    limit_forward(monkeypatch, fail)
    good = [(1, 2, 3), (4, 5), (6,)]
    backend.submit([job(prompt) for prompt in [(1, 90), *good]])
    (finished,) = drain(backend)
    assert finished.failures == {job((1, 90)).digest: "the model failed on this prompt: token 90 is cursed"}
    rows = decode(finished.blocks)
    tiny.reference("llama").check({prompt: rows[job(prompt).digest] for prompt in good})


ABOUT: dict[str, PositionsQuery | None] = {
    "row": None,
    "top": PositionsQuery(0, top=3),
    "targets": PositionsQuery(0, targets=bytes(4)),
    "logits": PositionsQuery(0, values="logits"),
    "scores": PositionsQuery(0, next_token=True),
    "hidden": PositionsQuery(0, values="hidden", size=32),
}


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.parametrize("error", [TypeError, KeyError])
def test_an_exception_fails_a_query_of_any_kind_and_no_other(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, about: str, error: type[Exception]
) -> None:
    backend = _opened(tiny)

    def fail(ids: Tensor) -> None:
        if (ids == 90).any():
            raise error("cursed")

    limit_forward(monkeypatch, fail)
    bad, good = (job(prompt)._replace(positions=ABOUT[about]) for prompt in [(90, 1), (4, 5)])
    backend.submit([bad, good])
    finished = drain(backend)
    assert {digest for step in finished for digest in step.failures} == {bad.digest}
    assert [digest for step in finished for digest in step.digests if digest not in step.failures] == [good.digest]


@functools.cache
def _opened(tiny: Tiny) -> HfBackend:
    return tiny.backend()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        type("AcceleratorError", (RuntimeError,), {})("device-side assert triggered"),
    ],
    ids=["by-text", "by-type"],
)
def test_a_broken_device_is_not_a_failed_prompt(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    backend = tiny.backend()

    def fail(_: Tensor) -> None:
        raise error

    limit_forward(monkeypatch, fail)
    backend.submit([job((1, 2))])
    with pytest.raises(RuntimeError, match="device-side assert"):
        backend.step()


def test_the_oldest_prompt_is_never_passed_over(tiny: Tiny) -> None:
    backend = tiny.backend(max_batch=4, max_batch_tokens=32)
    short = iter(random_prompts(200, (2, 3), seed=3))
    long = random_prompts(1, (30, 30))[0]
    backend.submit([job(next(short)) for _ in range(4)])
    backend.submit([job(long)])
    for _ in range(2):
        finished = backend.step()
        backend.submit([job(next(short)) for _ in range(backend.capacity())])
    assert [digest for block in finished.blocks for digest in block.digests] == [job(long).digest]


def test_a_waiting_prompt_is_looked_up_again_only_when_the_pool_has_changed_its_path(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny.backend(max_batch=1)
    prompts = random_prompts(4, (40, 40))
    serve(backend, prompts)
    looked_up: list[int] = []
    match = PrefixSlots.match

    def counted(self: PrefixSlots, ids: Sequence[int], root: int = ROOT, known: Any = None) -> Any:
        looked_up.append(len(ids) - len(known or ()))
        return match(self, ids, root, known)

    monkeypatch.setattr(PrefixSlots, "match", counted)
    longer = [(*prompt, 1) for prompt in prompts]
    rows = serve(backend, longer)
    # Each of 4 prompts looks up its 41 tokens, and its 1 new token again when the keys and values are stored.
    assert sorted(looked_up) == [1] * 4 + [41] * 4
    tiny.reference("llama").check(rows)
    assert backend._pool is not None
    backend.submit([first := job(longer[0]), job(longer[1])])
    backend._next_chunk(first)
    looked_up.clear()
    backend._pool.slots._clock += 1
    backend._pool.slots._evict(backend._pool.capacity)
    assert not backend._next_chunk(first).path
    assert looked_up == [41]
    drain(backend)


def test_aborted_prompts_are_not_computed(tiny: Tiny) -> None:
    backend = tiny.backend(max_batch=4)
    prompts = random_prompts(3, (5, 5))
    assert (backend.batch, backend.capacity()) == (4, 8)
    backend.submit([job(prompt) for prompt in prompts])
    assert backend.capacity() == 5
    backend.abort([job(prompts[1]).digest, b"unknown"])
    (finished,) = drain(backend)
    assert finished.blocks[0].digests == [job(prompts[0]).digest, job(prompts[2]).digest]
    assert backend.capacity() == 8


def test_a_closed_backend_holds_nothing(tiny: Tiny) -> None:
    backend = tiny.backend()
    backend.submit([job((1, 2))])
    backend.close()
    assert (backend.capacity(), backend._pool) == (2 * backend.batch, None)


def test_the_revision_follows_the_weights(tiny: Tiny, tmp_path: Path) -> None:
    info = tiny.backend().info
    copy = shutil.copytree(tiny.folder("llama"), tmp_path / "elsewhere")
    moved = HfBackend(HfSettings(str(copy), device="cpu", name="other", max_batch=3)).info
    assert (moved.revision, moved.fingerprint) == (info.revision, info.fingerprint)
    model: Any = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 1] += 1e-6
    model.save_pretrained(tmp_path / "changed")
    changed = HfBackend(HfSettings(str(tmp_path / "changed"), device="cpu")).info
    assert changed.fingerprint != info.fingerprint


def test_the_info_describes_the_served_model(tiny: Tiny) -> None:
    info = tiny.backend(name="small", dtype="bfloat16", max_prompt_tokens=20).info
    assert (info.name, info.backend, info.vocab_size, info.max_prompt_tokens) == ("small", "hf", VOCAB_SIZE, 20)
    assert (info.dtype, info.encoding, info.source) == ("bfloat16", "bf16", str(tiny.folder("llama")))
    assert tiny.backend().info.name == "llama"
    assert tiny.backend("gpt2").info.max_prompt_tokens == MAX_TOKENS


def test_the_wire_keeps_bfloat16_logits(tmp_path: Path) -> None:
    backend = HfBackend(HfSettings(str(write_model(tmp_path, "gpt2", torch.bfloat16)), device="cpu"))
    backend.submit([job((1, 2, 3))])
    (block,) = backend.step().blocks
    assert block.log_z is not None
    logits = torch.from_numpy(widen_bf16(block.numbers[0]))
    assert float(torch.logsumexp(logits, -1)) == block.log_z[0]


def test_a_gguf_file_gives_the_rows_of_the_folder_made_from_it(smollm2_folder: Path) -> None:
    gguf = gguf_path()
    rows = []
    named = HfSettings(str(gguf), device="cpu", dtype="float32")
    assert named == HfSettings(str(gguf.parent), gguf.stem, gguf_file=gguf.name, device="cpu", dtype="float32")
    assert named.served_as == gguf.stem
    for chosen in (named, HfSettings(str(smollm2_folder), device="cpu")):
        backend = HfBackend(chosen)
        prompt = encode_prompt([504, 3575, 282], vocab_size=backend.info.vocab_size, max_tokens=10)
        backend.submit([BackendJob(prompt.digest, prompt.ids)])
        (block,) = backend.step().blocks
        rows.append(block.numbers[0].copy())
        assert backend.info.gguf_file == (chosen.gguf_file or "")
        backend.close()
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)
