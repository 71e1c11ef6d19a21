"""The synthetic backend: generates rows without a model, for tests and load tests.

A step sleeps for the simulated time: `step_ms`, plus `token_ms` for each token that the step computes. A simulated
prefix cache of `kv_cache_tokens` tokens holds recent prompts. Tokens that a prompt shares with a held prompt are free.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.adapter import qualify, revision_of
from lmpool.protocol.job import decode_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, NewRows, RowBlock, VectorBlock, no_new_rows, widen_bf16
from lmpool.protocol.tensors import TensorType, apply_change, new_changes
from lmpool.protocol.version import check_base
from lmpool.settings import check_choice, check_name, check_number, check_numbers, option
from lmpool.synthetic import FEW_TOKENS, Draw, base_rows, draw, draw_few_tokens, fill, synthetic_vocabulary
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.checkpoint import checkpoint_source
from lmpool.workers.backends.lora import content_digest, read_adapter_folders
from lmpool.workers.backends.settings import max_adapters_option
from lmpool.workers.execution.contract import QUERY_ERRORS, Backend, BackendJob, BackendStats, Finished, failure_of

_TOGETHER = 4  # Min rows of a small vocabulary that are drawn together: for fewer rows, drawing one by one is faster.
_CRASH_EXIT = 70  # Exit code of a worker that received a prompt with the crash token.
_ID_BYTES = 4  # Bytes of a token id.
_BLOCK_BYTES = 16 * _ID_BYTES  # Bytes of the token ids of a block in the simulated prefix cache: 16 tokens.
_MAX_SEED = 2**62  # Largest seed that the generator of rows takes.
_TENSORS = {"seed": TensorType("I64", ())}  # The weights of a synthetic model.


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """Settings of a synthetic backend.

    Raises:
        SettingsError: a value is malformed.
    """

    kind: ClassVar[str] = "synthetic"

    name: str = option("Name to serve the model under.", "synthetic")
    vocab_size: int = option("V.", 49_152, least=1, most=4_000_000)
    seed: int = option("Seed of the rows.", 0, least=0, most=_MAX_SEED)
    step_ms: float = option("Simulated time of a step.", 0.0, least=0, most=600_000)
    token_ms: float = option("Simulated time per token that the prefix cache lacks.", 0.0, least=0, most=600_000)
    kv_cache_tokens: int = option("Tokens in the prefix cache, 0 for none.", 1_000_000, least=0, most=10**9)
    max_batch: int = option("Prompts in one step.", 32, least=1, most=65_536)
    max_prompt_tokens: int = option("Longest prompt to accept.", 131_072, least=1, most=4_000_000)
    encoding: str = option('"f32" or "bf16"; the rows are the same.', "f32")
    fail_token: int = option("Prompts with this id fail, to test error handling; -1 for none.", -1, least=-1)
    crash_token: int = option("Prompts with this id end the worker's process; -1 for none.", -1, least=-1)
    raise_token: int = option("The step of a prompt with this id raises MemoryError; -1 for none.", -1, least=-1)
    hang_token: int = option("The step of a prompt with this id never ends; -1 for none.", -1, least=-1)
    adapters: list[str] = option(
        "An adapter, as name=folder (or file), whose content determines its rows; may be given several times.", []
    )
    max_adapters: int = max_adapters_option()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_base("name", self.name)
        check_numbers(self)
        check_choice("encoding", self.encoding, ("f32", "bf16"))
        _ = self.adapter_folders  # The property raises an error if an adapter is malformed.

    @property
    def served_as(self) -> str:
        """The served name of the model, which is `name`."""
        return self.name

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Name of each adapter -> its folder or file."""
        return read_adapter_folders(self.adapters)

    def open(self) -> Backend:
        """Create the `SyntheticBackend` with these settings."""
        return SyntheticBackend(self)


class PrefixMemory:
    """A simulated prefix cache. It stores hashes of prefixes instead of keys and values.

    For each recent prompt, the cache holds every prefix of whole 16-token blocks, and every prefix that ends after the
    last whole block. So a prompt that extends a held prompt reuses all tokens of the held prompt. A prompt that
    branches off earlier reuses all shared tokens except at most 15.

    Args:
        capacity: max tokens to hold; the least recently used tokens are evicted first.

    Attributes:
        held: number of tokens that the cache holds; tokens of a prefix that prompts share count once.
    """

    def __init__(self, capacity: int) -> None:
        self.held = 0
        self._capacity = capacity
        # Hash of each held prefix -> number of tokens that it adds to the next shorter held prefix; most recent last.
        self._prefixes: OrderedDict[int, int] = OrderedDict()

    def note(self, ids: bytes, adapter: str = "") -> int:
        """Add the prefixes of a prompt; returns the number of its first tokens that the cache held before."""
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
        while start <= last_block:
            path.append(key := hash((key, ids[start : start + _BLOCK_BYTES])))
            start += _BLOCK_BYTES
            # Do not count the block's first tokens again if prefixes that end within the block hold them already.
            prefixes[key] = (start - max(start - _BLOCK_BYTES, known)) // _ID_BYTES
        for end in range(max(known, start) + _ID_BYTES, len(ids) + 1, _ID_BYTES):
            path.append(part := hash((key, ids[start:end])))
            prefixes[part] = 1
        self.held += (len(ids) - known) // _ID_BYTES
        # Mark the longest prefix as used first, so that it is evicted first: it is found only through shorter prefixes.
        for key in reversed(path):
            prefixes.move_to_end(key)
        while self.held > self._capacity:
            self.held -= prefixes.popitem(last=False)[1]
        return known // _ID_BYTES


class SyntheticBackend:
    """Draws rows as `lmpool.synthetic.synthetic_row` does."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self._encoding = Encoding[settings.encoding.upper()]
        faults = (settings.fail_token, settings.crash_token, settings.raise_token, settings.hang_token)
        self._has_faults = max(faults) >= 0
        self._jobs: dict[bytes, BackendJob] = {}
        self.adapters: dict[str, str] = {}
        self.batch, self.device = settings.max_batch, "cpu"
        self._stats = BackendStats()
        self._new_rows: NewRows = no_new_rows
        self._seed = settings.seed
        self._memory = self._new_memory()
        base_rows(settings.vocab_size, settings.seed)
        for name, folder in settings.adapter_folders.items():
            self.load_adapter(name, folder)

    def _new_memory(self) -> PrefixMemory | None:
        tokens = self._settings.kv_cache_tokens
        return PrefixMemory(tokens) if self._settings.token_ms > 0 and tokens > 0 else None

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

    def vocabulary(self) -> Vocabulary:
        """See `Backend.vocabulary`; returns `lmpool.synthetic.synthetic_vocabulary`."""
        return synthetic_vocabulary(self._settings.vocab_size, self._settings.seed)

    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return 2 * self.batch - len(self._jobs)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """See `Backend.submit`."""
        for job in jobs:
            self._jobs[job.digest] = job

    def step(self) -> Finished:
        """See `Backend.step`."""
        started = time.monotonic()
        jobs = list(islice(self._jobs.values(), self.batch))
        failures = self._injected_failures(jobs) if self._has_faults else {}
        good = [job for job in jobs if job.digest not in failures] if failures else jobs
        rows = [job for job in good if job.positions is None]
        vectors = self._vectors(good, failures) if len(rows) < len(good) else {}
        blocks = [self._draw(rows)] if rows else []
        tokens, reused = sum([len(job.ids) for job in good]) // _ID_BYTES, 0
        for job in jobs:
            del self._jobs[job.digest]
            if self._memory is not None and not job.fresh and job.digest not in failures:
                # Positions whose values a query requests are always computed, even if the cache holds their tokens.
                reused += min(self._memory.note(job.ids, job.adapter), job.span.start)
        stats = self._stats
        rows_so_far = stats.rows + len(good)
        self._stats = BackendStats(stats.steps + 1, rows_so_far, stats.tokens + tokens, stats.reused + reused)
        simulated_ms = self._settings.step_ms + self._settings.token_ms * (tokens - reused)
        if simulated_ms and (rest := simulated_ms / 1000 - (time.monotonic() - started)) > 0:
            time.sleep(rest)
        return Finished(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _injected_failures(self, jobs: list[BackendJob]) -> dict[bytes, str]:
        """Fail as the settings say: return digest -> message of failed prompts, raise, hang, or end the process."""
        settings, failures = self._settings, {}
        for job in jobs:
            tokens = set(decode_ids(job.ids).tolist())
            if settings.crash_token in tokens:
                os._exit(_CRASH_EXIT)
            if settings.raise_token in tokens:
                raise MemoryError(f"the prompt contains the token {settings.raise_token}, for which there is no memory")
            while settings.hang_token in tokens:
                time.sleep(3600)
            if settings.fail_token in tokens:
                failures[job.digest] = f"this worker was told to fail on the token {settings.fail_token} of the prompt"
        return failures

    def _draw(self, jobs: list[BackendJob]) -> RowBlock:
        settings, is_f32 = self._settings, self._encoding is Encoding.F32
        digests = [job.digest for job in jobs]
        if settings.vocab_size <= FEW_TOKENS and len(jobs) >= _TOGETHER:
            prompts = [(job.ids, revision_of(job.adapter) if job.adapter else "") for job in jobs]
            few, few_log_z = draw_few_tokens(prompts, settings.vocab_size, self._seed, bits=not is_f32)
            return RowBlock(digests, few, None if is_f32 else few_log_z, self._encoding)
        numbers = self._new_rows(len(jobs), settings.vocab_size, self._encoding)
        if numbers is None:
            numbers = np.empty((len(jobs), settings.vocab_size), self._encoding.dtype)
        log_z = np.empty(len(jobs), np.float32)
        for index, job in enumerate(jobs):
            base, shifts = self._drawn(job.ids, job.adapter)
            fill(numbers[index], base.logprobs if is_f32 else base.bits, shifts)
            log_z[index] = base.log_z
        return RowBlock(digests, numbers, None if is_f32 else log_z, self._encoding)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._new_rows = new_rows

    def _drawn(self, ids: bytes, adapter: str) -> Draw:
        return draw(ids, self._settings.vocab_size, self._seed, revision_of(adapter) if adapter else "")

    def _vectors(self, jobs: list[BackendJob], failures: dict[bytes, str]) -> dict[bytes, NDArray[np.float32]]:
        """The answers of the positions queries among the jobs. Adds queries that fail to `failures`."""
        vectors, bits = {}, np.empty(self._settings.vocab_size, np.uint16)
        for job in jobs:
            if (query := job.positions) is None:
                continue
            tokens, parts = decode_ids(job.ids), []
            try:
                for at in job.span:
                    base, shifts = self._drawn(job.ids[: _ID_BYTES * (at + 1)], job.adapter)
                    fill(bits, base.bits, shifts)
                    logits, log_z = widen_bf16(bits)[None], np.array([base.log_z], np.float32)
                    parts.append(query.of(logits, log_z, range(at, at + 1), tokens[at + 1 : at + 2]).copy().ravel())
                vectors[job.digest] = np.concatenate(parts)
            except QUERY_ERRORS as error:
                failures[job.digest] = failure_of(error)
        return vectors

    def abort(self, digests: Collection[bytes]) -> None:
        """See `Backend.abort`."""
        for digest in digests:
            self._jobs.pop(digest, None)

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`; the revision is a digest of the contents of the folder or file."""
        revision = content_digest(Path(source).expanduser())
        self.adapters.setdefault(qualify(name, revision), checkpoint_source(source))
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """See `Backend.drop_adapter`."""
        self.adapters.pop(adapter, None)

    def tensors(self) -> Mapping[str, TensorType]:
        """See `ChangesWeights.tensors`: one number, the seed of the rows."""
        return _TENSORS

    def load_weights(self, full: Path | None, sparse: Sequence[Path], held: int) -> None:
        """See `ChangesWeights.load_weights`. A seed that the settings refuse is refused, as a NaN is."""
        seed = np.array(self._seed)
        if full is None and held < 0:
            seed, held = np.array(self._settings.seed), 0
        for change in new_changes(full or Path(), sparse, held, _TENSORS).get("seed", ()):
            apply_change(seed, change)
        self._seed = check_number("weights: the seed", int(seed), 0, _MAX_SEED)
        self._memory = self._new_memory()

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._jobs.clear()
        self._memory = None
