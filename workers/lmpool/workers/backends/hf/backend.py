"""The hf backend: one padded forward of a transformers model per step."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
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
    PromptChunk,
    choose,
    choose_shorter,
    shared_prefix,
)
from lmpool.workers.backends.hf.forward import (
    NO_MARK,
    ROOT,
    Forward,
    KVPool,
    Mark,
    Path,
    PrefixSlots,
    new_path,
    new_tokens,
)
from lmpool.workers.backends.hf.model import Abilities, check_model, find_head, load_model, numbers_of
from lmpool.workers.backends.row_encoder import NO_DISTRIBUTION, RowEncoder, values_at_positions
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.backends.tokenizer import TellsTexts
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished, is_device_error

_log = logging.getLogger(__name__)

_NO_LIMIT = 2**62  # Tokens; more than any prompt has.

# Tokens of a prompt in a step from which on more tokens are hardly faster each, only later: on a CPU, and elsewhere.
_CPU_CHUNK, _CHUNK = 512, 2048
# Logits that a forward may return (128 MiB in float32), unless a batch of rows needs more.
_MAX_LOGITS = 1 << 25
# Stands for the values of positions whose hidden states are not finite.
_UNSOUND = np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class PromptState:
    """How far a waiting prompt has got; it is the `state` of the prompt's job.

    A long prompt is computed one chunk at a time, so that others can run between. Values of positions are taken in
    chunks too, because the logits of all positions take too much memory.

    Attributes:
        ids: the token ids, not copied.
        reached: token up to which `PREFILL` chunks have filled the KV pool.
        computed: tokens that all chunks have computed.
        root: root of a long fresh prompt in the KV pool, where no other prompt finds it; None before its first chunk.
        parts: values of the positions so far, one array per chunk: float32 (n,) or (n, width).
        chunk: the next chunk; None if the prompt has changed since it was made.
        max_new: max tokens of a step when the chunk was made.
        looked_up: token up to which held slots were looked up.
        slots: table in which they were looked up; None if there is no use of the KV pool.
        path: the held slots.
        path_root: root of the path.
        mark: state of the path.
    """

    ids: memoryview
    reached: int = 0
    computed: int = 0
    root: int | None = None
    parts: list[NDArray[np.float32]] = field(default_factory=list)
    chunk: PromptChunk | None = None
    max_new: int = 0
    looked_up: int = 0
    slots: PrefixSlots | None = None
    path: Path = field(default_factory=new_path)
    path_root: int | None = None
    mark: Mark = NO_MARK

    @property
    def begun(self) -> bool:
        """Whether a step has computed a chunk."""
        return self.computed > 0

    def is_current(self, slots: PrefixSlots | None, max_new: int) -> bool:
        """Whether the chunk is still right: the pool holds its path, and no longer path of the prompt."""
        if self.chunk is None or self.max_new != max_new:
            return False
        if self.slots is None or self.path_root is None:
            return True
        if self.slots is not slots or not slots.holds(self.path, self.mark):
            return False
        return slots.is_longest(self.ids[: self.looked_up], self.path, self.path_root)


class _Results(NamedTuple):
    """The results of a batch: rows; digest -> message of failed prompts; digest -> vector."""

    block: RowBlock | None
    failures: dict[bytes, str]
    vectors: dict[bytes, NDArray[np.float32]]


class HfBackend(TellsTexts):
    """Serves one model of transformers; see `lmpool.workers.execution.contract.Backend`.

    Args:
        settings: the model, and how to run it.

    Raises:
        SettingsError: the model cannot be loaded or run with these settings.
    """

    _settings: HfSettings

    @torch.inference_mode()
    def __init__(self, settings: HfSettings) -> None:
        loaded = load_model(settings)
        model = loaded.model
        self._settings = settings
        self._forward = Forward(model)
        self._encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        _log.info("weights are loaded: checking how prompts can run together")
        try:
            abilities = check_model(self._forward, loaded.max_prompt_tokens)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            # Model code that cannot run a plain prompt raises these; there is no common type.
            raise SettingsError(f"model: {settings.model} cannot run a prompt: {first_line(error)}") from error
        is_cpu = self._forward.device.type == "cpu"
        self._pool = _open_pool(settings, abilities, self._forward.device)
        # Eager attention holds a score for each pair of tokens.
        chunk = settings.chunked_prefill_size or (_CPU_CHUNK if is_cpu or abilities.attention else _CHUNK)
        self._rules = BatchRules(
            tokens=settings.max_batch_tokens,
            logits=max(settings.max_batch, _MAX_LOGITS // abilities.logits.shape[-1]),
            kv_tokens=max(self._pool.capacity, settings.max_batch_tokens) if self._pool else _NO_LIMIT,
            pads=abilities.pads,
            horizon=abilities.horizon,
            chunk=min(chunk, settings.max_batch_tokens),
            shares=self._pool is not None,
        )
        self._log_longest(loaded.max_prompt_tokens)
        self._limit = BatchLimit(settings.max_batch)
        least = MIN_BULK_TOKENS_CPU if is_cpu else MIN_BULK_TOKENS
        self._bulk_limit = BulkLimit(self._rules.chunk, least, self._rules.tokens)
        self._bulk_rules = self._rules
        self._shorter_went_first = False
        self._head = find_head(model, abilities.logits.shape[-1])
        self._waiting: dict[bytes, BackendJob] = {}
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
        self._has_adapters = False
        for name, source in settings.adapter_folders.items():
            self.load_adapter(name, source)

    @property
    def info(self) -> ModelInfo:
        """See `Backend.info`."""
        return self._info

    @property
    def adapters(self) -> dict[str, str]:
        """See `Backend.adapters`."""
        return self._adapters.sources

    @property
    def batch(self) -> int:
        """See `Backend.batch`."""
        return self._settings.max_batch

    @property
    def device(self) -> str:
        """See `Backend.device`."""
        return str(self._forward.device)

    def capacity(self) -> int:
        """One batch besides the one that runs."""
        return max(0, 2 * self._settings.max_batch - len(self._waiting))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs. A prompt that is held already is computed once; it stays a bulk prompt if both jobs are bulk."""
        for job in jobs:
            held = self._waiting.setdefault(job.digest, job)
            if held.state is None:
                held.state = PromptState(decode_ids(job.ids).data)
            if held is not job and held.bulk and not job.bulk:
                job.state = held.state
                self._waiting[job.digest] = job

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that wait."""
        for digest in digests:
            if (job := self._waiting.pop(digest, None)) is not None:
                job.state = None

    def load_adapter(self, name: str, source: str) -> str:
        """Load a LoRA adapter with peft; return its revision.

        Raises:
            SettingsError: peft is missing, or the adapter cannot be read or does not fit.
        """
        self._has_adapters = True
        revision = self._adapters.load(name, source)
        if self._pool is not None:
            self._roots.setdefault(qualify(name, revision), self._pool.new_root())
        return revision

    def drop_adapter(self, adapter: str) -> None:
        """Drop an adapter. No prompt finds its keys and values any more, so the pool frees them in time."""
        self._adapters.drop(adapter)
        self._roots.pop(adapter, None)

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """Free the model, the KV pool and the waiting prompts. The backend cannot be used afterwards."""
        self.abort(list(self._waiting))
        self._pool = None
        del self._forward, self._adapters
        self._free_memory()

    def head(self, query: HeadQuery) -> NDArray[np.float32]:
        """See `TellsHead.head`."""
        assert self._head is not None  # Otherwise the info says so, and the worker refuses the query.
        return self._head.answer(query)

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._encoder.new_rows = new_rows

    @torch.inference_mode()
    def step(self) -> Finished:
        """Run one batch: that of the oldest prompt, or every second time one of much shorter prompts before it.

        Bulk prompts have steps of their own, with few tokens (`BulkLimit`).
        """
        self._bulk_rules = self._rules.limited_to(self._bulk_limit.tokens)
        jobs, others = self._next_jobs()
        waiting = {job.digest: self._next_chunk(job) for job in jobs}
        is_bulk, max_rows = jobs[0].bulk, self._limit.rows
        rules = self._bulk_rules if is_bulk else self._rules
        batch = choose(waiting, max_rows, rules)
        if not is_bulk:
            shorter = {} if self._shorter_went_first else choose_shorter(batch, waiting, max_rows, rules)
            self._shorter_went_first = bool(shorter)
            batch = shorter or batch
        if self._pool is not None:
            # The oldest prompt of each kind that has begun keeps its slots.
            begun = [chunk.path for chunk in waiting.values() if chunk.begun][:1]
            interrupted = next((job for job in others if job.state.begun), None)
            self._pool.held = begun if interrupted is None else [*begun, self._next_chunk(interrupted).path]
        tokens = len(batch) * max(chunk.new for chunk in batch.values())
        started = time.monotonic()
        results = self._run(batch)
        seconds = time.monotonic() - started
        if is_bulk:
            self._bulk_limit.bulk_step(tokens, seconds)
        else:
            self._bulk_limit.interactive_step(seconds)
        blocks = [result.block for result in results if result.block is not None]
        failures = {digest: text for result in results for digest, text in result.failures.items()}
        vectors = {digest: vector for result in results for digest, vector in result.vectors.items()}
        for block in blocks:
            self.abort(block.digests)
        self.abort([*failures, *vectors])
        return Finished(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _next_jobs(self) -> tuple[list[BackendJob], list[BackendJob]]:
        """The jobs that the next step chooses from, either bulk or interactive; and the other jobs."""
        bulk = [job for job in self._waiting.values() if job.bulk]
        others = [job for job in self._waiting.values() if not job.bulk] if bulk else [*self._waiting.values()]
        if bulk and self._bulk_limit.is_turn(others_wait=bool(others)):
            return bulk, others
        return others, bulk

    def _log_longest(self, max_prompt_tokens: int) -> None:
        """Log the length from which on a prompt makes short ones wait, if there is one."""
        if self._pool is None:
            return
        bounds = (
            (self._pool.capacity, "--kv-cache-bytes has no capacity for more"),
            (self._rules.horizon, "a longer prompt changes the values of its prefix (sliding window, or RoPE)"),
        )
        longest, reason = min(bounds)
        if longest < max_prompt_tokens:
            _log.info("prompts are computed in chunks up to %d tokens: %s", longest, reason)

    def _next_chunk(self, job: BackendJob) -> PromptChunk:
        """The next chunk of a waiting prompt: the same as before a step, unless something has changed."""
        state: PromptState = job.state
        rules = self._bulk_rules if job.bulk else self._rules
        slots = None if self._pool is None else self._pool.slots
        if state.chunk is None or not state.is_current(slots, rules.chunk):
            state.chunk, state.max_new = self._make_chunk(job, state, rules), rules.chunk
        return state.chunk

    def _make_chunk(self, job: BackendJob, state: PromptState, rules: BatchRules) -> PromptChunk:
        """The next chunk of a waiting prompt, in batches with these rules."""
        pool = self._pool
        length = end = len(state.ids)
        kind, kept, later = "fresh" if job.fresh else "row", 1, 0
        if job.positions is not None:
            kind = "hidden" if job.positions.values == "hidden" else "vector"
            span = job.positions.span(length)
            start = span.start + sum(map(len, state.parts))
            longest = min(rules.horizon, pool.capacity) if pool is not None else 0
            max_kept = rules.logits if length > longest else min(rules.logits, rules.chunk)
            end = min(span.stop, start + max_kept)
            if start < rules.horizon:
                # No chunk crosses the horizon: beyond it, prefixes have other logits than alone.
                end = min(end, rules.horizon)
            kept, later = end - start, span.stop - end
        if pool is None or end > rules.horizon or (job.fresh and end <= rules.chunk):
            state.slots = None
            return PromptChunk(end, new_path(), kept, kind, job.adapter, None, shared_prefix(job.ids, end, 0), later)
        if not job.fresh:
            root = self._roots.get(job.adapter, ROOT)
        else:
            root = state.root = pool.new_root() if state.root is None else state.root
        slots = pool.slots
        is_held = state.slots is slots and state.path_root == root and slots.holds(state.path, state.mark)
        known = state.path if is_held else slots.recall(job.ids[: 4 * end], root)
        path = slots.match(state.ids[:end], root, known)
        state.slots, state.path, state.path_root, state.looked_up = slots, path, root, end
        state.mark = slots.mark(path)
        chunk_end = min(len(path) + rules.chunk, pool.capacity)
        # A prompt that got no further than its last chunk, because the pool lost that, would never end.
        if state.reached < chunk_end < end and new_tokens(end, len(path), kept) > rules.chunk:
            kind, kept, later, end = PREFILL, 1, later + end - chunk_end, chunk_end
        shared = shared_prefix(job.ids, end, len(path))
        return PromptChunk(end, path, kept, kind, job.adapter, root, shared, later, state.begun)

    def _run(self, batch: Mapping[bytes, PromptChunk], *, is_last_try: bool = False) -> list[_Results]:
        """Compute a batch, or as many of its prompts as memory suffices for; the others keep waiting.

        Args:
            batch: digest -> chunk.
            is_last_try: the batch is one prompt that runs again, after all possible memory was freed.
        """
        try:
            return [self._compute(batch)]
        except Exception as error:
            out_of_memory = _is_out_of_memory(error)
            if not out_of_memory and is_device_error(error):
                raise
            message = first_line(error)
        # Outside of `except`, the exception and the tensors in its frames are freed.
        if out_of_memory:
            self._free_memory()
        digests = list(batch)
        if len(digests) == 1:
            if out_of_memory and not is_last_try:
                return self._run_again(digests, is_last_try=True)
            return [_Results(None, {digests[0]: f"the model failed on this prompt: {message}"}, {})]
        if out_of_memory:
            self._limit.too_large(len(digests))
            _log.warning("out of memory with %d prompts: running %d at once", len(digests), self._limit.rows)
            return self._run_again(digests[: self._limit.rows])
        return [result for digest in digests for result in self._run_again([digest])]

    def _run_again(self, digests: Iterable[bytes], *, is_last_try: bool = False) -> list[_Results]:
        # The pool may hold other prefixes now.
        batch = {digest: self._next_chunk(self._waiting[digest]) for digest in digests}
        return self._run(batch, is_last_try=is_last_try)

    def _compute(self, batch: Mapping[bytes, PromptChunk]) -> _Results:
        digests, chunks = list(batch), list(batch.values())
        states: list[PromptState] = [self._waiting[digest].state for digest in digests]
        prompts = [state.ids[: chunk.end] for state, chunk in zip(states, chunks, strict=True)]
        new, first = max(chunk.new for chunk in chunks), chunks[0]
        pool = self._pool if first.root is not None else None
        root = first.root or ROOT
        if self._has_adapters:
            self._adapters.activate(first.adapter)
        kept, paths = [chunk.kept for chunk in chunks], [chunk.path for chunk in chunks]
        if first.kind == "hidden" and self._head is not None:
            with self._head.hidden_in_place_of_logits(max(kept)) as taken:
                self._forward.last_logits(prompts, kept, paths, pool, root)
            if not taken:
                raise ValueError("this adapter has a head of its own: hidden states are not returned")
            (logits,) = taken
        else:
            logits = self._forward.last_logits(prompts, kept, paths, pool, root)
        if pool is not None:
            for state in states:
                # The path has grown.
                state.mark = pool.slots.mark(state.path)
        if first.kind == PREFILL:
            states[0].reached = first.end
            self._count(batch, new, _Results(None, {}, {}))
            return _Results(None, {}, {})
        if first.kind in ("vector", "hidden"):
            results = self._take(batch, logits)
        else:
            results = _Results(*self._encoder.encode(digests, logits[:, -1]), {})
        self._limit.fitted(len(batch))
        self._count(batch, new, results)
        if pool is not None and first.kind != "fresh":
            for digest, chunk in batch.items():
                pool.slots.remember(self._waiting[digest].ids[: 4 * chunk.end], chunk.path, root)
        return results

    def _count(self, batch: Mapping[bytes, PromptChunk], new: int, results: _Results) -> None:
        """Count a step that computed `new` tokens of each prompt. A prompt counts when it ends, with all its chunks."""
        tokens = reused = ended = 0
        for digest, chunk in batch.items():
            state: PromptState = self._waiting[digest].state
            state.computed += new
            state.chunk = None
            if not chunk.later or digest in results.failures:
                ended += 1
                tokens += len(state.ids)
                reused += max(0, chunk.end - state.computed)
        stats = self._stats
        rows = ended - len(results.failures)
        self._stats = BackendStats(stats.steps + 1, stats.rows + rows, stats.tokens + tokens, stats.reused + reused)

    def _take(self, batch: Mapping[bytes, PromptChunk], logits: Tensor) -> _Results:
        """Take the requested values of the positions of each chunk; return the vectors that are complete."""
        # All before the first is recorded: memory may run out, and then they are computed again.
        taken = {}
        for (digest, chunk), rows in zip(batch.items(), logits, strict=True):
            job, kept = self._waiting[digest], rows[-chunk.kept :]
            assert job.positions is not None
            # A position's logits predict the token after it.
            following = job.state.ids[chunk.end - chunk.kept + 1 : chunk.end + 1].tolist()
            if chunk.kind == "hidden":
                taken[digest] = pack_numbers(numbers_of(kept.cpu())) if kept.isfinite().all() else _UNSOUND
            else:
                taken[digest] = values_at_positions(kept, job.positions, following)
        results = _Results(None, {}, {})
        for digest, part in taken.items():
            # Two hidden states of 16 bits together may look like NaN.
            if part is _UNSOUND or (batch[digest].kind != "hidden" and np.isnan(part).any()):
                results.failures[digest] = NO_DISTRIBUTION
                continue
            parts = self._waiting[digest].state.parts
            parts.append(part)
            if not batch[digest].later:
                results.vectors[digest] = np.concatenate(parts).ravel()
        return results

    def _free_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _revision(weights: str, attention: str) -> str:
    """The revision of a model; another one if attention is not transformers' default, because the rows differ."""
    return blake2b(f"{weights} {attention}".encode(), digest_size=16).hexdigest() if attention else weights


def _open_pool(settings: HfSettings, abilities: Abilities, device: torch.device) -> KVPool | None:
    layout = abilities.layout
    capacity = layout.capacity(settings.kv_cache_bytes) if layout is not None else 0
    if layout is None or capacity == 0:
        return None
    try:
        return KVPool(layout, capacity, device)
    except RuntimeError as error:
        text = f"kv_cache_bytes: {settings.kv_cache_bytes} bytes cannot be allocated: {first_line(error)}"
        raise SettingsError(text) from error


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory")
    )
