"""Prompts as people type them: text through the model's tokenizer, or token ids."""

from __future__ import annotations

import asyncio
import os
from asyncio import shield, wrap_future
from collections import OrderedDict
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

from lmpool.aio import copy_error
from lmpool.errors import (
    DeadlineExceeded,
    InvalidVocabulary,
    LMPoolError,
    NotTokenIds,
    SettingsError,
    TokenOutOfRange,
    UnknownTokenizer,
)
from lmpool.producer.client.requests import Deadline
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.tokenizer_check import MAX_NORMALIZED_CHARACTERS, check_tokenizer
from lmpool.settings import shown

T = TypeVar("T")

_MAX_KEPT = 8

_MAX_THREADS = 4
"""Texts that are encoded at the same time. Threads of their own: a slow tokenizer must not occupy asyncio's."""


class Tokenizer(Protocol):
    """What the command line uses of a tokenizer, of transformers or published."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with those that mark its beginning or end for this model, or without."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        ...


class HasTokenizer(Protocol):
    """What `find_tokenizer` uses of a producer."""

    @property
    def model(self) -> ModelInfo:
        """The info of its model."""
        ...

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model's workers publish."""
        ...


class PublishedTokenizer:
    """The tokenizer of a served model, as its workers publish it: the same ids as those of transformers.

    Args:
        text: its `tokenizer.json`.

    Raises:
        SettingsError: the package `tokenizers` is not installed.
        UnknownTokenizer: this release of `tokenizers` cannot read it, or it could freeze or fill this process
            (`lmpool.protocol.tokenizer_check`).
    """

    def __init__(self, text: str) -> None:
        tokenizers = _package()
        release = f"tokenizers {tokenizers.__version__}"
        try:
            growth = check_tokenizer(text)
        except InvalidVocabulary as error:
            raise UnknownTokenizer(f"the model's tokenizer is refused: {error}") from error
        with _errors_of_package(f"the model's tokenizer cannot be read by {release}"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        self._max_characters = int(MAX_NORMALIZED_CHARACTERS / growth)
        # A file may say so for training's sake; a prompt is whole, and no longer than it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. It runs without Python's lock, so call it in a thread if an event loop must go on.

        Args:
            text: what the prompt is to say.
            add_special_tokens: with those that mark its beginning or end for this model.

        Raises:
            NotTokenIds: it is no text, one that has no UTF-8, or a longer one than this tokenizer takes.
            UnknownTokenizer: the tokenizer fails on it.
        """
        if not isinstance(text, str):
            raise NotTokenIds(f"a text to encode must be a str, not {type(text).__name__}: {shown(text)}")
        if len(text) > self._max_characters:
            limit = f"this tokenizer takes at most {self._max_characters:,}"
            raise NotTokenIds(f"the text has {len(text):,} characters; {limit}: split it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NotTokenIds(f"the text cannot be encoded: {error}") from error
        with _errors_of_package("the model's tokenizer fails on this text"):
            # Unlike `encode`, a batch is encoded without Python's lock.
            encoded: Any = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, vocab_size: int = 2**32) -> str:
        """Text of token ids.

        Args:
            token_ids: list, tuple or 1-D integer array of ids; those that the tokenizer does not have are left out, for
                a model may have more.
            skip_special_tokens: without those that mark a beginning or an end.
            vocab_size: V of the model that the ids are of.

        Raises:
            NotTokenIds: something else.
            TokenOutOfRange: an id is below 0 or not below V.
            UnknownTokenizer: the tokenizer fails on them.
        """
        try:
            if isinstance(token_ids, (str, bytes)):
                raise TypeError("it is text")
            listed = [token.__index__() for token in token_ids]
        except (AttributeError, TypeError) as error:
            raise NotTokenIds(f"ids to decode must be integers, not {shown(token_ids)}: {error}") from error
        if listed and not 0 <= min(listed) <= max(listed) < vocab_size:
            raise TokenOutOfRange(
                f"ids to decode go from 0 to {vocab_size - 1}, not from {min(listed)} to {max(listed)}"
            )
        with _errors_of_package("the model's tokenizer fails on these ids"):
            text: str = self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        return [self.decode([token]) for token in token_ids]


@contextmanager
def _errors_of_package(what: str) -> Iterator[None]:
    """Turn failures of the package `tokenizers`, which is written in Rust, into ours.

    Raises:
        UnknownTokenizer: with what the package says.
    """
    try:
        yield
    except BaseException as error:
        # It raises plain `Exception`, and for a panic of its own a class that derives from BaseException alone.
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise UnknownTokenizer(f"{what}: {error}") from error
        raise


class ReadsTokenizers(Protocol):
    """What `TokenizerCache` uses of a session: it reads from the session's pool, in the session's event loop."""

    async def tokenizer(self, digest: str, deadline: Deadline) -> str:
        """The `tokenizer.json` of a digest."""
        ...


class _Failure(NamedTuple):
    """Why a tokenizer could not be read.

    Attributes:
        reader: whose failure it is: another's pool may have what this one's lacks.
        error: what it is.
    """

    reader: ReadsTokenizers
    error: LMPoolError


_Reading = Future[PublishedTokenizer | _Failure | None]
"""One reading that all await who ask meanwhile; None where whoever began it has given up, and the next is to begin."""


class TokenizerCache:
    """The published tokenizers that this process used last, by their digests: for all its event loops and threads.

    Each is read once, however many ask for it at the same time. A failure is that of those who ask then, and is not
    kept. What is read is unpacked and parsed in threads; while it parses, the package holds Python's lock.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, PublishedTokenizer] = OrderedDict()
        self.after_fork()

    def after_fork(self) -> None:
        """Discard readings and threads: in a child process those of its parent do not exist."""
        self._lock = Lock()
        self._readings: dict[str, _Reading] = {}
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "lmpool-tokenizer")

    async def encode(
        self, tokenizer: Tokenizer, text: str, timeout: float, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Encode a text in a thread of this cache, so that no text stops the event loop.

        Args:
            tokenizer: encodes it.
            text: as `Tokenizer.encode`.
            timeout: seconds. A thread cannot be stopped, so it goes on after them until it ends.
            add_special_tokens: as `Tokenizer.encode`.

        Raises:
            NotTokenIds, UnknownTokenizer: as `PublishedTokenizer.encode`.
            DeadlineExceeded: it took longer.
        """
        deadline, encode = Deadline(timeout), partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await _within(deadline, deadline.loop.run_in_executor(self._threads, encode))

    async def get(self, digest: str, reader: ReadsTokenizers, deadline: Deadline) -> PublishedTokenizer:
        """A tokenizer, from memory or from the pool.

        Args:
            digest: what names it; "" for none, which no pool has.
            reader: the caller's session.
            deadline: of the caller. What has been read by then is parsed to the end, for whoever asks next.

        Raises:
            UnknownTokenizer, ServerError: as `reader.tokenizer`, or it cannot be parsed.
            DeadlineExceeded: it took longer.
        """
        while True:
            with self._lock:
                if (tokenizer := self._kept.get(digest)) is not None:
                    self._kept.move_to_end(digest)
                    return tokenizer
                reading = self._readings.get(digest)
                if is_first := reading is None:
                    reading = self._readings[digest] = Future()
                    # From now on those who await it cannot cancel it for the others.
                    reading.set_running_or_notify_cancel()
            if is_first:
                return await self._read(digest, reading, reader, deadline)
            outcome = await _within(deadline, wrap_future(reading))
            if isinstance(outcome, PublishedTokenizer):
                return outcome
            if outcome is not None and outcome.reader is reader:
                raise copy_error(outcome.error)

    async def _read(
        self, digest: str, reading: _Reading, reader: ReadsTokenizers, deadline: Deadline
    ) -> PublishedTokenizer:
        outcome: _Failure | None = None
        try:
            text = await reader.tokenizer(digest, deadline)
            parsing = deadline.loop.run_in_executor(None, self._parse, digest, reading, reader, text)
        except BaseException as error:
            # Others may have more time than whoever began it.
            if isinstance(error, LMPoolError) and not isinstance(error, DeadlineExceeded):
                outcome = _Failure(reader, error)
            self._end(digest, reading, outcome)
            raise
        return await _within(deadline, shield(parsing))

    def _parse(self, digest: str, reading: _Reading, reader: ReadsTokenizers, text: str) -> PublishedTokenizer:
        """Parse what was read, in a thread, and keep it."""
        outcome: PublishedTokenizer | _Failure | None = None
        try:
            outcome = tokenizer = PublishedTokenizer(text)
            return tokenizer
        except LMPoolError as error:
            outcome = _Failure(reader, error)
            raise
        finally:
            self._end(digest, reading, outcome)

    def _end(self, digest: str, reading: _Reading, outcome: PublishedTokenizer | _Failure | None) -> None:
        with self._lock:
            if self._readings.get(digest) is reading:
                del self._readings[digest]
            if isinstance(outcome, PublishedTokenizer):
                self._kept[digest] = outcome
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        reading.set_result(outcome)


async def _within(deadline: Deadline, awaited: Awaitable[T]) -> T:
    try:
        async with deadline.limit():
            return await awaited
    except DeadlineExceeded:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(str(error)) from error


TOKENIZERS = TokenizerCache()
"""Those of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TOKENIZERS.after_fork)


def check_package() -> None:
    """See that published tokenizers can be used here.

    Raises:
        SettingsError: the package `tokenizers` is not installed.
    """
    _package()


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("text: needs the package tokenizers: pip install 'lmpool[text]'") from error
    return tokenizers


async def published_tokenizer(producer: HasTokenizer) -> Tokenizer | None:
    """The tokenizer that a producer's model publishes; None where it has none, or the package is not installed."""
    try:
        return await producer.tokenizer()
    except (UnknownTokenizer, SettingsError):
        return None


async def find_tokenizer(
    producer: HasTokenizer, option: str = "text", otherwise: str = "pass token ids with --ids"
) -> Tokenizer:
    """The tokenizer that a producer's model publishes; where it has none, or `tokenizers` is missing, transformers'.

    Args:
        producer: is open.
        option: as `load_tokenizer`.
        otherwise: as `load_tokenizer`.

    Raises:
        SettingsError: there is none, or it cannot be loaded here.
        LMPoolError: as `Producer.tokenizer`.
    """
    if (tokenizer := await published_tokenizer(producer)) is not None:
        return tokenizer
    return await asyncio.to_thread(load_tokenizer, producer.model, option, otherwise)


async def read_tokens(producer: HasTokenizer, prompt: str, are_ids: bool, timeout: float) -> list[int]:
    """Token ids of a prompt as typed: ids, or text for the model's tokenizer.

    Args:
        producer: is open.
        prompt: as typed.
        are_ids: whether it is a list of ids.
        timeout: seconds for encoding the text.

    Raises:
        SettingsError: the ids are none, or there is no tokenizer.
        LMPoolError: as `find_tokenizer` and `TokenizerCache.encode`.
    """
    if are_ids:
        return parse_ids(prompt)
    return await TOKENIZERS.encode(await find_tokenizer(producer), prompt, timeout)


def load_tokenizer(
    info: ModelInfo, option: str = "text", otherwise: str = "pass token ids with --ids", **settings: Any
) -> Tokenizer:
    """The tokenizer that belongs to a served model; needs transformers.

    Args:
        info: the model's info.
        option: what the user has given or left out, for an error.
        otherwise: what the user can do instead, for an error.
        settings: as transformers' `AutoTokenizer.from_pretrained` takes them.

    Raises:
        SettingsError: the model has none, or it cannot be loaded here.
    """
    if not info.source:
        raise SettingsError(f"{option}: the model {info.name!r} has no tokenizer; {otherwise}")
    return read_tokenizer(info.source, info.gguf_file, option=option, otherwise=otherwise, **settings)


def read_tokenizer(source: str, gguf_file: str = "", *, option: str, otherwise: str, **settings: Any) -> Tokenizer:
    """The tokenizer of a hub name or folder; needs transformers.

    Args:
        source: the hub name or folder.
        gguf_file: the GGUF file in it that holds the tokenizer, or "".
        option: as `load_tokenizer`.
        otherwise: as `load_tokenizer`.
        settings: as `load_tokenizer`.

    Raises:
        SettingsError: it cannot be loaded here.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SettingsError(
            f"{option}: needs a tokenizer: pip install 'lmpool[text]' for the one that workers publish, 'lmpool[hf]' "
            f"where they publish none, or {otherwise}"
        ) from error
    try:
        # Left unset, transformers asks on the terminal whether to run code that comes with the tokenizer.
        settings = {"trust_remote_code": False, **settings}
        loaded: Any = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file or None, **settings)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(f"{option}: the tokenizer of {source!r} does not load: {reason}; or {otherwise}") from error
    tokenizer: Tokenizer = loaded
    return tokenizer


def end_tokens(source: str) -> list[int]:
    """The tokens at which a model's generation config has it stop; none where there is no such config.

    Args:
        source: the hub name or folder.
    """
    from transformers import GenerationConfig

    try:
        ids: Any = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError):
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])


def parse_ids(text: str) -> list[int]:
    """Token ids as typed: integers separated by commas or spaces.

    Raises:
        SettingsError: something else is among them.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise SettingsError(f"ids: {text!r} is not a list of integers such as 1,2,3") from None
