"""The byte strings of a served model's tokens, from the tokenizer that lies beside its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lmpool.errors import InvalidVocabulary
from lmpool.protocol.model_info import ModelCard
from lmpool.vocabulary import Vocabulary, decode_vocab
from lmpool.workers.backends.places import hub_trouble
from lmpool.workers.backends.requirements import first_line

_logger = logging.getLogger(__name__)

# What missing files, unknown kinds, missing packages and broken files end in: transformers has no type for them.
_TROUBLE = (
    InvalidVocabulary, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError,
    AssertionError,
)  # fmt: skip


def read_vocabulary(card: ModelCard, revision: str | None, *, trust_remote_code: bool) -> Vocabulary | None:
    """The vocabulary of a served model; None, with a line in the log, where its tokenizer does not tell it.

    Args:
        card: names the checkpoint, and V.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the tokenizer.
    """
    try:
        return _read(card, revision, trust_remote_code)
    except _TROUBLE as error:
        _explain(card, error)
        return None
    except Exception as error:
        # So ends what fails in the package tokenizers, which is not written in Python.
        if type(error) is Exception:
            _explain(card, error)
            return None
        raise


def _read(card: ModelCard, revision: str | None, trust_remote_code: bool) -> Vocabulary:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        card.source,
        gguf_file=card.gguf_file or None,
        revision=revision,
        trust_remote_code=trust_remote_code,
        # Nobody must be asked for what is not in a folder, nor a hub that does not answer.
        local_files_only=Path(card.source).is_dir() or bool(hub_trouble()),
    )
    # For some kinds of models transformers makes up a tokenizer where there are no files of one.
    if len(tokenizer) <= len(getattr(tokenizer, "added_tokens_decoder", ())):
        raise InvalidVocabulary("it has no tokenizer")
    return Vocabulary(decode_vocab(tokenizer, vocab_size=card.vocab_size).tokens)


def _explain(card: ModelCard, error: Exception) -> None:
    _logger.warning(
        "the vocabulary of %s is not published: %s; who wants tries passes its byte strings to producer.trie",
        card.name,
        first_line(error),
    )
