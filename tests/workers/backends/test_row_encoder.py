"""Rows are encoded to the same bytes in shared memory and elsewhere, and the order of equal top-k entries is fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmpool.protocol.query import NO_TOKEN, PositionsQuery, PositionValues, unpack_top
from lmpool.protocol.row import Encoding
from lmpool.rows.segment import make_segment
from lmpool.workers.backends import row_encoder
from lmpool.workers.backends.row_encoder import RowEncoder, values_at_positions
from tests.contract.driver import Slots

V = 300


def logits_of(dtype: torch.dtype, given: torch.dtype) -> torch.Tensor:
    """Logits of four prompts that `dtype` represents exactly, in a tensor of the dtype `given`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, V, generator=generator).mul_(5).to(dtype).to(given)


@pytest.mark.parametrize(
    ("dtype", "given", "encoding"),
    [
        (torch.float32, torch.float32, Encoding.F32),
        (torch.bfloat16, torch.float32, Encoding.BF16),
        (torch.bfloat16, torch.bfloat16, Encoding.BF16),
        (torch.float16, torch.float16, Encoding.F16),
        (torch.float16, torch.float32, Encoding.F16),
    ],
)
@pytest.mark.parametrize("faulty", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_rows_are_the_same_in_shared_memory(
    dtype: torch.dtype, given: torch.dtype, encoding: Encoding, faulty: tuple[int, ...]
) -> None:
    logits = logits_of(dtype, given)
    for row in faulty:
        logits[row, 7] = float("nan")
    digests = [bytes([row]) * 16 for row in range(4)]
    encoder, slots = RowEncoder(dtype, lossy=False), Slots()
    expected = encoder.encode(digests, logits.clone())
    encoder.new_rows = slots
    found = encoder.encode(digests, logits.clone())
    assert found.failures == expected.failures
    assert len(found.failures) == len(faulty)
    if expected.block is None:
        assert found.block is None
        return
    assert found.block is not None
    assert found.block.encoding is expected.block.encoding is encoding
    assert [found.block.encode(row) for row in range(4 - len(faulty))] == [
        expected.block.encode(row) for row in range(4 - len(faulty))
    ]
    assert slots.have(found.block) is (not faulty), "the sound rows of a batch with a failure are copied elsewhere"


def test_logits_that_16_bits_cannot_hold_use_shared_memory_for_float32() -> None:
    logits = logits_of(torch.float32, torch.float32)
    encoder, slots = RowEncoder(torch.bfloat16, lossy=False), Slots()
    encoder.new_rows = slots
    block = encoder.encode([bytes([row]) * 16 for row in range(4)], logits).block
    assert block is not None
    assert block.encoding is Encoding.F32
    assert slots.have(block)
    assert len(slots.given) == 1, "slots are taken once"
    assert torch.equal(torch.from_numpy(block.numbers), torch.log_softmax(logits, -1))


# A GPU, simulated on the CPU. The tests in tests/contract use a real GPU if there is one.


class Stream:
    """A stand-in for a CUDA stream; its waits do nothing, because operations on the CPU run in order."""

    def synchronize(self) -> None:
        pass


class Gpu:
    """A simulated GPU, which can write to shared memory if `can_write`.

    Attributes:
        registered: address and size of each registered memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, can_write: bool) -> None:
        self.registered: list[tuple[int, int]] = []
        self._can_write = can_write
        monkeypatch.setattr(row_encoder, "_map_to_gpu", self._map)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())

    def _map(self, address: int, size: int, device: torch.device) -> bool:
        self.registered.append((address, size))
        return self._can_write


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [(Encoding.F32, torch.float32), (Encoding.F16, torch.float16), (Encoding.BF16, torch.int16)],
)
def test_a_gpu_copies_rows_to_shared_memory_that_is_registered_once(
    monkeypatch: pytest.MonkeyPatch, encoding: Encoding, dtype: torch.dtype
) -> None:
    gpu, encoder, slots = Gpu(monkeypatch, can_write=True), RowEncoder(torch.float32, lossy=False), Slots()
    encoder.new_rows = slots
    for count in (1, 4):
        numbers = torch.randint(-30_000, 30_000, (count, V)).to(dtype)
        rows = encoder._copied_to_new_rows(numbers, encoding)
        assert rows is slots.given[-1]
        assert rows.dtype == encoding.dtype
        assert np.array_equal(rows.view(np.uint8), numbers.numpy().view(np.uint8))
    assert len(gpu.registered) == 1


def test_memory_that_a_gpu_cannot_write_to_is_not_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, encoder, slots = Gpu(monkeypatch, can_write=False), RowEncoder(torch.float32, lossy=False), Slots()
    encoder.new_rows = slots
    for _ in range(3):
        assert encoder._copied_to_new_rows(torch.zeros(2, V), Encoding.F32) is None
    assert len(gpu.registered) == len(slots.given) == 1


def test_the_whole_segment_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, encoder = Gpu(monkeypatch, can_write=True), RowEncoder(torch.float32, lossy=False)
    vocab_size, size = 2000, 1 << 20
    segment = make_segment("0" * 32, vocab_size, size, lambda: True)
    assert segment is not None
    try:
        encoder.new_rows = segment.new_rows
        for at in range(3):
            rows = encoder._copied_to_new_rows(torch.full((2, vocab_size), float(at)), Encoding.F32)
            assert rows is not None
            assert (rows == at).all()
            ((address, size_registered),) = gpu.registered
            assert size_registered == segment.size
            assert address <= rows.ctypes.data < rows.ctypes.data + rows.nbytes <= address + size_registered
    finally:
        segment.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 3, 11, 12])
@pytest.mark.parametrize(("vocab_size", "different"), [(12, 4), (300, 4), (300, 100)])
def test_of_equal_entries_the_lowest_ids_are_returned(
    dtype: torch.dtype, k: int, vocab_size: int, different: int
) -> None:
    """Top-k returns equal entries in the order of their ids, although torch.topk does not define their order."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(0, different, (200, vocab_size), generator=generator).to(dtype)
    rows = torch.log_softmax(logits.float(), dim=-1).numpy()
    log_z = np.zeros(len(rows), np.float32)
    some = PositionsQuery(0, max(1, k - 3)).among(np.array([0, 1, 2, 3, 5, 7, 8, 9, 11]))
    for query in (PositionsQuery(0, k), some):
        found = values_at_positions(logits, query, bytes(4 * len(logits)), 0)
        assert found is not None
        assert np.array_equal(found, query.of(rows, log_z, range(len(rows)), np.empty(0)))
    assert found is not None
    allowed = np.frombuffer(some.choices, "<u4").tolist()
    assert set(unpack_top(found, vocab_size, of_row=False).ids.ravel().tolist()) <= set(allowed)


@pytest.mark.parametrize("query", [PositionsQuery(0, values="logits"), PositionsQuery.scores_from(1, logits=True)])
def test_logits_that_are_no_distribution_give_no_values(query: PositionsQuery) -> None:
    logits, ids = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)), np.arange(1, 5, dtype="<u4").tobytes()
    found = values_at_positions(logits, query, ids, 0)
    assert found is not None
    assert np.array_equal(found[0], logits[0, 2:3] if query.next_token else logits[0])
    logits[1, 4] = torch.inf
    assert values_at_positions(logits, query, ids, 0) is None


@pytest.mark.parametrize("values", ["logprobs", "logits"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_all_values_of_a_position_agree_with_its_row(values: PositionValues, temperature: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits, ids = 9 * torch.randn(6, 40, generator=generator), np.arange(3, 10, dtype="<u4").tobytes()
    targets = np.array([[5, 39, NO_TOKEN], [NO_TOKEN] * 3, [1, 1, 2], [0, 1, 2], [7, 8, 9], [7, NO_TOKEN, NO_TOKEN]])
    packed = targets.astype("<u4").tobytes()
    query = PositionsQuery(
        0, 4, packed, 3, next_token=True, logz=True, tail=True, values=values, temperature=temperature
    )
    found = values_at_positions(logits[:4], query, ids, 0)
    later = values_at_positions(logits[4:], query, ids, 4)
    made = query.split(np.concatenate([np.asarray(found), np.asarray(later)]), range(6), 7, 40)
    exact = logits.double().numpy() / temperature
    log_z = np.logaddexp.reduce(exact, axis=1)
    entries = exact - (log_z[:, None] if values == "logprobs" else 0)
    assert made.top is not None
    for at in range(6):
        expected = np.append(entries[at], -np.inf)[np.minimum(targets[at], 40)]
        np.testing.assert_allclose(np.asarray(made.targets)[at], expected, atol=1e-5)
        named = [*made.top.ids[at], *targets[at][targets[at] < 40]]
        rest = np.delete(entries[at], named)
        np.testing.assert_allclose(np.asarray(made.tail)[at], np.logaddexp.reduce(rest), atol=1e-5)
        np.testing.assert_allclose(np.asarray(made.next_token)[at], entries[at, at + 4], atol=1e-5)
    np.testing.assert_allclose(np.asarray(made.logz), log_z, atol=1e-5)
    np.testing.assert_allclose(made.top.values, -np.sort(-entries, axis=1)[:, :4], atol=1e-5)
    # Workers without torch compute the same.
    log_z32 = np.logaddexp.reduce(logits.numpy(), axis=1)
    plain = query.of(logits.numpy(), log_z32, range(6), np.arange(4, 10))
    np.testing.assert_allclose(plain[:, 8:], np.concatenate([np.asarray(found), np.asarray(later)])[:, 8:], atol=1e-5)
