"""The hf backend: waiting prompts in, one padded forward a step, rows out."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.adapter import qualify
from lmpool.protocol.job import decode_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import HeadQuery
from lmpool.protocol.row import Encoding, NewRows, RowBlock, VectorBlock, pack_numbers
from lmpool.workers.backends.checkpoint import checkpoint_source
from lmpool.workers.backends.hf.adapters import HfAdapters
from lmpool.workers.backends.hf.batching import (
    MIN_BULK_TOKENS,
    MIN_BULK_TOKENS_CPU,
    PREFILL,
    BatchLimit,
    BatchRules,
    BulkLimit,
    Chunk,
    Progress,
    choose,
    choose_shorter,
    shared_prefix,
)
from lmpool.workers.backends.hf.forward import Abilities, Forward, check_model, new_tokens
from lmpool.workers.backends.hf.kv_pool import ROOT, KVPool, Mark, PrefixSlots
from lmpool.workers.backends.hf.model import find_head, load_model, numbers_of
from lmpool.workers.backends.positions import NO_DISTRIBUTION, values_at_positions
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.backends.tokenizer import TellsTexts
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished, is_device_error

_log = logging.getLogger(__name__)

_NO_LIMIT = 2**62

_CPU_CHUNK, _CHUNK = 512, 2048
"""Tokens of a prompt that make a step worth its while: more would not be faster by much, only longer."""

_HELD_LOGITS = 1 << 25
"""Logits that a forward may leave (128 MiB in float32), unless a batch of rows needs more."""

_UNSOUND = np.empty(0, np.float32)
"""In place of what is wanted of positions whose hidden states are not finite."""

_NO_PROGRESS = Progress()
"""Of a job whose first chunk is yet to come."""


class _Answer(NamedTuple):
    """What became of a batch: rows, digest -> message of prompts that failed, digest -> vector."""

    block: RowBlock | None
    failures: dict[bytes, str]
    vectors: dict[bytes, NDArray[np.float32]]


class _Known(NamedTuple):
    """The next chunk of a prompt, and what it was made from: it holds until one of these changes.

    Attributes:
        chunk: the chunk.
        progress: of the job.
        limit: tokens that a step might compute of the prompt.
        end: up to which token held slots were looked up.
        slots: where.
        mark: of the path that was found.
    """

    chunk: Chunk
    progress: Progress
    limit: int
    end: int = 0
    slots: PrefixSlots | None = None
    mark: Mark | None = None

    @property
    def path(self) -> list[int]:
        """The slots of the path that are still held."""
        chunk, slots, mark = self.chunk, self.slots, self.mark
        return chunk.path if slots is not None and mark is not None and slots.holds(chunk.path, mark) else []


class HfBackend(TellsTexts):
    """Serves one model of transformers; see `lmpool.workers.execution.contract.Backend`.

    Args:
        settings: what to load and how.

    Raises:
        SettingsError: the model cannot be loaded or run as the settings say.
    """

    _settings: HfSettings

    @torch.inference_mode()
    def __init__(self, settings: HfSettings) -> None:
        loaded = load_model(settings)
        model = loaded.model
        self._settings = settings
        self._forward = Forward(model)
        self._encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        _log.info("weights are loaded: trying how prompts can run together")
        try:
            abilities = check_model(self._forward, loaded.max_prompt_tokens)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            # What model code raises when it cannot run a plain prompt; there is no common type.
            raise SettingsError(f"model: {settings.model} cannot run a prompt: {first_line(error)}") from error
        self._pool = _open_pool(settings, abilities, self._forward.device)
        self._rules = BatchRules(
            tokens=settings.max_batch_tokens,
            logits=max(settings.max_batch, _HELD_LOGITS // abilities.logits.shape[-1]),
            kv_tokens=max(self._pool.capacity, settings.max_batch_tokens) if self._pool else _NO_LIMIT,
            pads=abilities.pads,
            horizon=abilities.horizon,
            chunk=_chunk_tokens(settings, self._forward.device, abilities.attention),
            shares=self._pool is not None,
        )
        self._log_longest(loaded.max_prompt_tokens)
        self._limit = BatchLimit(settings.max_batch)
        least = MIN_BULK_TOKENS_CPU if self._forward.device.type == "cpu" else MIN_BULK_TOKENS
        self._bulk_limit = BulkLimit(self._rules.chunk, least, self._rules.tokens)
        self._bulk_rules = self._rules
        self._shorter_went_first = False
        self._head = find_head(model, abilities.logits.shape[-1])
        self._waiting: dict[bytes, BackendJob] = {}
        self._progress: dict[bytes, Progress] = {}
        self._chunks: dict[bytes, _Known] = {}
        self._roots: dict[str, int] = {}
        self._stats = BackendStats()
        encoding = self._encoder.encoding_of(abilities.logits)
        self._info = ModelInfo(
            name=settings.served_as,
            backend="hf",
            vocab_size=abilities.logits.shape[-1],
            max_prompt_tokens=loaded.max_prompt_tokens,
            revision=_revision(loaded.revision, abilities.attention),
            dtype=str(model.dtype).removeprefix("torch."),
            encoding=encoding.name.lower(),
            positions=True,
            hidden=0 if self._head is None else self._head.size,
            lossy=encoding is Encoding.F16 and model.dtype != torch.float16,
            source=checkpoint_source(settings.model),
            gguf_file=settings.gguf_file or "",
        )
        self._adapters = HfAdapters(self._forward, settings.model)
        for name, source in settings.adapter_folders.items():
            self.load_adapter(name, source)

    @property
    def info(self) -> ModelInfo:
        """What the backend serves."""
        return self._info

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that prompts may name, and where they came from."""
        return self._adapters.sources

    @property
    def batch(self) -> int:
        """Prompts that make a full step."""
        return self._settings.max_batch

    @property
    def device(self) -> str:
        """Where the model lies."""
        return str(self._forward.device)

    def capacity(self) -> int:
        """Room for one batch beside the one that runs."""
        return max(0, 2 * self._settings.max_batch - len(self._waiting))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs; one that is held already is computed once, and as one of bulk clients only if it always was."""
        for job in jobs:
            if self._waiting.setdefault(job.digest, job).bulk and not job.bulk:
                self._waiting[job.digest] = job

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that wait."""
        for digest in digests:
            self._waiting.pop(digest, None)
            self._progress.pop(digest, None)
            self._chunks.pop(digest, None)

    def load_adapter(self, name: str, source: str) -> str:
        """Load a LoRA adapter with peft; returns its revision.

        Raises:
            SettingsError: peft is missing, or the adapter cannot be had or does not fit.
        """
        revision = self._adapters.load(name, source)
        if self._pool is not None:
            self._roots.setdefault(qualify(name, revision), self._pool.new_root())
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter. Its keys and values can be found no more, and make room in time."""
        self._adapters.drop(adapter)
        self._roots.pop(adapter, None)

    def stats(self) -> BackendStats:
        """Counters since the start."""
        return self._stats

    def close(self) -> None:
        """Free the model, the KV pool and what waits. The backend cannot be used afterwards."""
        self._waiting.clear()
        self._progress.clear()
        self._chunks.clear()
        self._pool = None
        del self._forward, self._adapters
        self._free_memory()

    def head(self, query: HeadQuery) -> NDArray[np.float32]:
        """See `TellsHead.head`."""
        assert self._head is not None  # Else the info says so, and nobody asks.
        return self._head.answer(query)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._encoder.new_rows = new_rows

    @torch.inference_mode()
    def step(self) -> Finished:
        """Run one batch: the one of the oldest prompt, or every second time one of much shorter prompts before it.

        Prompts of bulk clients have steps of their own, of few tokens (`BulkLimit`).
        """
        self._bulk_rules = self._rules.with_at_most(self._bulk_limit.tokens)
        jobs, others = self._next_jobs()
        waiting = {job.digest: self._next_chunk(job) for job in jobs}
        is_bulk, rows = jobs[0].bulk, self._limit.rows
        rules = self._bulk_rules if is_bulk else self._rules
        batch: Mapping[bytes, Chunk] = choose(waiting, rows, rules)
        if not is_bulk:
            is_late = self._shorter_went_first
            shorter: Mapping[bytes, Chunk] = {} if is_late else choose_shorter(batch, waiting, rows, rules)
            self._shorter_went_first = bool(shorter)
            batch = shorter or batch
        if self._pool is not None:
            begun = [chunk.path for chunk in waiting.values() if chunk.begun][:1]
            interrupted = (job for job in others if job.digest in self._progress)
            begun += [self._next_chunk(job).path for job in islice(interrupted, 1)]
            self._pool.held = begun
        # Before the step: it extends the paths of the chunks, after which little is new.
        tokens = len(batch) * max(chunk.new for chunk in batch.values())
        began = time.monotonic()
        answers = self._answer(batch)
        seconds = time.monotonic() - began
        if is_bulk:
            self._bulk_limit.bulk_step(tokens, seconds)
        else:
            self._bulk_limit.interactive_step(seconds)
        vectors = {digest: vector for answer in answers for digest, vector in answer.vectors.items()}
        finished = Finished(
            [answer.block for answer in answers if answer.block is not None],
            {digest: text for answer in answers for digest, text in answer.failures.items()},
            VectorBlock(list(vectors), list(vectors.values())) if vectors else None,
        )
        self.abort(finished.digests)
        return finished

    def _next_jobs(self) -> tuple[list[BackendJob], list[BackendJob]]:
        """The jobs that the next step may be about, those of bulk clients or the others; and the rest."""
        bulk = [job for job in self._waiting.values() if job.bulk]
        others = [job for job in self._waiting.values() if not job.bulk] if bulk else [*self._waiting.values()]
        if bulk and self._bulk_limit.is_turn(others_wait=bool(others)):
            return bulk, others
        return others, bulk

    def _log_longest(self, max_prompt_tokens: int) -> None:
        """Say from which length on a prompt keeps short ones waiting, if there is one."""
        if self._pool is None:
            return
        bounds = (
            (self._pool.capacity, "--kv-cache-bytes has room for no more"),
            (self._rules.horizon, "a longer one gives its beginning other values (sliding window, or RoPE)"),
        )
        most, reason = min(bounds)
        if most < max_prompt_tokens:
            _log.info("prompts are computed in chunks up to %d tokens: %s", most, reason)

    def _next_chunk(self, job: BackendJob) -> Chunk:
        """What the next step computes of a prompt that waits: the same as before it, unless something has changed."""
        known, progress = self._chunks.get(job.digest), self._progress.get(job.digest, _NO_PROGRESS)
        rules = self._bulk_rules if job.bulk else self._rules
        is_same = known is not None and known.progress is progress and known.limit == rules.chunk
        if known is None or not is_same or not self._is_current(known, job):
            known = self._chunks[job.digest] = self._make_chunk(job, progress, known, rules)
        return known.chunk

    def _is_current(self, known: _Known, job: BackendJob) -> bool:
        """Whether the pool still holds the path of a chunk, and no longer path of its prompt."""
        chunk, slots = known.chunk, known.slots
        if chunk.root is None or slots is None:
            return True
        if self._pool is None or slots is not self._pool.slots or len(known.path) < len(chunk.path):
            return False
        return slots.is_longest(_ids(job)[: known.end], chunk.path, chunk.root)

    def _make_chunk(self, job: BackendJob, progress: Progress, known: _Known | None, rules: BatchRules) -> _Known:
        """What the next step computes of a prompt.

        Args:
            job: of the prompt.
            progress: of the job.
            known: what the last chunk was made from, if there was one.
            rules: of the batches that the job may be in.
        """
        pool = self._pool
        length = end = len(job.ids) // 4
        longest = min(rules.horizon, pool.capacity) if pool is not None else 0
        kind, kept, later = "fresh" if job.fresh else "row", 1, 0
        if job.positions is not None:
            kind = "hidden" if job.positions.values == "hidden" else "vector"
            start = job.span.start + sum(map(len, progress.parts))
            most = rules.logits if length > longest else min(rules.logits, rules.chunk)
            end = min(job.span.stop, start + most)
            if start < rules.horizon:
                # A longer chunk gives its prefixes other logits than they have alone, so none crosses the horizon.
                end = min(end, rules.horizon)
            kept, later = end - start, job.span.stop - end
        if pool is None or end > rules.horizon or (job.fresh and end <= rules.chunk):
            whole = Chunk(end, [], kept, kind, job.adapter, None, shared_prefix(job.ids, end, 0), later)
            return _Known(whole, progress, rules.chunk)
        if not job.fresh:
            root = self._roots.get(job.adapter, ROOT)
        elif progress.root is not None:
            root = progress.root
        else:
            root = pool.new_root()
            self._progress[job.digest] = progress = progress._replace(root=root)
        slots, looked_up = pool.slots, end
        held = known.path if known is not None and known.slots is slots and known.chunk.root == root else []
        path = slots.match(_ids(job)[:end], root, held)
        chunk_end = min(len(path) + rules.chunk, pool.capacity)
        # A chunk that got no further than the last one, because the pool has lost that, would not end.
        if progress.reached < chunk_end < end and new_tokens(end, len(path), kept) > rules.chunk:
            kind, kept, later, end = PREFILL, 1, later + end - chunk_end, chunk_end
        shared = shared_prefix(job.ids, end, len(path))
        begun = progress.reached > 0 or bool(progress.parts)
        chunk = Chunk(end, path, kept, kind, job.adapter, root, shared, later, begun)
        return _Known(chunk, progress, rules.chunk, looked_up, slots, slots.mark(path))

    def _answer(self, batch: Mapping[bytes, Chunk], *, is_last_try: bool = False) -> list[_Answer]:
        """The rows of a batch, or of as many of its prompts as memory suffices for; the others keep waiting.

        Args:
            batch: the prompts.
            is_last_try: the batch is a prompt that runs alone again, after all memory was freed that could be.
        """
        try:
            return [self._compute(batch)]
        except Exception as error:
            out_of_memory = _is_out_of_memory(error)
            if not out_of_memory and is_device_error(error):
                raise
            message = first_line(error)
        # Only out here are the exception and the tensors that its frames hold gone.
        if out_of_memory:
            self._free_memory()
        digests = list(batch)
        if len(digests) == 1:
            if out_of_memory and not is_last_try:
                return self._answer_again(digests, is_last_try=True)
            return [_Answer(None, {digests[0]: f"the model failed on this prompt: {message}"}, {})]
        if out_of_memory:
            self._limit.too_large(len(digests))
            _log.warning("out of memory with %d prompts: running %d at once", len(digests), self._limit.rows)
            return self._answer_again(digests[: self._limit.rows])
        return [answer for digest in digests for answer in self._answer_again([digest])]

    def _answer_again(self, digests: Iterable[bytes], *, is_last_try: bool = False) -> list[_Answer]:
        # The pool may hold other prefixes by now.
        batch = {digest: self._next_chunk(self._waiting[digest]) for digest in digests}
        return self._answer(batch, is_last_try=is_last_try)

    def _compute(self, batch: Mapping[bytes, Chunk]) -> _Answer:
        digests, chunks = list(batch), list(batch.values())
        prompts = [_ids(self._waiting[digest])[: chunk.end] for digest, chunk in batch.items()]
        new = max(chunk.new for chunk in chunks)
        first = chunks[0]
        pool = self._pool if first.root is not None else None
        self._adapters.activate(first.adapter)
        kept, paths = [chunk.kept for chunk in chunks], [chunk.path for chunk in chunks]
        if first.kind == "hidden" and self._head is not None:
            with self._head.hidden_in_place_of_logits(max(kept)) as taken:
                self._forward.last_logits(prompts, kept, paths, pool, first.root or ROOT)
            if not taken:
                raise ValueError("this adapter has a head of its own: its hidden states are not told")
            (logits,) = taken
        else:
            logits = self._forward.last_logits(prompts, kept, paths, pool, first.root or ROOT)
        if first.kind == PREFILL:
            progress = self._progress.get(digests[0], _NO_PROGRESS)
            self._progress[digests[0]] = progress._replace(reached=first.end, computed=progress.computed + new)
            self._stats = self._stats._replace(steps=self._stats.steps + 1)
            return _Answer(None, {}, {})
        if first.kind in ("vector", "hidden"):
            answer = self._take(batch, logits)
        else:
            answer = _Answer(*self._encoder.encode(digests, logits[:, -1]), {})
        self._limit.fitted(len(batch))
        self._count(batch, new, answer)
        return answer

    def _count(self, batch: Mapping[bytes, Chunk], new: int, answer: _Answer) -> None:
        """Count a step; a prompt counts when it ends, with all that its chunks have computed.

        Args:
            batch: what the step was about.
            new: tokens that it has computed of each.
            answer: what became of it.
        """
        tokens = reused = ended = 0
        for digest, chunk in batch.items():
            progress = self._progress.get(digest, _NO_PROGRESS)
            computed = progress.computed + new
            if chunk.later and digest not in answer.failures:
                self._progress[digest] = progress._replace(computed=computed)
                continue
            ended += 1
            tokens += len(self._waiting[digest].ids) // 4
            reused += max(0, chunk.end - computed)
        stats = self._stats
        rows = ended - len(answer.failures)
        self._stats = BackendStats(stats.steps + 1, stats.rows + rows, stats.tokens + tokens, stats.reused + reused)

    def _take(self, batch: Mapping[bytes, Chunk], logits: Tensor) -> _Answer:
        """Take what is wanted of the positions of each chunk; vectors of the prompts that have all of theirs."""
        answer = _Answer(None, {}, {})
        # All of them before the first is noted: memory may run out, and then they are computed again.
        taken = {}
        for (digest, chunk), rows in zip(batch.items(), logits, strict=True):
            job, kept = self._waiting[digest], rows[-chunk.kept :]
            assert job.positions is not None
            # A position's logits predict the token after it.
            following = _ids(job)[chunk.end - chunk.kept + 1 : chunk.end + 1].tolist()
            if chunk.kind == "hidden":
                taken[digest] = pack_numbers(numbers_of(kept.cpu())) if kept.isfinite().all() else _UNSOUND
            else:
                taken[digest] = values_at_positions(kept, job.positions, following)
        for digest, part in taken.items():
            # Of hidden states in 16 bits, two numbers together may look like NaN.
            if part is _UNSOUND or (batch[digest].kind != "hidden" and np.isnan(part).any()):
                answer.failures[digest] = NO_DISTRIBUTION
                continue
            progress = self._progress.get(digest, _NO_PROGRESS)
            self._progress[digest] = progress = progress._replace(parts=(*progress.parts, part))
            if not batch[digest].later:
                answer.vectors[digest] = np.concatenate(progress.parts).ravel()
        return answer

    def _free_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _ids(job: BackendJob) -> memoryview:
    """A prompt's token ids, which are not copied."""
    return decode_ids(job.ids).data


def _revision(weights: str, attention: str) -> str:
    """The revision of a model: another one where attention is not transformers' default, for its rows are others."""
    return blake2b(f"{weights} {attention}".encode(), digest_size=16).hexdigest() if attention else weights


def _chunk_tokens(settings: HfSettings, device: torch.device, attention: str) -> int:
    # Eager attention holds a score for each pair of tokens.
    usual = _CPU_CHUNK if device.type == "cpu" or attention else _CHUNK
    return min(settings.chunked_prefill_size or usual, settings.max_batch_tokens)


def _open_pool(settings: HfSettings, abilities: Abilities, device: torch.device) -> KVPool | None:
    layout = abilities.layout
    capacity = layout.capacity(settings.kv_cache_bytes) if layout is not None else 0
    if layout is None or capacity == 0:
        return None
    try:
        return KVPool(layout, capacity, device)
    except RuntimeError as error:
        raise SettingsError(f"kv_cache_bytes: {settings.kv_cache_bytes} cannot be had: {first_line(error)}") from error


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory")
    )
