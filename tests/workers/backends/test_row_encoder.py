"""Rows that are computed in memory which is there for them are those that are computed anywhere else."""

from __future__ import annotations

import pytest
import torch

from lmpool.protocol.row import Encoding
from lmpool.workers.backends.row_encoder import RowEncoder
from tests.contract.driver import Slots

V = 300


def logits_of(dtype: torch.dtype, given: torch.dtype) -> torch.Tensor:
    """Logits of four prompts that survive a dtype, as a tensor of another one."""
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
def test_rows_are_the_same_in_memory_that_is_there_for_them(
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
    assert slots.have(found.block) is (not faulty), "the sound ones of several are brought together elsewhere"


def test_logits_that_do_not_survive_16_bits_are_computed_in_memory_for_float32() -> None:
    logits = logits_of(torch.float32, torch.float32)
    encoder, slots = RowEncoder(torch.bfloat16, lossy=False), Slots()
    encoder.new_rows = slots
    block = encoder.encode([bytes([row]) * 16 for row in range(4)], logits).block
    assert block is not None
    assert block.encoding is Encoding.F32
    assert slots.have(block)
    assert len(slots.given) == 1, "slots are taken once"
    assert torch.equal(torch.from_numpy(block.numbers), torch.log_softmax(logits, -1))
