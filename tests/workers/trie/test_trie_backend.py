"""The backend of a trie worker: jobs whose inputs are complete, and the backend's caches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmpool.protocol.query import OPS, Op, Selection, TrieQuery
from lmpool.protocol.row import Values, VectorBlock, decode_row
from lmpool.settings import count_cores
from lmpool.trie.kernels import Kernels
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.trie import ByteLRU, LazyTrie, TrieBackend, TrieInput, TrieSettings, ValuesCache, answer
from tests.support.trie_answers import answers, assert_right, draw_weights, words
from tests.support.tries import bytes_held

V = 200
FP = "f" * 32


def lazy_trie(seed: int = 40, kept: int = 2**20) -> LazyTrie:
    return LazyTrie(Vocabulary(words(seed, V)), "cpu", ValuesCache(kept))


def job(
    trie: LazyTrie,
    vector: Values | None,
    op: Op = "sum",
    select: Selection = "inner",
    nodes: Any = (),
    rows: str = "",
    source: bytes = b"s" * 16,
    values: Values | None = None,
) -> TrieInput:
    packed = np.array(nodes, "<i4").tobytes()
    return TrieInput(TrieQuery(op, trie.vocabulary.digest, select, packed, rows, source), trie, vector, values)


def vectors(block: VectorBlock | None) -> dict[bytes, Values]:
    """Digest of each job -> its values, as decoded from the wire."""
    assert block is not None
    values = {}
    for digest, vector, encoded in zip(block.digests, block.vectors, block.encoded(), strict=True):
        values[digest] = decode_row(np.frombuffer(bytearray(b"".join(encoded)), np.uint8), len(vector))
    return values


def test_a_mixed_batch_gives_each_job_its_own_values() -> None:
    tries = [lazy_trie(40), lazy_trie(41)]
    jobs, exact = {}, {}
    for number, (trie, op, by_row) in enumerate(product(tries, OPS, (False, True))):
        for turn in range(3):
            name = bytes([number, turn]) * 8
            vector = draw_weights(number * 3 + turn, V, "logsumexp" if by_row else op)
            jobs[name] = job(trie, vector, op, "nodes", [0, 5, 2], FP if by_row else "", name)
            weights = np.exp(vector) if by_row and op != "logsumexp" else vector
            exact[name] = answers(tuple(trie.vocabulary.tokens)).of(op, weights)[[0, 5, 2]]
    block, failures = answer(jobs)
    assert not failures
    for name, got in vectors(block).items():
        assert_right(got, exact[name])
    assert set(vectors(block)) == set(jobs)


def test_each_selection_returns_its_values() -> None:
    trie, ws = lazy_trie(), draw_weights(1, V)
    expected, (built, _) = answers(tuple(trie.vocabulary.tokens)), trie.open()
    exact, leaf = expected.of("sum", ws), len(expected.node) - 1
    wanted: dict[bytes, TrieInput] = {
        b"inner": job(trie, ws),
        b"values": job(trie, ws, select="values"),
        b"nodes": job(trie, ws, select="nodes", nodes=[3, 3, 0]),
        b"none": job(trie, ws, select="nodes"),
        b"under": job(trie, ws, select="under", nodes=[0]),
        b"leaf": job(trie, ws, select="under", nodes=[leaf]),
    }
    block, failures = answer(wanted)
    assert not failures
    values = vectors(block)
    assert_right(built.expand(values[b"inner"], ws), exact)
    assert np.array_equal(values[b"values"], np.concatenate((values[b"inner"], ws)))
    assert_right(values[b"nodes"], exact[[3, 3, 0]])
    assert_right(values[b"under"], exact[expected.children[0]])
    assert values[b"none"].size == values[b"leaf"].size == 0


def test_wrong_input_fails_its_own_job_alone() -> None:
    trie, ws = lazy_trie(), draw_weights(2, V)
    broken = ws.copy()
    broken[7] = np.nan
    count = len(answers(tuple(trie.vocabulary.tokens)).node)
    block, failures = answer(
        {
            b"fine": job(trie, ws, select="nodes", nodes=[0]),
            b"nan": job(trie, broken, select="nodes", nodes=[0]),
            b"range": job(trie, ws, select="nodes", nodes=[count]),
            b"under": job(trie, ws, select="under", nodes=[-1]),
            b"max": job(trie, broken, "max"),
        }
    )
    assert_right(vectors(block)[b"fine"], [1.0])
    assert set(failures) == {b"nan", b"range", b"under", b"max"}
    assert failures[b"nan"].startswith("InvalidWeights: weight 7")
    assert "NaN" in failures[b"max"]
    assert failures[b"range"] == f"UnknownNode: node {count} is out of range: nodes go from 0 to {count - 1}"
    assert "node -1" in failures[b"under"]


def test_a_batch_in_which_all_fails_has_no_answers() -> None:
    block, failures = answer({b"a": job(lazy_trie(), np.full(V, np.nan, np.float32))})
    assert block is None
    assert set(failures) == {b"a"}


def test_a_trie_that_cannot_be_opened_fails_its_own_jobs_alone() -> None:
    fine, ws = lazy_trie(), draw_weights(2, V)
    lost = LazyTrie(Vocabulary(words(41, V)), "nowhere", ValuesCache(0))
    jobs = {b"fine": job(fine, ws), b"one": job(lost, ws), b"two": job(lost, 2 * ws)}
    block, failures = answer(jobs)
    assert set(vectors(block)) == {b"fine"}
    assert set(failures) == {b"one", b"two"}
    for text in failures.values():
        assert text.startswith("SettingsError: device: torch cannot use 'nowhere'")


class Small:
    """Kernels on a device with memory for at most `room` rows; for more rows they raise `error`."""

    def __init__(self, kernels: Kernels, room: int, error: type[RuntimeError]) -> None:
        self.kernels, self.room, self.error = kernels, room, error
        self.tried: list[int] = []

    def inner(self, op: Op, weights: Values) -> Values:
        self.tried.append(len(weights))
        if len(weights) > self.room:
            raise self.error("no room")
        return self.kernels.inner(op, weights)


def on_small_device(
    monkeypatch: pytest.MonkeyPatch, room: int, error: type[RuntimeError] = torch.OutOfMemoryError
) -> tuple[LazyTrie, Small]:
    trie = lazy_trie()
    small = Small(trie.open()[1], room, error)
    monkeypatch.setattr(trie, "_opened", (trie.open()[0], small))
    return trie, small


def test_a_batch_that_does_not_fit_the_device_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, small = on_small_device(monkeypatch, 2)
    wanted = {bytes([n]) * 16: job(trie, n * draw_weights(n, V), select="nodes", nodes=[0]) for n in range(1, 6)}
    block, failures = answer(wanted)
    assert not failures
    assert small.tried == [5, 3, 2, 1, 2]
    for name, got in vectors(block).items():
        assert_right(got, [name[0]])


def test_a_row_that_does_not_fit_the_device_fails_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, _ = on_small_device(monkeypatch, 0)
    block, failures = answer({name: job(trie, draw_weights(1, V)) for name in (b"a", b"b")})
    assert block is None
    assert set(failures) == {b"a", b"b"}
    assert failures[b"a"].startswith("OutOfMemoryError: the device has run out of memory, a single row of 200 weights")


def test_a_trie_that_does_not_fit_the_device_fails_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("no room")

    trie = lazy_trie()
    monkeypatch.setattr(trie, "open", full)
    _, failures = answer({b"a": job(trie, draw_weights(1, V))})
    assert failures[b"a"].startswith("OutOfMemoryError: the device has run out of memory, the trie does not fit")


def test_another_error_fails_the_jobs_that_cause_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, small = on_small_device(monkeypatch, 1, RuntimeError)
    block, failures = answer({name: job(trie, draw_weights(1, V)) for name in (b"a", b"b")})
    assert set(vectors(block)) == {b"a", b"b"}
    assert not failures
    assert small.tried == [2, 1, 1]
    small.room = 0
    block, failures = answer({name: job(trie, draw_weights(1, V)) for name in (b"a", b"b")})
    assert block is None
    assert failures == dict.fromkeys((b"a", b"b"), "RuntimeError: no room")


def test_an_error_of_the_device_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class AcceleratorError(RuntimeError):
        """An exception with the name of `torch.AcceleratorError`."""

    trie, small = on_small_device(monkeypatch, 0, AcceleratorError)
    with pytest.raises(AcceleratorError, match="no room"):
        answer({name: job(trie, draw_weights(1, V)) for name in (b"a", b"b")})
    assert small.tried == [2]


def test_cached_values_do_not_keep_their_batch_alive() -> None:
    trie = lazy_trie()
    answer({bytes([n]) * 16: job(trie, draw_weights(n, V), "max", "values", (), FP, bytes([n]) * 16) for n in range(2)})
    kept = trie.values.get(("max", FP, b"\x01" * 16, trie.vocabulary.digest))
    assert kept is not None
    assert kept.base is None


def test_a_row_is_swept_once_and_its_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, row = lazy_trie(), draw_weights(3, V, "logsumexp")
    kernels = trie.open()[1]
    swept: list[int] = []

    class Counting:
        """Kernels that count the rows that they compute."""

        def inner(self, op: Op, weights: Values) -> Values:
            swept.append(len(weights))
            return kernels.inner(op, weights)

    monkeypatch.setattr(trie, "_opened", (trie.open()[0], Counting()))
    wanted = {bytes([node]) * 16: job(trie, row, "sum", "nodes", [node], FP, b"r" * 16) for node in range(8)}
    block, _ = answer(wanted)
    exact = answers(tuple(trie.vocabulary.tokens)).of("sum", np.exp(row))
    for name, got in vectors(block).items():
        assert_right(got, exact[[name[0]]])
    assert swept == [1]
    kept = trie.values.get(("sum", FP, b"r" * 16, trie.vocabulary.digest))
    assert kept is not None
    again, _ = answer({b"x": job(trie, None, "sum", "under", [0], FP, b"r" * 16, kept)})
    assert_right(vectors(again)[b"x"], exact[answers(tuple(trie.vocabulary.tokens)).children[0]])
    assert swept == [1]


def test_weights_of_one_name_in_two_jobs_are_not_taken_for_one_another() -> None:
    trie = lazy_trie()
    first, second = draw_weights(4, V), 2 * draw_weights(5, V)
    block, _ = answer(
        {b"a": job(trie, first, select="nodes", nodes=[0]), b"b": job(trie, second, select="nodes", nodes=[0])}
    )
    values = vectors(block)
    assert_right(values[b"a"], [1.0])
    assert_right(values[b"b"], [2.0])


def test_the_backend_answers_a_batch_a_step_and_counts() -> None:
    backend, trie = TrieBackend(TrieSettings(max_batch=4)), lazy_trie()
    inputs = {bytes([n]) * 16: job(trie, draw_weights(n, V), select="nodes", nodes=[0]) for n in range(5)}
    inputs[b"bad!" * 4] = job(trie, np.full(V, np.nan, np.float32))
    backend.submit(BackendJob(name, b"", "", trie_input) for name, trie_input in inputs.items())
    assert backend.capacity() == 2
    first = backend.step()
    backend.abort([b"\x04" * 16, b"unknown"])
    second = backend.step()
    assert len(first.digests) == 4
    assert second.digests == [b"bad!" * 4]
    assert second.answers is None
    assert backend.stats()._asdict() == {"steps": 2, "rows": 4, "tokens": 0, "reused": 0}
    assert backend.capacity() == 8


def sized(nbytes: int) -> NDArray[np.uint8]:
    """An array that reports `nbytes` bytes of memory, and uses nearly none."""
    return np.broadcast_to(np.uint8(0), nbytes)


def test_a_cache_evicts_the_least_recently_used_value() -> None:
    cache: ByteLRU[str, NDArray[np.uint8]] = ByteLRU(100)
    for name in "abc":
        cache.put(name, sized(33))
    assert cache.get("a") is not None
    cache.put("d", sized(33))
    assert [name for name in "abcd" if cache.get(name) is not None] == ["a", "c", "d"]


def test_a_cache_counts_a_value_that_is_put_twice_once() -> None:
    cache: ByteLRU[str, NDArray[np.uint8]] = ByteLRU(100)
    for _ in range(10):
        cache.put("a", sized(60))
    cache.put("b", sized(40))
    assert cache.get("a") is not None
    cache.put("a", sized(61))
    assert cache.get("b") is None


def test_a_cache_keeps_the_newest_value_of_any_size() -> None:
    cache: ByteLRU[str, NDArray[np.uint8]] = ByteLRU(0)
    cache.put("a", sized(10))
    cache.put("b", sized(10**12))
    assert cache.get("a") is None
    assert cache.get("b") is not None
    cache.put("c", sized(1))
    assert cache.get("b") is None


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize(
    "tokens",
    [words(42, 50), words(43, 5000), [b"a"], [b"ab", b"ab"], [b"a" * n for n in range(300)]],
    ids=["few", "many", "one", "twins", "nested"],
)
def test_a_trie_and_its_kernels_stay_below_the_size_in_the_cache(tokens: Sequence[bytes], device: str) -> None:
    lazy = LazyTrie(Vocabulary(tokens), device, ValuesCache(0))
    trie, kernels = lazy.open()
    assert trie.n_inner <= trie.n_tokens
    weights = np.zeros((32 * count_cores(), trie.n_tokens), np.float32)
    if device == "cpu":
        for _ in range(3):
            kernels.inner("logsumexp", weights)
    assert trie.nbytes + lazy.vocabulary.nbytes + bytes_held(kernels) <= lazy.nbytes + 4096
