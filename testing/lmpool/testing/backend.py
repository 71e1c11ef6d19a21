"""The models of a pool in memory: synthetic ones, served by a backend whose steps pass through a gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, Finished
from lmpool.workers.settings import WorkerSettings

_V = 512
# Of the rows in shared memory: enough for those of a test, and made in no time.
_SHM_BYTES = 128 * 2**20


class Gate:
    """A gate that the steps of a backend pass through; another thread may close it. It starts open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_shut = False
        self._is_over = False

    def shut(self) -> None:
        """Let no step end any more."""
        self._set(is_shut=True)

    def open(self) -> None:
        """Let steps end."""
        self._set(is_shut=False)

    def give_up(self) -> None:
        """Let all steps end at once, now and later."""
        self._is_over = True
        self._set(is_shut=False)

    def _set(self, *, is_shut: bool) -> None:
        with self._changed:
            self._is_shut = is_shut
            self._changed.notify_all()

    def pass_after(self, seconds: float) -> None:
        """Wait for `seconds`, and until the gate is open."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_over and (self._is_shut or (rest := end - time.monotonic()) > 0):
                self._changed.wait(None if self._is_shut else rest)


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """A model whose rows are drawn from a generator: any prompt has one, and a test can tell it beforehand.

    Attributes:
        name: what it is served as.
        vocab_size: V; 0 for that of `vocabulary`, or 512.
        vocabulary: the byte string of every token (`Vocabulary` or byte strings), such as that of your tokenizer;
            None for `lmpool.synthetic.synthetic_vocabulary`.
        seed: which rows it has.
        step_ms: how long a step takes.
        max_batch: prompts in one step.
        max_prompt_tokens: longest prompt that is taken.
        encoding: "f32" or "bf16", as which rows travel; they are the same.
        fail_token: prompts that contain this id end in `WorkerError`; -1 for none.
        lease_s: seconds after which the jobs of a worker that was killed are given to another.
        queue_limit: prompts that may wait at once; more end in `QueueFull`.
        row_ttl_s: seconds that a row stays in the pool's cache.
        with_trie: answer trie calls by reference (`prompt=`) without trie workers; needs numba.

    Raises:
        SettingsError, InvalidVocabulary: a value is malformed.
    """

    name: str = "synthetic"
    vocab_size: int = 0
    vocabulary: Vocabulary | Iterable[bytes] | None = None
    seed: int = 0
    step_ms: float = 0.0
    max_batch: int = 32
    max_prompt_tokens: int = 131_072
    encoding: str = "f32"
    fail_token: int = -1
    lease_s: float = 15.0
    queue_limit: int = 100_000
    row_ttl_s: float = 3600.0
    with_trie: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not isinstance(self.vocabulary, Vocabulary):
            object.__setattr__(self, "vocabulary", Vocabulary(self.vocabulary))
        known = 0 if self.vocabulary is None else len(self.tokens)
        if self.vocab_size == 0:
            object.__setattr__(self, "vocab_size", known or _V)
        elif known and self.vocab_size != known:
            raise SettingsError(
                f"vocab_size: {self.vocab_size} is not the {known} tokens of the vocabulary: leave it out"
            )
        if self.name == TRIE_SERVICE:
            raise SettingsError(f"name: {self.name!r} is the name of trie workers: give the model another")
        _ = self.backend, self.worker("lmpool")

    @property
    def tokens(self) -> Vocabulary:
        """The byte string of every token, as the pool publishes it."""
        if isinstance(self.vocabulary, Vocabulary):
            return self.vocabulary
        return synthetic_vocabulary(self.vocab_size, self.seed)

    @property
    def backend(self) -> SyntheticSettings:
        """What the backend is told."""
        return SyntheticSettings(
            name=self.name,
            vocab_size=self.vocab_size,
            seed=self.seed,
            step_ms=self.step_ms,
            max_batch=self.max_batch,
            max_prompt_tokens=self.max_prompt_tokens,
            encoding=self.encoding,
            fail_token=self.fail_token,
        )

    def worker(self, prefix: str) -> WorkerSettings:
        """What a worker is told, in a pool with this prefix."""
        return WorkerSettings(
            prefix=prefix,
            lease_s=self.lease_s,
            # A worker that a test stalls is to stay so, however long somebody looks at it in a debugger.
            step_timeout_s=1e9,
            queue_limit=self.queue_limit,
            row_ttl_s=self.row_ttl_s,
            with_trie=self.with_trie,
            shm_bytes=_SHM_BYTES,
        )

    def row(self, prompt: Iterable[int]) -> NDArray[np.float32]:
        """The row that the pool answers for a prompt.

        Args:
            prompt: token ids, each below `vocab_size`.

        Returns:
            float32 log-probabilities of shape (V,).

        Raises:
            InvalidPrompt: the prompt is empty or has ids outside the vocabulary.
        """
        return synthetic_row(prompt, vocab_size=self.vocab_size, seed=self.seed)


@dataclass(frozen=True, slots=True)
class GatedSettings:
    """Settings of the backend of one worker.

    Attributes:
        model: what it serves.
        gate: what its steps pass through.
    """

    model: SyntheticModel
    gate: Gate

    @property
    def served_as(self) -> str:
        """The model's name."""
        return self.model.name

    def open(self) -> Backend:
        """Make the backend."""
        return GatedBackend(self)


class GatedBackend(SyntheticBackend):
    """As `SyntheticBackend`, with a vocabulary of the user's; `step_ms` is waited for at the gate.

    Args:
        settings: see `GatedSettings`.
    """

    def __init__(self, settings: GatedSettings) -> None:
        model = settings.model
        super().__init__(replace(model.backend, step_ms=0.0))
        self._model = model
        self._gate = settings.gate

    def vocabulary(self) -> Vocabulary:
        """See `Backend.vocabulary`."""
        return self._model.tokens

    def step(self) -> Finished:
        """See `Backend.step`."""
        finished = super().step()
        self._gate.pass_after(self._model.step_ms / 1000)
        return finished
