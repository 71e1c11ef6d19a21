"""Synthetic rows and their backend: rows are normalised, and depend only on the seed, the prompt and V."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmpool.errors import EmptyPrompt, InvalidPrompt, SettingsError, TokenOutOfRange
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Encoding, decode_row
from lmpool.synthetic import FEW_TOKENS, synthetic_row, synthetic_vocabulary
from lmpool.vocabulary import MAX_BYTES, MAX_TOKENS
from lmpool.workers.backends.synthetic import PrefixMemory, SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished
from tests.support.pool import until

encodings = pytest.mark.parametrize("encoding", ["f32", "bf16"])


def job(ids: list[int], vocab_size: int) -> BackendJob:
    prompt = encode_prompt(ids, vocab_size=vocab_size, max_tokens=1000)
    return BackendJob(prompt.digest, prompt.ids)


def prompt_job(length: int, *last: int, **changed: Any) -> BackendJob:
    """A job whose prompt has `length` equal tokens and then the tokens `last`."""
    return job([1] * length + list(last), 50)._replace(**changed)


def backend(**changed: Any) -> SyntheticBackend:
    return SyntheticBackend(replace(SyntheticSettings(vocab_size=50, max_batch=4), **changed))


def rows_of(finished: Finished, vocab_size: int = 50) -> dict[bytes, NDArray[np.float32]]:
    """Decode the rows of a step, as a client does."""
    rows: dict[bytes, NDArray[np.float32]] = {}
    for block in finished.blocks:
        for index, digest in enumerate(block.digests):
            assert digest not in rows
            rows[digest] = decode_row(np.frombuffer(block.encode(index), np.uint8).copy(), vocab_size)
    return rows


# Rows


@encodings
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, FEW_TOKENS, FEW_TOKENS + 1])
def test_rows_are_the_same_together_and_alone(vocab_size: int, encoding: str) -> None:
    drawing = backend(vocab_size=vocab_size, encoding=encoding, max_batch=20)
    prompts = [[at % vocab_size] * (1 + at) for at in range(20)]
    drawing.submit([job(prompt, vocab_size) for prompt in prompts])
    rows = rows_of(drawing.step(), vocab_size)
    for prompt in prompts:
        wanted = synthetic_row(prompt, vocab_size=vocab_size)
        assert np.array_equal(rows[job(prompt, vocab_size).digest], wanted)


@given(st.integers(1, 300), st.integers(0, 2**62), st.data())
def test_the_probabilities_of_a_row_sum_to_one(vocab_size: int, seed: int, data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=8))
    row = synthetic_row(prompt, vocab_size=vocab_size, seed=seed)
    assert row.shape == (vocab_size,)
    assert row.dtype == np.float32
    assert np.exp(row.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert (row <= 0).all()


@pytest.mark.parametrize("vocab_size", [*range(1, 20), 49_152, 131_072])
def test_every_vocabulary_size_works(vocab_size: int) -> None:
    row = synthetic_row([vocab_size - 1], vocab_size=vocab_size)
    assert row.shape == (vocab_size,)
    assert np.exp(row.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)


def test_with_one_token_it_is_certain() -> None:
    assert synthetic_row([0, 0], vocab_size=1, seed=5).tolist() == [0.0]


def test_rows_are_pinned_across_releases() -> None:
    # Never change the values of synthetic rows: users compare with them in their own tests.
    row = synthetic_row([1, 2, 3], vocab_size=6, seed=7)
    expected = [-0.95146823, -1.0452182, -1.3577182, -5.9983435, -7.9358435, -6.1545935]
    np.testing.assert_array_equal(row, np.array(expected, np.float32))


def test_a_row_is_the_same_in_another_process() -> None:
    code = (
        "from lmpool.synthetic import synthetic_row;"
        "print(synthetic_row([5, 6], vocab_size=500, seed=3).tobytes().hex())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == synthetic_row([5, 6], vocab_size=500, seed=3).tobytes().hex()


def test_rows_do_not_depend_on_what_was_drawn_before() -> None:
    before = synthetic_row([1], vocab_size=100, seed=1)
    for seed in range(20):  # Use more seeds than the cache of base rows holds.
        synthetic_row([2], vocab_size=100, seed=seed)
    np.testing.assert_array_equal(synthetic_row([1], vocab_size=100, seed=1), before)


def test_the_seed_is_zero_unless_given() -> None:
    np.testing.assert_array_equal(synthetic_row([1], vocab_size=9), synthetic_row([1], vocab_size=9, seed=0))


def test_any_iterable_of_ids_gives_the_same_row() -> None:
    expected = synthetic_row([1, 2, 3], vocab_size=90)
    for prompt in ((1, 2, 3), iter([1, 2, 3]), np.array([1, 2, 3]), range(1, 4)):
        np.testing.assert_array_equal(synthetic_row(prompt, vocab_size=90), expected)


def test_different_prompts_have_different_rows() -> None:
    prompts = [[i] for i in range(200)] + [[i, i + 1] for i in range(199)] + [[i + 1, i] for i in range(199)]
    assert len({synthetic_row(p, vocab_size=200).tobytes() for p in prompts}) == len(prompts)


def test_different_seeds_have_different_rows() -> None:
    assert len({synthetic_row([1, 2], vocab_size=200, seed=seed).tobytes() for seed in range(50)}) == 50


def test_a_row_is_the_callers_own() -> None:
    row = synthetic_row([1], vocab_size=40)
    expected = row.copy()
    row[:] = 0
    np.testing.assert_array_equal(synthetic_row([1], vocab_size=40), expected)


def test_bad_prompts_are_refused() -> None:
    for prompt, kind in (([], EmptyPrompt), ([40], TokenOutOfRange), ([-1], TokenOutOfRange), ([1.5], InvalidPrompt)):
        with pytest.raises(kind):
            synthetic_row(prompt, vocab_size=40)  # type: ignore[arg-type]


# The backend


@encodings
@settings(max_examples=40)
@given(vocab_size=st.integers(1, 80), seed=st.integers(0, 2**62), data=st.data())
def test_the_backend_answers_with_exactly_the_synthetic_rows(
    encoding: str, vocab_size: int, seed: int, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=6)
    prompts = data.draw(st.lists(ids, min_size=1, max_size=10))
    served = backend(vocab_size=vocab_size, seed=seed, encoding=encoding)
    expected = {job(p, vocab_size).digest: synthetic_row(p, vocab_size=vocab_size, seed=seed) for p in prompts}
    served.submit([job(p, vocab_size) for p in prompts])
    rows: dict[bytes, NDArray[np.float32]] = {}
    for _ in range(0, len(expected), served.batch):
        rows |= rows_of(served.step(), vocab_size)
    assert rows.keys() == expected.keys()
    for digest, row in expected.items():
        assert rows[digest].tobytes() == row.tobytes()


@encodings
def test_a_large_vocabulary_is_bit_identical_too(encoding: str) -> None:
    served = backend(vocab_size=49_152, encoding=encoding)
    served.submit([job([i], 49_152) for i in range(4)])
    rows = rows_of(served.step(), 49_152)
    for i in range(4):
        assert rows[job([i], 49_152).digest].tobytes() == synthetic_row([i], vocab_size=49_152).tobytes()


@encodings
def test_rows_travel_in_the_encoding_of_the_info(encoding: str) -> None:
    served = backend(encoding=encoding)
    served.submit([job([1], 50)])
    (block,) = served.step().blocks
    assert block.encoding is served.info.row_encoding is Encoding[encoding.upper()]


def test_a_step_takes_the_oldest_prompts_up_to_the_batch() -> None:
    served = backend(max_batch=3)
    jobs = [job([i], 50) for i in range(7)]
    served.submit(jobs[:5])
    served.submit(jobs[5:])
    steps = [list(rows_of(served.step())) for _ in range(3)]
    assert steps == [[j.digest for j in jobs[at : at + 3]] for at in (0, 3, 6)]


def test_capacity_is_one_step_and_the_next() -> None:
    served = backend(max_batch=3)
    assert (served.batch, served.capacity()) == (3, 6)
    served.submit([job([i], 50) for i in range(4)])
    assert served.capacity() == 2
    served.step()
    assert served.capacity() == 5
    served.abort([job([3], 50).digest])
    assert served.capacity() == 6


def test_a_duplicate_is_computed_once() -> None:
    served = backend()
    served.submit([job([1], 50), job([1], 50)])
    served.submit([job([1], 50)])
    assert served.capacity() == 7
    assert list(rows_of(served.step())) == [job([1], 50).digest]
    assert served.stats().rows == 1
    assert served.capacity() == 8


def test_aborted_prompts_are_not_computed_and_unknown_ones_ignored() -> None:
    served = backend()
    served.submit([job([1], 50), job([2], 50), job([3], 50)])
    served.abort([job([2], 50).digest, job([9], 50).digest, bytes(16)])
    assert list(rows_of(served.step())) == [job([1], 50).digest, job([3], 50).digest]


@encodings
def test_a_failing_prompt_does_not_affect_its_batch(encoding: str) -> None:
    served = backend(fail_token=7, encoding=encoding)
    served.submit([job([1], 50), job([3, 7], 50), job([2], 50), job([7], 50)])
    finished = served.step()
    assert finished.failures.keys() == {job([3, 7], 50).digest, job([7], 50).digest}
    assert all("token 7" in text for text in finished.failures.values())
    assert rows_of(finished).keys() == {job([1], 50).digest, job([2], 50).digest}
    assert served.capacity() == 8
    assert served.stats() == BackendStats(steps=1, rows=2, tokens=2, reused=0)


def test_a_step_with_only_failures_returns_no_rows() -> None:
    served = backend(fail_token=0)
    served.submit([job([0], 50)])
    finished = served.step()
    assert finished.blocks == []
    assert len(finished.failures) == 1


def test_the_crash_token_ends_the_process() -> None:
    code = """
from lmpool.protocol.job import encode_prompt
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from tests.support.pool import until
served = SyntheticBackend(SyntheticSettings(vocab_size=50, crash_token=7))
for ids in ([1], [7]):
    prompt = encode_prompt(ids, vocab_size=50, max_tokens=5)
    served.submit([BackendJob(prompt.digest, prompt.ids)])
    served.step()
    print("survived", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (70, "survived\n", "")


def test_the_raise_token_breaks_its_step_and_no_other() -> None:
    served = backend(raise_token=7, vocab_size=50)
    served.submit([job([1], 50)])
    assert len(served.step().digests) == 1
    served.submit([job([2], 50), job([7], 50)])
    with pytest.raises(MemoryError, match="contains the token 7"):
        served.step()


def test_the_hang_token_holds_up_its_step_and_no_other() -> None:
    served = backend(hang_token=7, vocab_size=50)
    stepped: list[int] = []

    def step_twice() -> None:
        for ids in ([1], [7]):
            served.submit([job(ids, 50)])
            stepped.append(len(served.step().digests))

    thread = threading.Thread(target=step_twice, daemon=True)
    thread.start()
    until(lambda: stepped, "the first step has ended")
    thread.join(0.3)
    assert thread.is_alive()
    assert stepped == [1]


def test_rows_of_an_earlier_step_stay_as_they_are() -> None:
    served = backend()
    served.submit([job([1], 50)])
    first = served.step()
    before = first.blocks[0].encode(0)
    served.submit([job([2], 50)])
    served.step()
    assert first.blocks[0].encode(0) == before


def test_the_counters_add_up() -> None:
    served = backend()
    assert served.stats() == BackendStats()
    for _ in range(2):
        served.submit([job([1, 2, 3], 50), job([4], 50)])
        served.step()
    assert served.stats() == BackendStats(steps=2, rows=4, tokens=8, reused=0)


def test_a_closed_backend_holds_nothing() -> None:
    served = backend()
    served.submit([job([1], 50)])
    served.close()
    assert served.capacity() == 8


def test_the_info_says_that_rows_are_synthetic() -> None:
    info = backend(name="toy", seed=9, max_prompt_tokens=12, encoding="bf16").info
    assert (info.name, info.backend, info.vocab_size, info.max_prompt_tokens) == ("toy", "synthetic", 50, 12)
    assert "not computed by a model" in info.note


def test_the_fingerprint_is_that_of_the_rows() -> None:
    plain = backend().info.fingerprint
    same = [backend(**{name: value}) for name, value in {"name": "n", "encoding": "bf16", "max_batch": 9}.items()]
    other = [backend(seed=1), backend(vocab_size=51)]
    assert {served.info.fingerprint for served in same} == {plain}
    assert len({plain, *(served.info.fingerprint for served in other)}) == 3


# The simulated prefix cache


def pretended_ms(served: SyntheticBackend, monkeypatch: pytest.MonkeyPatch, jobs: list[BackendJob]) -> float:
    """The simulated milliseconds of a step over these jobs; the step does not sleep."""
    slept: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", slept.append)
        patched.setattr("time.monotonic", lambda: 0.0)
        served.submit(jobs)
        served.step()
    return 1000 * sum(slept)


def test_a_step_takes_longer_for_each_token_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    served = backend(step_ms=2.0, token_ms=0.5, max_batch=8)
    asked = [prompt_job(40), prompt_job(20, 2)]
    assert pretended_ms(served, monkeypatch, asked) == pytest.approx(2 + 0.5 * (40 + 5)), "16 in common, computed once"
    assert served.stats() == BackendStats(steps=1, rows=2, tokens=61, reused=16)
    grown = [prompt_job(41), prompt_job(40, 2), prompt_job(20, 2, 3, 4)]
    assert pretended_ms(served, monkeypatch, grown) == pytest.approx(2 + 0.5 * (1 + 1 + 2)), "the new tokens only"
    assert pretended_ms(served, monkeypatch, [prompt_job(40)]) == pytest.approx(2 + 0.5), "the last one in any case"
    assert pretended_ms(served, monkeypatch, [prompt_job(0, 9)]) == pytest.approx(2 + 0.5)
    assert served.stats() == BackendStats(steps=4, rows=7, tokens=61 + 105 + 40 + 1, reused=16 + 101 + 39)


def test_a_score_computes_all_scored_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    served = backend(token_ms=1.0)
    pretended_ms(served, monkeypatch, [prompt_job(40)])
    assert pretended_ms(
        served, monkeypatch, [prompt_job(40, positions=PositionsQuery.scores_from(30))]
    ) == pytest.approx(40 - 29)
    assert pretended_ms(
        served, monkeypatch, [prompt_job(40, 2, positions=PositionsQuery.scores_from(40))]
    ) == pytest.approx(2)


def test_adapters_and_fresh_prompts_share_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    served = backend(token_ms=1.0)
    assert pretended_ms(served, monkeypatch, [prompt_job(40, fresh=True)]) == pytest.approx(40)
    assert pretended_ms(served, monkeypatch, [prompt_job(40, adapter="a@1")]) == pytest.approx(40)
    assert pretended_ms(served, monkeypatch, [prompt_job(40, adapter="a@2")]) == pytest.approx(40)
    assert pretended_ms(served, monkeypatch, [prompt_job(40, fresh=True)]) == pytest.approx(40)
    assert pretended_ms(served, monkeypatch, [prompt_job(40)]) == pytest.approx(40)
    assert pretended_ms(served, monkeypatch, [prompt_job(41, adapter="a@1")]) == pytest.approx(1)


@pytest.mark.parametrize("without", [{"token_ms": 0.0}, {"kv_cache_tokens": 0}])
def test_without_token_time_or_cache_nothing_counts_as_reused(
    without: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = backend(**{"step_ms": 3.0, "token_ms": 1.0, **without})
    for _ in range(2):
        jobs = [prompt_job(40), prompt_job(40, 2)]
        assert pretended_ms(served, monkeypatch, jobs) == pytest.approx(3 + (81 if "kv_cache_tokens" in without else 0))
    assert served.stats() == BackendStats(steps=2, rows=4, tokens=162, reused=0)


def test_prompts_that_fail_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    served = backend(token_ms=1.0, fail_token=7)
    assert pretended_ms(served, monkeypatch, [prompt_job(40, 7), prompt_job(3)]) == pytest.approx(3)
    assert served.stats() == BackendStats(steps=1, rows=1, tokens=3, reused=0)


@st.composite
def families(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Prompts with their adapters; most prompts extend the beginning of an earlier prompt."""
    prompts: list[list[int]] = [[]]
    noted = []
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(prompts))
        kept = earlier[: draw(st.integers(0, len(earlier)))] if draw(st.booleans()) else earlier
        added = [draw(st.integers(0, 1))] * draw(st.sampled_from([1, 1, 2, 15, 16, 17, 40]))
        prompts.append(kept + added)
        noted.append((draw(st.sampled_from(["", "a@1"])), prompts[-1]))
    return noted


@given(families(), st.integers(1, 120))
def test_the_prefix_cache_has_noted_prompts_and_their_whole_blocks(
    noted: list[tuple[str, list[int]]], capacity: int
) -> None:
    whole, small = PrefixMemory(10**9), PrefixMemory(capacity)
    known: set[tuple[str, tuple[int, ...]]] = set()
    held = 0
    for adapter, ids in noted:
        encoded = job(ids, 50).ids
        longest = max((end for end in range(1, len(ids) + 1) if (adapter, tuple(ids[:end])) in known), default=0)
        assert whole.note(encoded, adapter) == longest
        assert small.note(encoded, adapter) <= longest
        held += len(ids) - longest
        assert whole.held == held
        assert small.held <= capacity
        known |= {
            (adapter, tuple(ids[:end]))
            for end in (*range(16, len(ids), 16), *range(len(ids) // 16 * 16 + 1, len(ids) + 1), len(ids))
        }


def test_the_prefix_cache_drops_the_least_recently_used_blocks() -> None:
    memory = PrefixMemory(100)
    first, second, third = (job([token] * 40, 50).ids for token in (1, 2, 3))
    for ids in (first, second):
        assert memory.note(ids) == 0
    assert memory.note(first) == 40
    assert memory.note(third) == 0
    assert memory.held <= 100
    assert memory.note(first) == 40
    assert memory.note(second) < 40, "its end went first"
    assert memory.note(job([5] * 150, 50).ids) == 0
    assert memory.note(job([5] * 200, 50).ids) == 96, "of a prompt that is too long the beginning stays"


# Vocabularies


@pytest.mark.parametrize("vocab_size", [*range(1, 20), 63, 64, 65, 66, 255, 256, 257, 258, 511, 512, 517, 49_152])
def test_a_vocabulary_of_every_size_begins_with_an_empty_token(vocab_size: int) -> None:
    tokens = synthetic_vocabulary(vocab_size).tokens
    assert len(tokens) == vocab_size
    assert tokens[0] == b""
    assert all(tokens[1:])


def test_a_vocabulary_looks_like_a_real_one() -> None:
    tokens = synthetic_vocabulary(50_000).tokens
    assert tokens[1:257] == [bytes([value]) for value in range(256)]
    words = tokens[257:]
    assert {len(word) for word in words} == set(range(2, 13))
    assert len(set(b"".join(words))) < 32
    assert 0.4 < sum(word.startswith(b" ") for word in words) / len(words) < 0.6
    assert not any(b" " in word[1:] for word in words)
    assert 0.02 < 1 - len(set(words)) / len(words) < 0.2, "some occur twice"
    known = set(words)
    begun = [word for word in known if any(word[:end] in known for end in range(3, len(word)))]
    assert len(begun) > len(known) / 2, "most begin with another one"


def test_the_largest_vocabulary_is_one_that_tries_take() -> None:
    vocabulary = synthetic_vocabulary(MAX_TOKENS)
    assert len(vocabulary) == MAX_TOKENS
    assert len(vocabulary.data) <= MAX_BYTES


@pytest.mark.parametrize("vocab_size", [0, -1, MAX_TOKENS + 1, 1.5, "64", None, True])
def test_a_vocabulary_of_no_possible_size_is_refused(vocab_size: Any) -> None:
    with pytest.raises(SettingsError, match=r"^vocab_size: .* from 1 to 4000000"):
        synthetic_vocabulary(vocab_size)


def test_vocabularies_are_pinned_across_releases() -> None:
    assert synthetic_vocabulary(70, seed=7).tokens[-3:] == [b"fbtgsy", b"pwigb", b"ynbma"]
    assert synthetic_vocabulary(131_072).digest == "ae37a88cb6e48583c05946304d808ef0"
    assert synthetic_vocabulary(50) != synthetic_vocabulary(50, seed=1)


def test_the_backend_serves_the_vocabulary_of_its_seed() -> None:
    assert backend(seed=3).vocabulary() == synthetic_vocabulary(50, seed=3)
    assert backend().device == "cpu"


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("name", value) for value in ("", "a{b", "a}b", "a\nb", "x" * 201, 5, None, b"m", "a@", "a@0", "a@12")),
        *(("vocab_size", value) for value in (0, -1, 4_000_001, 1.5, "64", None, True, float("nan"))),
        *(("seed", value) for value in (-1, 2**62 + 1, 0.5, "0", None, False)),
        *(("step_ms", value) for value in (-0.1, 600_001, float("nan"), float("inf"), "5", None, True)),
        *(("token_ms", value) for value in (-0.1, 600_001, float("nan"), float("inf"), "5", None, True)),
        *(("kv_cache_tokens", value) for value in (-1, 10**9 + 1, 2.0, "9", None, True)),
        *(("max_batch", value) for value in (0, 65_537, 2.0, None)),
        *(("max_prompt_tokens", value) for value in (0, 4_000_001, "9", None)),
        *(("encoding", value) for value in ("", "f64", "F32", "f16", None, 1)),
        *(("fail_token", value) for value in (-2, 1.0, "1", None, True)),
        *(("crash_token", value) for value in (-2, 1.0, "1", None, True)),
        *(("raise_token", value) for value in (-2, 1.0, "1", None, True)),
        *(("hang_token", value) for value in (-2, 1.0, "1", None, True)),
    ],
)
def test_a_malformed_setting_is_refused_with_its_name_and_value(field: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        SyntheticSettings(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{field}: {value!r} ")


def test_the_limits_of_settings_are_inclusive() -> None:
    low = SyntheticSettings(name="n", vocab_size=1, seed=0, step_ms=0, max_batch=1, max_prompt_tokens=1, fail_token=-1)
    high = SyntheticSettings(name="n" * 200, vocab_size=4_000_000, seed=2**62, step_ms=600_000.0, max_batch=65_536)
    assert (low.vocab_size, high.vocab_size) == (1, 4_000_000)
    low, high = (SyntheticSettings(token_ms=ms, kv_cache_tokens=n) for ms, n in ((0, 0), (600_000.0, 10**9)))
    assert (low.kv_cache_tokens, high.token_ms) == (0, 600_000)
    with pytest.raises(AttributeError):
        low.seed = 1  # type: ignore[misc]
