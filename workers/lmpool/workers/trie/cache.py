"""The tries that a worker has at hand, and the values that it has computed lately: both bounded by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.kernels.footprint import most_bytes
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary


class Sized(Protocol):
    """Something that takes memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; does not change."""
        ...


_BYTES_A_NODE = 25
_BYTES_A_TOKEN = 16

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Sized)


class Shelf(Generic[K, T]):
    """Things by name, least recently used out first; used by the event loop and by the backend's thread.

    Args:
        limit: bytes that they may take together; the newest stays whatever it takes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[K, T] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, name: K) -> T | None:
        """The thing, or None; what is found is the last to go."""
        with self._lock:
            found = self._things.get(name)
            if found is not None:
                self._things.move_to_end(name)
            return found

    def put(self, name: K, thing: T) -> None:
        """Keep a thing, and drop the oldest as long as the limit asks for it."""
        with self._lock:
            old = self._things.pop(name, None)
            self._size += thing.nbytes - (old.nbytes if old is not None else 0)
            self._things[name] = thing
            while self._size > self._limit and len(self._things) > 1:
                self._size -= self._things.popitem(last=False)[1].nbytes


ValuesShelf = Shelf[tuple[str, str, bytes, str], NDArray[np.float32]]
"""(op, fingerprint of the model, digest of the prompt, digest of the vocabulary) -> [M inner values | V weights]."""


class Shelved:
    """A vocabulary, and its trie once somebody has used it.

    Args:
        vocabulary: the byte strings.
        device: where its kernels run.
        values: where computed values of rows are kept.

    Attributes:
        nbytes: what it takes at most once the trie is built and its kernels have run: a node for every byte.
    """

    def __init__(self, vocabulary: Vocabulary, device: str, values: ValuesShelf) -> None:
        self.vocabulary = vocabulary
        self.values = values
        self.nbytes = (
            vocabulary.nbytes * (1 + _BYTES_A_NODE) + len(vocabulary) * _BYTES_A_TOKEN + most_bytes(vocabulary, device)
        )
        self._device = device
        self._opened: tuple[Trie, Kernels] | None = None
        self._lock = threading.Lock()

    def open(self) -> tuple[Trie, Kernels]:
        """The trie and its kernels; takes some tenths of a second the first time."""
        with self._lock:
            if self._opened is None:
                trie = Trie(self.vocabulary)
                self._opened = trie, open_kernels(trie, self._device)
            return self._opened


TrieShelf = Shelf[str, Shelved]
