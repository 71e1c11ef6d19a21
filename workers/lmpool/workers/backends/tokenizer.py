"""What a checkpoint's tokenizer tells the pool: the bytes of its tokens, and how text becomes ids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from lmpool.errors import InvalidVocabulary
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.tokenizer import PackedTokenizer, check_tokenizer
from lmpool.vocabulary import Vocabulary, decode_vocab
from lmpool.workers.backends.checkpoint import hub_trouble
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.settings import ModelSettings

# What missing files, unknown kinds, missing packages and broken files end in: transformers has no type for them.
_TOKENIZER_ERRORS = (
    InvalidVocabulary, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError,
    AssertionError,
)  # fmt: skip

# What is published must make the same ids of these, and of the special tokens among them, as transformers does.
_PROBES = (
    "Hello, world! It's 12345.67", " leading and  double  spaces \t\n\n\tend ", "naïve Ünïcödé — “quotes” … ﬁ ½",
    "中文字符 日本語 한국어 العربية हिन्दी", "😀👩‍👩‍👧 \u200b\x00\x7f", "def f(x):\n    return x  # <0x0A> ##ing ▁", "",
)  # fmt: skip
_MAX_SPECIAL = 16

_log = logging.getLogger(__name__)


class Texts(NamedTuple):
    """What the pool is told of a checkpoint's texts; None where its tokenizer does not tell it."""

    vocabulary: Vocabulary | None
    tokenizer: PackedTokenizer | None


class TellsTexts:
    """What a backend inherits that serves a checkpoint: its tokenizer is read once for both of these, in this order."""

    _info: ModelInfo
    _settings: ModelSettings
    _texts: Texts | None = None

    def vocabulary(self) -> Vocabulary | None:
        """The byte strings of the model's tokens; None where its tokenizer does not tell them."""
        self._texts = self._read_texts()
        return self._texts.vocabulary

    def tokenizer(self) -> PackedTokenizer | None:
        """The model's tokenizer; None where it has none that travels."""
        # Many megabytes, which nobody needs once they are published.
        texts, self._texts = self._texts or self._read_texts(), None
        return texts.tokenizer

    def _read_texts(self) -> Texts:
        settings = self._settings
        return read_texts(self._info, settings.revision, trust_remote_code=settings.trust_remote_code)


def read_texts(info: ModelInfo, revision: str | None, *, trust_remote_code: bool) -> Texts:
    """What a checkpoint's tokenizer tells; a line in the log for each thing that it does not.

    Args:
        info: names the checkpoint, and V.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the tokenizer.
    """
    vocabulary = tokenizer = None
    missing = "the vocabulary of %s is not published: %s; who wants tries passes its byte strings to producer.trie"
    try:
        loaded = _load(info, revision, trust_remote_code)
        vocabulary = Vocabulary(decode_vocab(loaded, vocab_size=info.vocab_size).tokens)
        missing = "the tokenizer of %s is not published: %s; who has text loads it by transformers, or passes token ids"
        tokenizer = _pack(loaded)
    except _TOKENIZER_ERRORS as error:
        _log.warning(missing, info.name, first_line(error))
    except Exception as error:
        # So ends what fails in the package tokenizers, which is not written in Python.
        if type(error) is Exception:
            _log.warning(missing, info.name, first_line(error))
            return Texts(vocabulary, tokenizer)
        raise
    return Texts(vocabulary, tokenizer)


def _load(info: ModelInfo, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        info.source,
        gguf_file=info.gguf_file or None,
        revision=revision,
        trust_remote_code=trust_remote_code,
        # Nobody must be asked for what is not in a folder, nor a hub that does not answer.
        local_files_only=Path(info.source).is_dir() or bool(hub_trouble()),
    )
    # For some kinds of models transformers makes up a tokenizer where there are no files of one.
    if len(tokenizer) <= len(getattr(tokenizer, "added_tokens_decoder", ())):
        raise InvalidVocabulary("it has no tokenizer")
    return tokenizer


def _pack(tokenizer: Any) -> PackedTokenizer:
    """A tokenizer of transformers as its `tokenizer.json`; a slow one is converted.

    Raises:
        InvalidVocabulary: it has no such form, one that makes other ids, or one that clients refuse.
    """
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
