"""Reads the vocabulary and the tokenizer of a checkpoint, which the worker publishes for clients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from lmpool.errors import InvalidVocabulary, first_line
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.tokenizer import PackedTokenizer, check_tokenizer
from lmpool.vocabulary import Vocabulary, decode_vocab
from lmpool.workers.backends.checkpoint import hub_problem
from lmpool.workers.backends.settings import ModelSettings

# Exceptions of transformers for missing or broken files, unknown tokenizers and missing packages; no common type.
_TOKENIZER_ERRORS = (
    InvalidVocabulary, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError,
    AssertionError,
)  # fmt: skip

# A tokenizer is published only if it encodes these texts and the special tokens to the same ids as transformers.
_PROBES = (
    "Hello, world! It's 12345.67", " leading and  double  spaces \t\n\n\tend ", "naïve Ünïcödé — “quotes” … ﬁ ½",
    "中文字符 日本語 한국어 العربية हिन्दी", "😀👩‍👩‍👧 \u200b\x00\x7f", "def f(x):\n    return x  # <0x0A> ##ing ▁", "",
)  # fmt: skip
_MAX_SPECIAL = 16  # Max special tokens that the probe texts include.

_log = logging.getLogger(__name__)


class Texts(NamedTuple):
    """The vocabulary and the tokenizer of a checkpoint; each is None if it is missing or clients cannot use it."""

    vocabulary: Vocabulary | None
    tokenizer: PackedTokenizer | None


class TellsTexts:
    """Base class of backends that serve a checkpoint: it provides the checkpoint's vocabulary and tokenizer."""

    _info: ModelInfo
    _settings: ModelSettings
    _tokenizer: PackedTokenizer | None = None

    @property
    def info(self) -> ModelInfo:
        """Name, vocabulary size and other facts of the served model."""
        return self._info

    def vocabulary(self) -> Vocabulary | None:
        """The byte strings of the model's tokens; None if the model's tokenizer does not provide them."""
        settings = self._settings
        texts = read_texts(self._info, settings.revision, trust_remote_code=settings.trust_remote_code)
        self._tokenizer = texts.tokenizer
        return texts.vocabulary

    def tokenizer(self) -> PackedTokenizer | None:
        """The model's tokenizer; None if it cannot be published. Call `vocabulary` first, and this method once."""
        # Keep no reference to the tokenizer: it takes many megabytes, and is published only once.
        tokenizer, self._tokenizer = self._tokenizer, None
        return tokenizer


def read_texts(info: ModelInfo, revision: str | None, *, trust_remote_code: bool) -> Texts:
    """Read the tokenizer of a checkpoint. If the vocabulary or the tokenizer is missing, log the reason.

    Args:
        info: the model's info; only the source of the checkpoint and the vocabulary size are used.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the tokenizer.
    """
    vocabulary = tokenizer = None
    missing = "the vocabulary of %s is not published: %s; for a trie, a client passes its byte strings to producer.trie"
    try:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(
            info.source,
            gguf_file=info.gguf_file or None,
            revision=revision,
            trust_remote_code=trust_remote_code,
            # Do not search the hub for a file that is missing in a local folder.
            local_files_only=Path(info.source).is_dir() or bool(hub_problem()),
        )
        # Without tokenizer files, transformers makes up a tokenizer of special tokens for some architectures.
        if len(loaded) <= len(getattr(loaded, "added_tokens_decoder", ())):
            raise InvalidVocabulary("it has no tokenizer")
        vocabulary = Vocabulary(decode_vocab(loaded, vocab_size=info.vocab_size).tokens)
        missing = "the tokenizer of %s is not published: %s; clients load it by transformers, or pass token ids"
        tokenizer = _pack(loaded)
    except Exception as error:
        # The Rust package `tokenizers` raises plain `Exception`, not a subclass.
        if type(error) is Exception or isinstance(error, _TOKENIZER_ERRORS):
            _log.warning(missing, info.name, first_line(error))
            return Texts(vocabulary, tokenizer)
        raise
    return Texts(vocabulary, tokenizer)


def _pack(tokenizer: Any) -> PackedTokenizer:
    """The `tokenizer.json` of a transformers tokenizer, for clients; a slow (Python) tokenizer is converted first."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        from transformers.convert_slow_tokenizer import convert_slow_tokenizer

        backend = convert_slow_tokenizer(tokenizer)
    text = backend.to_str()
    check_tokenizer(text)
    read = type(backend).from_str(text)
    read.no_truncation()
    read.no_padding()
    special = " ".join(getattr(tokenizer, "all_special_tokens", [])[:_MAX_SPECIAL])
    for probe in (*_PROBES, special, f"a{special}b"):
        for adds in (True, False):
            ids = read.encode(probe, add_special_tokens=adds).ids
            if ids != tokenizer.encode(probe, add_special_tokens=adds):
                raise InvalidVocabulary(f"as tokenizer.json it makes other ids of {probe!r}")
    return PackedTokenizer.pack(text)
