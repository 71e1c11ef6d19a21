"""The synthetic backend: rows from a generator, with an optional simulated step time.

It stands in for a GPU in tests and load tests, and says so in its info. A step pretends to take `step_ms`, and
`token_ms` more for each token that it computes. Then a prefix is worth what it is worth to an engine: the tokens that a
prompt has in common with recent ones are not computed again, as far as a memory of `kv_cache_tokens` holds them.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.adapter import MAX_ADAPTERS, MAX_LOADED, qualify, revision_of
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.prompt import decode_ids
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Encoding, NewRows, RowBlock, VectorBlock, no_new_rows, widen_bf16
from lmpool.settings import check_choice, check_name, check_number
from lmpool.synthetic import FEW_TOKENS, Draw, base_rows, draw, draw_few_tokens, fill, synthetic_vocabulary
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.checkpoint import checkpoint_source
from lmpool.workers.backends.lora import content_digest, read_adapter_folders
from lmpool.workers.execution.contract import (
    QUERY_ERRORS,
    Backend,
    BackendJob,
    BackendStats,
    Finished,
    failure_of,
)

_TOGETHER = 4
"""Rows of few tokens that are drawn faster together."""

_CRASH_EXIT = 70
_ID_BYTES = 4
_BLOCK_BYTES = 16 * _ID_BYTES


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """Settings of the synthetic backend.

    Raises:
        SettingsError: a value is malformed.
    """

    kind: ClassVar[str] = "synthetic"

    name: str = field(default="synthetic", metadata={"help": "What the model is served as."})
    vocab_size: int = field(default=49_152, metadata={"help": "V."})
    seed: int = field(default=0, metadata={"help": "Which rows it draws."})
    step_ms: float = field(default=0.0, metadata={"help": "How long a step pretends to take."})
    token_ms: float = field(
        default=0.0,
        metadata={"help": "How much longer it pretends to take for each token that no prefix cache would hold."},
    )
    kv_cache_tokens: int = field(
        default=1_000_000, metadata={"help": "Tokens that this prefix cache holds, with --token-ms; 0 for none."}
    )
    max_batch: int = field(default=32, metadata={"help": "Prompts in one step."})
    max_prompt_tokens: int = field(default=131_072, metadata={"help": "Longest prompt that is taken."})
    encoding: str = field(default="f32", metadata={"help": '"f32" or "bf16"; the rows are the same.'})
    fail_token: int = field(
        default=-1, metadata={"help": "Prompts that contain this id fail (to test error handling); -1 for none."}
    )
    crash_token: int = field(
        default=-1, metadata={"help": "Prompts that contain this id end the process; -1 for none."}
    )
    raise_token: int = field(
        default=-1,
        metadata={"help": "The step of a prompt that contains this id raises, as if memory had run out; -1 for none."},
    )
    hang_token: int = field(
        default=-1, metadata={"help": "The step of a prompt that contains this id never ends; -1 for none."}
    )
    adapters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Adapters, as name=folder; may be given several times. What the folder (or file) holds decides "
            "the rows."
        },
    )
    max_adapters: int = field(
        default=MAX_LOADED,
        metadata={"help": "Adapters that are loaded at once, at least those of --adapters; the others are evicted."},
    )

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_number("vocab_size", self.vocab_size, least=1, most=4_000_000)
        check_number("seed", self.seed, least=0, most=2**62)
        check_number("step_ms", self.step_ms, least=0, most=600_000, whole=False)
        check_number("token_ms", self.token_ms, least=0, most=600_000, whole=False)
        check_number("kv_cache_tokens", self.kv_cache_tokens, least=0, most=10**9)
        check_number("max_batch", self.max_batch, least=1, most=65_536)
        check_number("max_prompt_tokens", self.max_prompt_tokens, least=1, most=4_000_000)
        check_choice("encoding", self.encoding, ("f32", "bf16"))
        check_number("max_adapters", self.max_adapters, least=0, most=MAX_ADAPTERS)
        for name in ("fail_token", "crash_token", "raise_token", "hang_token"):
            check_number(name, getattr(self, name), least=-1)
        _ = self.adapter_folders  # Malformed ones are refused now.

    @property
    def served_as(self) -> str:
        """`name`."""
        return self.name

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or file."""
        return read_adapter_folders(self.adapters)

    def open(self) -> Backend:
        """Make the backend; see `SyntheticBackend`."""
        return SyntheticBackend(self)


class PrefixMemory:
    """Which prefixes of recent prompts an engine would hold keys and values of; it keeps hashes of them only.

    It knows every noted prompt and, of each, the prefixes whose length is a multiple of 16, and all that end behind the
    last of these. So a prompt that extends another one, or a part of it from there on, finds all of that, and one that
    branches off before finds what they share but for its last 15 tokens at most.

    Args:
        capacity: tokens that it holds; those that were used least lately go first.

    Attributes:
        held: tokens that it holds now, those of a prefix that several prompts share counted once.
    """

    def __init__(self, capacity: int) -> None:
        self.held = 0
        self._capacity = capacity
        # Hash of a prefix, made of the hash of its whole blocks and the rest -> tokens that go with it; those used
        # last come last.
        self._prefixes: OrderedDict[int, int] = OrderedDict()

    def note(self, ids: bytes, adapter: str = "") -> int:
        """Hold a prompt.

        Args:
            ids: its token ids as little-endian uint32 bytes.
            adapter: what it is computed with; prompts with different adapters share nothing.

        Returns:
            how many of its first tokens were held before.
        """
        prefixes, last_block = self._prefixes, len(ids) - _BLOCK_BYTES
        key, start, path = hash(adapter), 0, []
        while start <= last_block and (block := hash((key, ids[start : start + _BLOCK_BYTES]))) in prefixes:
            path.append(key := block)
            start += _BLOCK_BYTES
        known = start
        for end in range(start + _ID_BYTES, min(len(ids), start + _BLOCK_BYTES - _ID_BYTES) + 1, _ID_BYTES):
            if (part := hash((key, ids[start:end]))) in prefixes:
                path.append(part)
                known = end
        at = start
        while at <= last_block:
            path.append(key := hash((key, ids[at : at + _BLOCK_BYTES])))
            at += _BLOCK_BYTES
            # What was known of it is held by the prefixes that end within it.
            prefixes[key] = (at - max(at - _BLOCK_BYTES, known)) // _ID_BYTES
        for end in range(max(known, at) + _ID_BYTES, len(ids) + 1, _ID_BYTES):
            path.append(part := hash((key, ids[at:end])))
            prefixes[part] = 1
        self.held += (len(ids) - known) // _ID_BYTES
        # The longest first: a prefix outlives all that extend it, which would not be found without it.
        for key in reversed(path):
            prefixes.move_to_end(key)
        while self.held > self._capacity:
            self.held -= prefixes.popitem(last=False)[1]
        return known // _ID_BYTES

    def clear(self) -> None:
        """Hold nothing."""
        self.held = 0
        self._prefixes.clear()


class SyntheticBackend:
    """Draws rows as `lmpool.synthetic.synthetic_row` does.

    Args:
        settings: see `SyntheticSettings`.
    """

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self._encoding = Encoding[settings.encoding.upper()]
        faults = (settings.fail_token, settings.crash_token, settings.raise_token, settings.hang_token)
        self._has_faults = max(faults) >= 0
        self._jobs: OrderedDict[bytes, BackendJob] = OrderedDict()
        self._adapters: dict[str, str] = {}
        self._stats = BackendStats()
        self._new_rows: NewRows = no_new_rows
        has_memory = settings.token_ms > 0 and settings.kv_cache_tokens > 0
        self._memory = PrefixMemory(settings.kv_cache_tokens) if has_memory else None
        base_rows(settings.vocab_size, settings.seed)
        for name, folder in settings.adapter_folders.items():
            self.load_adapter(name, folder)

    @property
    def info(self) -> ModelInfo:
        """See `Backend.info`."""
        settings = self._settings
        return ModelInfo(
            name=settings.name,
            backend="synthetic",
            vocab_size=settings.vocab_size,
            max_prompt_tokens=settings.max_prompt_tokens,
            revision=f"seed-{settings.seed}",
            dtype="float32",
            encoding=settings.encoding,
            positions=True,
            note="rows are drawn from a generator, not computed by a model",
        )

    @property
    def adapters(self) -> Mapping[str, str]:
        """See `Backend.adapters`."""
        return self._adapters

    @property
    def batch(self) -> int:
        """See `Backend.batch`."""
        return self._settings.max_batch

    @property
    def device(self) -> str:
        """See `Backend.device`."""
        return "cpu"

    def vocabulary(self) -> Vocabulary:
        """See `Backend.vocabulary`; it is `lmpool.synthetic.synthetic_vocabulary`."""
        return synthetic_vocabulary(self._settings.vocab_size, self._settings.seed)

    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return 2 * self._settings.max_batch - len(self._jobs)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """See `Backend.submit`."""
        for job in jobs:
            self._jobs[job.digest] = job

    def step(self) -> Finished:
        """See `Backend.step`."""
        started = time.monotonic()
        batch = dict(islice(self._jobs.items(), self._settings.max_batch))
        failures = {digest: text for digest, job in batch.items() if (text := self._fault(job.ids))}
        good = {digest: job for digest, job in batch.items() if digest not in failures}
        rows = {digest: job for digest, job in good.items() if job.positions is None}
        vectors = self._vectors(good, failures)
        blocks = [self._draw(rows)] if rows else []
        self.abort(batch)
        tokens = sum(len(job.ids) // _ID_BYTES for job in good.values())
        reused = sum(map(self._reuse, good.values())) if self._memory is not None else 0
        stats = self._stats
        rows_so_far = stats.rows + len(good)
        self._stats = BackendStats(stats.steps + 1, rows_so_far, stats.tokens + tokens, stats.reused + reused)
        pretended_ms = self._settings.step_ms + self._settings.token_ms * (tokens - reused)
        rest = pretended_ms / 1000 - (time.monotonic() - started)
        if rest > 0:
            time.sleep(rest)
        return Finished(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _reuse(self, job: BackendJob) -> int:
        """Tokens of a prompt that need not be computed: at least those are whose logits are wanted."""
        if self._memory is None or job.fresh:
            return 0
        return min(self._memory.note(job.ids, job.adapter), job.span.start)

    def _draw(self, jobs: dict[bytes, BackendJob]) -> RowBlock:
        if self._settings.vocab_size <= FEW_TOKENS and len(jobs) >= _TOGETHER:
            prompts = [(job.ids, revision_of(job.adapter) if job.adapter else "") for job in jobs.values()]
            is_f32 = self._encoding is Encoding.F32
            settings = self._settings
            few, few_log_z = draw_few_tokens(prompts, settings.vocab_size, settings.seed, bits=not is_f32)
            return RowBlock(list(jobs), few, None if is_f32 else few_log_z, self._encoding)
        numbers = self._new_rows(len(jobs), self._settings.vocab_size, self._encoding)
        if numbers is None:
            numbers = np.empty((len(jobs), self._settings.vocab_size), self._encoding.dtype)
        if self._encoding is Encoding.F32:
            for out, job in zip(numbers, jobs.values(), strict=True):
                base, shifts = self._drawn(job.ids, job.adapter)
                fill(out, base.logprobs, shifts)
            return RowBlock(list(jobs), numbers, None, self._encoding)
        log_z = np.empty(len(jobs), np.float32)
        for index, job in enumerate(jobs.values()):
            base, shifts = self._drawn(job.ids, job.adapter)
            fill(numbers[index], base.bits, shifts)
            log_z[index] = base.log_z
        return RowBlock(list(jobs), numbers, log_z, self._encoding)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._new_rows = new_rows

    def _drawn(self, ids: bytes, adapter: str) -> Draw:
        return draw(ids, self._settings.vocab_size, self._settings.seed, revision_of(adapter) if adapter else "")

    def _vectors(self, jobs: dict[bytes, BackendJob], failures: dict[bytes, str]) -> dict[bytes, NDArray[np.float32]]:
        """What is wanted of the positions of those jobs that want it; notes in `failures` why one has no answer."""
        vectors = {}
        for digest, job in jobs.items():
            if job.positions is None:
                continue
            try:
                vectors[digest] = self._vector(job, job.positions)
            except QUERY_ERRORS as error:
                failures[digest] = failure_of(error)
        return vectors

    def _vector(self, job: BackendJob, query: PositionsQuery) -> NDArray[np.float32]:
        """What is wanted of each position."""
        tokens, bits = decode_ids(job.ids), np.empty(self._settings.vocab_size, np.uint16)
        parts = []
        for at in job.span:
            base, shifts = self._drawn(job.ids[: _ID_BYTES * (at + 1)], job.adapter)
            fill(bits, base.bits, shifts)
            logits, log_z = widen_bf16(bits)[None], np.array([base.log_z], np.float32)
            parts.append(query.of(logits, log_z, tokens[at + 1 : at + 2]).copy().ravel())
        return np.concatenate(parts)

    def _fault(self, ids: bytes) -> str | None:
        """Do what the settings say of a prompt's ids; returns why it fails, if it does."""
        if not self._has_faults:
            return None
        settings = self._settings
        tokens = set(decode_ids(ids).tolist())
        if settings.crash_token in tokens:
            os._exit(_CRASH_EXIT)
        if settings.raise_token in tokens:
            raise MemoryError(f"the prompt contains the token {settings.raise_token}, for which there is no memory")
        while settings.hang_token in tokens:
            time.sleep(3600)
        if settings.fail_token in tokens:
            return f"the prompt contains the token {settings.fail_token}, which this worker was told to fail on"
        return None

    def abort(self, digests: Collection[bytes]) -> None:
        """See `Backend.abort`."""
        for digest in digests:
            self._jobs.pop(digest, None)

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`; the revision is a digest of what the folder or file holds."""
        revision = content_digest(Path(source).expanduser())
        self._adapters.setdefault(qualify(name, revision), checkpoint_source(source))
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """See `Backend.drop_adapter`."""
        self._adapters.pop(adapter, None)

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._jobs.clear()
        if self._memory is not None:
            self._memory.clear()
