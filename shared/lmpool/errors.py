"""Every exception that lmpool raises, as one tree.

    LMPoolError
    ├── InvalidPrompt (ValueError)      the prompt is malformed; nothing was sent
    │   ├── NotTokenIds (TypeError)     floats, bools, strings, nested lists, arrays that are not 1-D
    │   ├── EmptyPrompt                 the prompt has no ids
    │   ├── TokenOutOfRange (IndexError)  an id is below 0, or not below V
    │   └── PromptTooLong               the prompt has more ids than the model accepts
    ├── TrieError (ValueError)          arguments for a trie are invalid; nothing was computed
    │   ├── InvalidVocabulary           a token is no byte string, or tokens are missing or too many
    │   ├── UnknownVocabulary (LookupError)  the model publishes no vocabulary, or it has expired
    │   ├── InvalidWeights              weights have the wrong length or dtype, or contain NaN
    │   └── UnknownNode (LookupError)   the trie has no such node or prefix
    ├── SettingsError (ValueError)      a setting is unknown or malformed; the text names the field
    ├── ServerError (ConnectionError)   Redis cannot be used
    │   ├── ServerUnreachable           no server answers at the address
    │   └── AuthenticationFailed        wrong user or password, or the ACL forbids a command
    ├── ModelError (LookupError)
    │   ├── UnknownModel                no model of that name is served, or no model at all
    │   ├── AmbiguousModel              several models are served and no model was named
    │   ├── UnknownAdapter              the model has no adapter of that name
    │   ├── UnknownTokenizer            the model's workers publish no tokenizer, or it has expired
    │   ├── AdapterRefused              a worker cannot load the adapter
    │   ├── WeightsRefused              a worker cannot serve the published weights
    │   └── ModelMismatch               a worker's info differs from the info of the model it joins
    ├── RequestFailed                   an accepted request ended without a row
    │   ├── DeadlineExceeded (TimeoutError)
    │   │   ├── NoWorker                no live worker serves the model
    │   │   └── QueueFull               the model's queue stayed at its limit
    │   ├── WorkerError                 the backend failed on this prompt
    │   ├── SourceMissing               the cache lacks the row or weights that a trie job names
    │   ├── AdapterChanged              the adapter that a job names is no longer in service
    │   ├── UnknownTokenSet (LookupError)
    │   │                               the pool has no set of tokens of that name
    │   ├── NoProbability (ValueError)  no allowed token can be drawn
    │   ├── QueueCleared                an operator has removed the prompt from the queue
    │   ├── CorruptRow                  the cached value is not a row of this model
    │   └── ProducerClosed              the producer was closed while the request was in flight
    ├── BatchError                      a run over a file failed; finished shards stay
    │   └── BatchRefused                the output belongs to another model, input, options or run
    └── ProtocolError (ValueError)      a message or row does not decode

Messages name the value, the limit and what to do. They may quote text from other users; `printable` escapes this text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_E = TypeVar("_E", bound=BaseException)


def printable(text: str, keep: str = "") -> str:
    r"""Escape each invisible character of a text, as `\x1b` or `\u202e`, except the characters in `keep`.

    Invisible are control characters, line breaks, marks of direction, spaces except " ", and surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def first_line(error: BaseException) -> str:
    """The message of an exception as one line of at most 300 characters; its type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"KeyError: {text}"  # The message of a KeyError is only the missing key.
    return text if len(text) <= 300 else text[:297] + "..."


def to_json(value: Any, **options: Any) -> str:
    """A value as JSON in ASCII without control characters; `options` are those of `json.dumps`."""
    return json.dumps(value, **options).replace("\x7f", r"\u007f")


class LogFormatter(logging.Formatter):
    """Indents all lines of a log entry but the first, so that no text in an entry looks like another entry."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the entry, with its traceback if it has one."""
        return printable(super().format(record), keep="\n").replace("\n", "\n  ")


_option_of: Callable[[str], str | None] | None = None  # Maps a Python argument to its command-line option.


def use_options(option_of: Callable[[str], str | None]) -> None:
    """Make the texts of errors name command-line options in place of Python arguments."""
    global _option_of
    _option_of = option_of


def argument(name: str, value: str = "") -> str:
    """How the text of an error names an argument: `timeout=` for a program, `--timeout` for a command-line user."""
    return (_option_of and _option_of(name)) or f"{name}={value}"


class LMPoolError(Exception):
    """Base of all exceptions of this package.

    Attributes:
        exit_code: the exit code of a command that ends in this error.
    """

    exit_code = 2

    def __str__(self) -> str:
        # Escape the text: parts of it may come from other users, and a traceback prints it to a terminal.
        return printable(super().__str__(), keep="\n")


class InvalidPrompt(LMPoolError, ValueError):
    """The prompt is malformed."""


class NotTokenIds(InvalidPrompt, TypeError):
    """The prompt is not a flat sequence of integers."""


class EmptyPrompt(InvalidPrompt):
    """The prompt has no ids."""


class TokenOutOfRange(InvalidPrompt, IndexError):
    """An id is negative or not below the model's vocabulary size."""


class PromptTooLong(InvalidPrompt):
    """The prompt has more ids than the model accepts."""


class TrieError(LMPoolError, ValueError):
    """A method of a trie was called with invalid arguments."""


class InvalidVocabulary(TrieError):
    """The vocabulary is not a list of byte strings within the limits."""


class UnknownVocabulary(TrieError, LookupError):
    """No worker or client has published the vocabulary."""


class InvalidWeights(TrieError):
    """The weights do not fit the vocabulary, or are not numbers."""


class UnknownNode(TrieError, LookupError):
    """The trie has no such node or prefix."""


class SettingsError(LMPoolError, ValueError):
    """A setting is unknown or malformed.

    Attributes:
        setting: the name of the setting at the beginning of the text; "" if the text begins with no name.
        problem: the text without the name of the setting.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        name, colon, problem = text.partition(": ")
        self.setting, self.problem = (name, problem) if colon and name.isidentifier() else ("", text)


class ServerError(LMPoolError, ConnectionError):
    """The Redis server cannot be used."""


class ServerUnreachable(ServerError):
    """No server answers at the address."""


class AuthenticationFailed(ServerError):
    """The server refuses the user, the password or a command."""


class ModelError(LMPoolError, LookupError):
    """The model cannot be served or joined."""


class UnknownModel(ModelError):
    """No model of that name is served.

    Attributes:
        is_loading: whether a worker is loading the model.
        has_others: whether other models are served.
    """

    is_loading = has_others = False


class AmbiguousModel(ModelError):
    """Several models are served and no model was named."""


class UnknownAdapter(ModelError):
    """The model has no adapter of that name."""


class UnknownTokenizer(ModelError):
    """The model's workers publish no tokenizer, or it has expired."""


class AdapterRefused(ModelError):
    """A worker cannot load the adapter; the previous adapter of this name stays in service."""


class WeightsRefused(ModelError):
    """A worker cannot serve the published weights; the previous version stays in service."""


class ModelMismatch(ModelError):
    """A worker's model info differs from the info of the model that it joins."""


class RequestFailed(LMPoolError):
    """An accepted request ended without a row."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """The row did not arrive before the request's deadline."""


class NoWorker(DeadlineExceeded):
    """No live worker serves the model."""


class QueueFull(DeadlineExceeded):
    """The model's queue stayed at its limit."""


class WorkerError(RequestFailed):
    """The backend failed on this prompt."""


class SourceMissing(RequestFailed):
    """The cache lacks the row or the weights from which a trie job must compute values."""


class AdapterChanged(RequestFailed):
    """The adapter that a job names is no longer in service; the client requests the current adapter."""


class UnknownTokenSet(RequestFailed, LookupError):
    """No set of tokens of that name was published, or it has expired."""


class NoProbability(RequestFailed, ValueError):
    """No allowed token has a probability above 0, so no token can be drawn."""


class QueueCleared(RequestFailed):
    """An operator has cleared the model's queue while the prompt waited in it."""


class CorruptRow(RequestFailed):
    """The cached value is not a row of this model."""


class ProducerClosed(RequestFailed):
    """The producer was closed while the request was in flight."""


class BatchError(LMPoolError):
    """A run over a file failed. Finished shards stay, and the same command continues after these shards.

    Attributes:
        may_pass: whether a retry may succeed, for example if a storage bucket could not be reached.
    """

    may_pass = False


class BatchRefused(BatchError):
    """The output belongs to another model, input or options, or to another run."""

    exit_code = 4


class ProtocolError(LMPoolError, ValueError):
    """A message or a row does not decode."""


def of_prompt(error: _E, name: str, index: int, count: int) -> _E:
    """Put `name[index]` before the text of an error about one of several prompts; other errors stay unchanged."""
    if count > 1 and isinstance(error, (InvalidPrompt, WorkerError, NoProbability)):
        error.args = (f"{name}[{index}]: {error}",)
    return error
