"""A small tokenizer: one token for every byte, and an end of sequence."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
SIZE = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {END: len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def write_tokenizer(folder: Path) -> str:
    """Save it; returns the folder as text."""
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
