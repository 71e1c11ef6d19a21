"""A small tokenizer for tests, with one token per byte and an end of sequence, and random rows for its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from genlm.backend.llm import AsyncLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmpool.synthetic import synthetic_row

END = "<end>"
SIZE = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {END: len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, bos_token=END
    )


def write_tokenizer(folder: Path) -> str:
    """Save the tokenizer; return the folder as text."""
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def expected(ids: list[int], seed: int = 0) -> torch.Tensor:
    """The row of a synthetic worker over the tokenizer's vocabulary."""
    return torch.from_numpy(synthetic_row(ids, vocab_size=SIZE, seed=seed))


class RowsOfThePool(AsyncLM):  # type: ignore[misc]
    """A language model of genlm-backend with the rows of a synthetic worker, without a pool."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)

    async def next_token_logprobs(self, token_ids: Any, lora_name: str | None = None) -> torch.Tensor:
        """The row of a prompt."""
        return expected(token_ids)

    def next_token_logprobs_sync(self, token_ids: Any, lora_name: str | None = None) -> torch.Tensor:
        """The row of a prompt."""
        return expected(token_ids)
