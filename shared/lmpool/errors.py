"""Every exception that lmpool raises, as one tree.

    LMPoolError
    ├── InvalidPrompt (ValueError)      the prompt itself is at fault; nothing was sent
    │   ├── NotTokenIds (TypeError)     floats, bools, strings, nested lists, arrays that are not 1-D
    │   ├── EmptyPrompt                 no ids
    │   ├── TokenOutOfRange (IndexError)  an id below 0 or not below V
    │   └── PromptTooLong               more ids than the model takes
    ├── TrieError (ValueError)          what is asked of a trie is at fault; nothing was computed
    │   ├── InvalidVocabulary           not byte strings, none at all, or over a limit
    │   ├── UnknownVocabulary (LookupError)  the model publishes none, or the pool does not know it
    │   ├── InvalidWeights              weights of the wrong length or dtype, or with NaN among them
    │   └── UnknownNode (LookupError)   a node or prefix that the trie does not have
    ├── SettingsError (ValueError)      an unknown or malformed setting, with the field's name
    ├── ServerError (ConnectionError)   Redis cannot be used
    │   ├── ServerUnreachable           nobody answers at that address
    │   └── AuthenticationFailed        wrong user or password, or the ACL forbids it
    ├── ModelError (LookupError)
    │   ├── UnknownModel                no model of that name is served, or none at all
    │   ├── AmbiguousModel              several models are served and none was named
    │   ├── UnknownAdapter              the model has no adapter of that name
    │   ├── UnknownTokenizer            its workers publish no tokenizer, or the pool has it no longer
    │   ├── AdapterRefused              a worker cannot load the adapter
    │   └── ModelMismatch               a worker's info differs from the info of the model it joins
    ├── RequestFailed                   an accepted request ended without a row
    │   ├── DeadlineExceeded (TimeoutError)
    │   │   ├── NoWorker                no live worker serves the model
    │   │   └── QueueFull               the model's queue stayed at its limit
    │   ├── WorkerError                 the backend failed on this prompt
    │   ├── SourceMissing               the row or the weights that a trie job names are not in the cache
    │   ├── AdapterChanged              the adapter that a job names is not in service any more
    │   ├── UnknownTokenSet (LookupError)
    │   │                               the pool does not know a set of tokens of that name
    │   ├── NoProbability (ValueError)  no token that is allowed can be drawn
    │   ├── QueueCleared                an operator has taken the prompt out of the queue
    │   ├── CorruptRow                  what the cache holds is not a row of this model
    │   └── ProducerClosed              the producer was closed while the request was under way
    ├── BatchError                      a file could not be answered to its end; what is done stays
    │   └── BatchRefused                its output belongs to another model, input or options, or another run has it
    └── ProtocolError (ValueError)      a message or row does not decode

Messages name the offending value, the limit and what to do.

Messages may quote what somebody else has written: `printable` makes it fit to be shown.
"""

from __future__ import annotations

import json
import logging
from typing import Any, TypeVar

_E = TypeVar("_E", bound=BaseException)


def printable(text: str, keep: str = "") -> str:
    r"""A text with an escape, such as `\x1b` or `\u202e`, for each character that is not seen.

    Those are control characters, line breaks, what changes the direction of a text, spaces but for " ", surrogates.

    Args:
        text: any text.
        keep: characters that stay as they are all the same.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def first_line(error: BaseException) -> str:
    """The message of an exception as one line of at most 300 characters; its type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"KeyError: {text}"  # Its message is the key alone.
    return text if len(text) <= 300 else text[:297] + "..."


def to_json(value: Any, **options: Any) -> str:
    """A value as JSON in ASCII, as `json.dumps` makes it; no control character is left in it."""
    return json.dumps(value, **options).replace("\x7f", r"\u007f")


class LogFormatter(logging.Formatter):
    """Formats entries whose first line alone begins at the margin: no text in one passes for an entry of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry, with its traceback if it has one."""
        return printable(super().format(record), keep="\n").replace("\n", "\n  ")


class LMPoolError(Exception):
    """Base of all exceptions of this package.

    Attributes:
        exit_code: what a command exits with that ends in it.
    """

    exit_code = 2

    def __str__(self) -> str:
        # Names and reasons in it may be somebody else's, and tracebacks end in terminals.
        return printable(super().__str__(), keep="\n")


class InvalidPrompt(LMPoolError, ValueError):
    """The prompt is not something the model can be asked."""


class NotTokenIds(InvalidPrompt, TypeError):
    """The prompt is not a flat sequence of integers."""


class EmptyPrompt(InvalidPrompt):
    """The prompt has no ids."""


class TokenOutOfRange(InvalidPrompt, IndexError):
    """An id is negative or not below the model's vocabulary size."""


class PromptTooLong(InvalidPrompt):
    """The prompt has more ids than the model takes."""


class TrieError(LMPoolError, ValueError):
    """What is asked of a trie cannot be answered."""


class InvalidVocabulary(TrieError):
    """The vocabulary is not a list of byte strings within the limits."""


class UnknownVocabulary(TrieError, LookupError):
    """Nobody has published the vocabulary."""


class InvalidWeights(TrieError):
    """The weights do not fit the vocabulary, or are not numbers."""


class UnknownNode(TrieError, LookupError):
    """The trie has no such node or prefix."""


class SettingsError(LMPoolError, ValueError):
    """A setting is unknown or malformed."""


class ServerError(LMPoolError, ConnectionError):
    """The Redis server cannot be used."""


class ServerUnreachable(ServerError):
    """Nobody answers at the server's address."""


class AuthenticationFailed(ServerError):
    """The server refuses the user, the password or a command."""


class ModelError(LMPoolError, LookupError):
    """The model cannot be served or joined."""


class UnknownModel(ModelError):
    """No model of that name is served.

    Attributes:
        is_loading: whether a worker is loading it just now.
        has_others: whether other models are served.
    """

    is_loading = has_others = False


class AmbiguousModel(ModelError):
    """Several models are served and none was named."""


class UnknownAdapter(ModelError):
    """The model has no adapter of that name."""


class UnknownTokenizer(ModelError):
    """The model's workers publish no tokenizer, or the pool has it no longer."""


class AdapterRefused(ModelError):
    """A worker cannot load the adapter; the one that had its name stays in service."""


class ModelMismatch(ModelError):
    """A worker's model info differs from the info of the model that it joins."""


class RequestFailed(LMPoolError):
    """An accepted request ended without a row."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """The row did not come before the request's deadline."""


class NoWorker(DeadlineExceeded):
    """No live worker serves the model."""


class QueueFull(DeadlineExceeded):
    """The model's queue stayed at its limit."""


class WorkerError(RequestFailed):
    """The backend failed on this prompt."""


class SourceMissing(RequestFailed):
    """The row or the weights that a trie job names are not in the cache, or no longer."""


class AdapterChanged(RequestFailed):
    """The adapter that a job names is not in service any more; the client asks for the one that is."""


class UnknownTokenSet(RequestFailed, LookupError):
    """Nobody has told the pool what tokens a set of that name has, or it has forgotten them."""


class NoProbability(RequestFailed, ValueError):
    """None of the tokens that are allowed has a probability above 0, so none can be drawn."""


class QueueCleared(RequestFailed):
    """An operator has emptied the model's queue while the prompt waited in it."""


class CorruptRow(RequestFailed):
    """The cache holds something that is not a row of this model."""


class ProducerClosed(RequestFailed):
    """The producer was closed while the request was under way."""


class BatchError(LMPoolError):
    """A file could not be answered to its end; what is done stays, and the same command goes on with it.

    Attributes:
        may_pass: whether the same may work a little later, as with a store that cannot be reached.
    """

    may_pass = False


class BatchRefused(BatchError):
    """The output belongs to another model, input or options, or another run writes there."""

    exit_code = 4


class ProtocolError(LMPoolError, ValueError):
    """A message or a row does not decode."""


def of_prompt(error: _E, name: str, index: int, count: int) -> _E:
    """Have an error that concerns one of several prompts name that prompt; any other error stays as it is.

    Args:
        error: the caller's own.
        name: of the argument that has the prompts.
        index: of the prompt among them, from 0.
        count: how many prompts there are.
    """
    if count > 1 and isinstance(error, (InvalidPrompt, WorkerError, NoProbability)):
        error.args = (f"{name}[{index}]: {error}",)
    return error
