"""Find a model's tokenizer: the tokenizer that its workers publish, cached in this process, or one of transformers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from lmpool.errors import InvalidVocabulary, NotTokenIds, SettingsError, TokenOutOfRange, UnknownTokenizer
from lmpool.producer.client.discovery import Vocabularies
from lmpool.producer.client.requests import ALONE_S, Deadline
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.tokenizer import MAX_NORMALIZED_CHARACTERS, check_tokenizer
from lmpool.settings import shown

_MAX_KEPT = 8  # Max tokenizers that a process keeps, about 10 MB each.
# Max texts encoded at the same time. A slow tokenizer must not occupy the threads that asyncio shares.
_MAX_THREADS = 4


class Tokenizer(Protocol):
    """The methods of published tokenizers and of transformers' tokenizers that the command line uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with or without the model's tokens for its beginning and end."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""


class HasTokenizer(Protocol):
    """The part of a producer that `find_tokenizer` uses."""

    @property
    def model(self) -> ModelInfo:
        """The model info."""

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the workers publish."""


class PublishedTokenizer:
    """The tokenizer of a served model, which the workers publish; it returns the same token ids as transformers.

    Args:
        text: content of `tokenizer.json`.

    Raises:
        SettingsError: the package `tokenizers` is not installed.
        UnknownTokenizer: this release of `tokenizers` cannot read the text, or the tokenizer could freeze this
            process or fill its memory (`lmpool.protocol.tokenizer`).
    """

    def __init__(self, text: str) -> None:
        tokenizers = import_package()
        try:
            growth = check_tokenizer(text)
        except InvalidVocabulary as error:
            raise UnknownTokenizer(f"the model's tokenizer is refused: {error}") from error
        with _errors_of_package(f"the model's tokenizer cannot be read by tokenizers {tokenizers.__version__}"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        self._max_characters = int(MAX_NORMALIZED_CHARACTERS / growth)
        # Disable truncation and padding, which the file may enable for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Call this method in a thread, not in the event loop; it releases the GIL.

        Args:
            text: the text.
            add_special_tokens: whether to add the model's tokens for the beginning or end of a text.

        Raises:
            NotTokenIds: `text` is no str, cannot be encoded as UTF-8, or is longer than this tokenizer accepts.
            UnknownTokenizer: the tokenizer fails on the text.
        """
        if not isinstance(text, str):
            raise NotTokenIds(f"a text to encode must be a str, not {type(text).__name__}: {shown(text)}")
        if len(text) > (most := self._max_characters):
            raise NotTokenIds(f"the text has {len(text):,} characters; this tokenizer takes at most {most:,}: split it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NotTokenIds(f"the text cannot be encoded: {error}") from error
        with _errors_of_package("the model's tokenizer fails on this text"):
            # Only the batch method of `tokenizers` releases the GIL.
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, vocab_size: int = 2**32) -> str:
        """Return the text of token ids.

        Args:
            token_ids: list, tuple or 1-D integer array. Ids that the tokenizer does not have are left out.
            skip_special_tokens: whether to leave out tokens for the beginning or end of a text.
            vocab_size: V of the model.

        Raises:
            NotTokenIds: `token_ids` are not integers.
            TokenOutOfRange: an id is below 0 or not below V.
            UnknownTokenizer: the tokenizer fails on these ids.
        """
        try:
            if isinstance(token_ids, (str, bytes)):
                raise TypeError("it is text")
            listed = [token.__index__() for token in token_ids]
        except (AttributeError, TypeError) as error:
            raise NotTokenIds(f"ids to decode must be integers, not {shown(token_ids)}: {error}") from error
        if listed and not 0 <= min(listed) <= max(listed) < vocab_size:
            found = f"from {min(listed)} to {max(listed)}"
            raise TokenOutOfRange(f"ids to decode go from 0 to {vocab_size - 1}, not {found}")
        with _errors_of_package("the model's tokenizer fails on these ids"):
            return str(self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens))

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token id, which is decoded without its neighbours."""
        return [self.decode([token]) for token in token_ids]


@contextmanager
def _errors_of_package(text: str) -> Iterator[None]:
    """Convert exceptions of the package `tokenizers` to UnknownTokenizer with a message that begins with `text`."""
    try:
        yield
    except BaseException as error:
        # The package raises plain `Exception`; a panic in its Rust code raises `PanicException`, a BaseException.
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise UnknownTokenizer(f"{text}: {error}") from error
        raise


class TokenizerCache:
    """The published tokenizers that this process has read, by digest, for all event loops and threads."""

    def __init__(self) -> None:
        self._kept: dict[str, PublishedTokenizer] = {}
        self._locks = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]()
        self.after_fork()

    def after_fork(self) -> None:
        """Make a new thread pool, because a forked process has no threads of its parent."""
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "lmpool-tokenizer")

    async def encode(
        self, tokenizer: Tokenizer, text: str, timeout: float, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Encode a text in a thread of this cache. The thread cannot be stopped, so it continues after the timeout."""
        deadline, encode = Deadline(timeout), partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        async with deadline.limit():
            return await deadline.loop.run_in_executor(self._threads, encode)

    async def get(self, digest: str, vocabularies: Vocabularies, deadline: Deadline) -> PublishedTokenizer:
        """Return the tokenizer with this digest from the cache or the pool; raises UnknownTokenizer for the digest "".

        Callers of one pool and event loop take turns, so all callers but the first find the tokenizer in the cache.
        """
        if (tokenizer := self._kept.get(digest)) is not None:
            return tokenizer
        lock = self._locks.setdefault(deadline.loop, {}).setdefault(vocabularies.pool, asyncio.Lock())
        async with deadline.limit(), lock:
            if (tokenizer := self._kept.get(digest)) is None:
                # Use a separate deadline: when the caller's deadline passes, do not report a failure of the server.
                text = await vocabularies.tokenizer(digest, Deadline(ALONE_S))
                tokenizer = self._kept[digest] = await asyncio.to_thread(PublishedTokenizer, text)
                if len(self._kept) > _MAX_KEPT:
                    self._kept.pop(next(iter(self._kept)), None)
        return tokenizer


TOKENIZERS = TokenizerCache()
"""The tokenizer cache of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TOKENIZERS.after_fork)


def import_package() -> Any:
    """Return the package `tokenizers`; raises SettingsError if the package is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("text: needs the package tokenizers: pip install 'lmpool[text]'") from error
    return tokenizers


async def published_tokenizer(producer: HasTokenizer) -> Tokenizer | None:
    """Return the tokenizer that the workers publish; None if they publish none or `tokenizers` is not installed."""
    try:
        return await producer.tokenizer()
    except (UnknownTokenizer, SettingsError):
        return None


async def find_tokenizer(
    producer: HasTokenizer, option: str = "text", otherwise: str = "pass token ids with --ids"
) -> Tokenizer:
    """Return the tokenizer that the workers publish, or else load one with transformers (`load_tokenizer`)."""
    if (tokenizer := await published_tokenizer(producer)) is not None:
        return tokenizer
    return await asyncio.to_thread(load_tokenizer, producer.model, option, otherwise)


async def read_tokens(producer: HasTokenizer, prompt: str, are_ids: bool, timeout: float) -> list[int]:
    """Return the token ids of a prompt that a user typed: a list of ids if `are_ids`, otherwise a text to encode."""
    if are_ids:
        return parse_ids(prompt)
    return await TOKENIZERS.encode(await find_tokenizer(producer), prompt, timeout)


def load_tokenizer(
    info: ModelInfo, option: str = "text", otherwise: str = "pass token ids with --ids", **settings: Any
) -> Tokenizer:
    """Load the tokenizer of a served model with transformers.

    Args:
        info: the model info.
        option: name of the option that needs the tokenizer, for the error text.
        otherwise: what the user can do instead, for the end of the error text.
        settings: arguments for transformers' `AutoTokenizer.from_pretrained`.

    Raises:
        SettingsError: the model has no tokenizer, or the tokenizer cannot be loaded on this machine.
    """
    if not info.source:
        raise SettingsError(f"{option}: the model {info.name!r} has no tokenizer; {otherwise}")
    return read_tokenizer(info.source, info.gguf_file, option=option, otherwise=otherwise, **settings)


def read_tokenizer(source: str, gguf_file: str = "", *, option: str, otherwise: str, **settings: Any) -> Tokenizer:
    """Load the tokenizer of a hub repository or folder, or of a GGUF file in either; see `load_tokenizer`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        packages = "'lmpool[text]' for the one that workers publish, 'lmpool[hf]' where they publish none"
        raise SettingsError(f"{option}: needs a tokenizer: pip install {packages}, or {otherwise}") from error
    try:
        # By default, transformers asks on the terminal whether to run code that comes with the tokenizer.
        settings = {"trust_remote_code": False, "gguf_file": gguf_file or None, **settings}
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **settings)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(f"{option}: the tokenizer of {source!r} does not load: {reason}; or {otherwise}") from error
    return cast(Tokenizer, tokenizer)


def end_tokens(source: str) -> list[int]:
    """Return the end tokens in the generation config of a hub name or folder; [] if there is no config."""
    from transformers import GenerationConfig

    try:
        ids: Any = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError):
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])


def parse_ids(text: str) -> list[int]:
    """Parse token ids that a user typed: integers separated by commas or spaces."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise SettingsError(f"ids: {text!r} is not a list of integers such as 1,2,3") from None
