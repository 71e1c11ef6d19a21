"""Every backend in bfloat16: its rows are the engine's own logits, and it can be closed and opened again."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from lmpool.protocol.row import Encoding, RowBlock, no_new_rows
from lmpool.trie import torch_device
from lmpool.workers.execution.contract import WritesInPlace
from tests.contract.driver import Opened, Slots, prompt
from tests.contract.subjects import Subject


@pytest.fixture(scope="module")
def narrow(subject: Subject, model_folder: Path, adapter_folders: dict[str, Path]) -> Opened:
    """The subject's backend in bfloat16, not yet opened: each test opens and closes it."""
    return Opened(subject, model_folder, "bfloat16", adapter_folders)


def test_a_bfloat16_row_is_the_engines_own_logits(narrow: Opened, draw: random.Random) -> None:
    with narrow:
        info = narrow.backend.info
        assert info.encoding == ("bf16" if narrow.subject.narrow else "f32")
        if not narrow.subject.has_model:
            return
        spy = narrow.subject.spy or (lambda _: nullcontext([]))
        ids = prompt(draw, 30)
        for at, new in enumerate((1, 1, 3, 2, 1)):
            slots = Slots()
            if is_in_place := at % 2 == 1 and isinstance(narrow.backend, WritesInPlace):
                slots.lend(narrow.backend)
            with spy(narrow.backend) as seen:
                job = narrow.job(ids)
                narrow.backend.submit([job])
                blocks: list[RowBlock] = []
                while not blocks:
                    blocks = narrow.backend.step().blocks
            assert blocks[0].encoding is Encoding.BF16
            assert slots.have(blocks[0]) is is_in_place
            if isinstance(narrow.backend, WritesInPlace):
                narrow.backend.write_to(no_new_rows)
            logits = torch.from_numpy(blocks[0].numbers[0].view(np.int16)).view(torch.bfloat16)
            if narrow.subject.spy is not None:
                assert torch.equal(logits, seen[-1][-1].to(torch.bfloat16))
            assert blocks[0].log_z is not None
            # Allow one rounding error of logZ in float32.
            assert abs(blocks[0].log_z[0] - torch.logsumexp(logits.double(), -1)) < 2e-6
            ids = [*ids, *prompt(draw, new)]


def test_a_backend_can_be_closed_and_opened_again(narrow: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, length) for length in (4, 40)]
    rows = []
    fingerprints = set()
    for _ in range(2):
        with narrow:
            fingerprints.add(narrow.backend.info.fingerprint)
            rows.append(narrow.ask(prompts))
    assert len(fingerprints) == 1
    assert all(np.array_equal(first, second) for first, second in zip(*rows, strict=True))


def test_no_model_is_loaded_before_vector_functions_are_settled(
    narrow: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not narrow.subject.has_model:
        return

    class Settled(Exception):
        pass

    def settle() -> None:
        raise Settled

    monkeypatch.setattr(torch_device, "settle", settle)
    with pytest.raises(Settled), narrow:
        pass
