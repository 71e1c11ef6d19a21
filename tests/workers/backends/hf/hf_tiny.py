"""Tiny models for tests of the hf backend, and the rows that transformers computes, to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmpool.protocol.job import encode_prompt
from lmpool.protocol.row import RowBlock, decode_row
from lmpool.trie import torch_device
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendJob, Finished
from tests.support.models.tiny_models import VOCAB_SIZE, write_model

Ids = tuple[int, ...]
Logprobs = NDArray[np.float32]


class Reference:
    """Rows that transformers computes: each prompt alone, as a whole and without a cache.

    Args:
        folder: folder of the model.
        attention: attention function of transformers; transformers' default, sdpa, ignores options of some models.
    """

    def __init__(self, folder: Path, attention: str = "eager") -> None:
        torch_device.settle()
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self.model = model.eval()
        self.row: Callable[[Ids], Logprobs] = functools.cache(self._row)

    @torch.inference_mode()
    def _row(self, prompt: Ids) -> Logprobs:
        logits: Tensor = self.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        row: Logprobs = torch.log_softmax(logits, dim=-1)[-1].numpy()
        return row

    def check(self, rows: dict[Ids, Logprobs]) -> None:
        assert rows
        for prompt, row in rows.items():
            np.testing.assert_allclose(row, self.row(prompt), atol=1e-4, rtol=0)


class Tiny:
    """Provides the folders of the tiny models and their reference rows, each computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reference: Callable[[str], Reference] = functools.cache(lambda kind: Reference(self.folder(kind)))

    def folder(self, kind: str) -> Path:
        folder = self._folder / kind
        return folder if folder.exists() else write_model(folder, kind)

    def backend(self, kind: str = "llama", **values: Any) -> HfBackend:
        return HfBackend(HfSettings(str(self.folder(kind)), device="cpu", **values))


def job(prompt: Sequence[int]) -> BackendJob:
    encoded = encode_prompt(list(prompt), vocab_size=2**31, max_tokens=2**20)
    return BackendJob(encoded.digest, encoded.ids)


def decode(blocks: Iterable[RowBlock]) -> dict[bytes, Logprobs]:
    """Decode the rows of blocks, as a client does."""
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), block.numbers.shape[1])
        for block in blocks
        for index, digest in enumerate(block.digests)
    }


def drain(backend: HfBackend) -> list[Finished]:
    """Run steps until the backend holds no prompt; returns the results of each step."""
    finished = []
    while backend.capacity() < 2 * backend.batch:
        finished.append(backend.step())
    return finished


def serve(backend: HfBackend, prompts: Iterable[Sequence[int]]) -> dict[Ids, Logprobs]:
    """Submit prompts together, and return prompt -> row."""
    names = {job(prompt).digest: tuple(prompt) for prompt in prompts}
    backend.submit([job(prompt) for prompt in names.values()])
    finished = drain(backend)
    assert [step.failures for step in finished if step.failures] == []
    rows = {names[digest]: row for step in finished for digest, row in decode(step.blocks).items()}
    assert set(rows) == set(names.values())
    return rows


def random_prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[Ids]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(lengths[0], lengths[1] + 1, count)
    return [tuple(generator.integers(0, VOCAB_SIZE, size).tolist()) for size in sizes]
