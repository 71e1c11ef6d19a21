"""The hf backend: computes rows, values and hidden states with one padded forward of a transformers model per step."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.job import decode_ids
from lmpool.protocol.row import RowBlock, VectorBlock
from lmpool.protocol.tensors import TensorType
from lmpool.workers.backends.engines import EngineBackend
from lmpool.workers.backends.hf import batching
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.adapters import HfAdapters
from lmpool.workers.backends.hf.batching import PREFILL, BatchRules, PromptChunk
from lmpool.workers.backends.hf.forward import ROOT, Forward, KVPool, new_path, new_tokens
from lmpool.workers.backends.hf.placement import is_offloaded
from lmpool.workers.backends.hf.weights import ReplaceableWeights
from lmpool.workers.backends.lora import weights_of
from lmpool.workers.backends.row_encoder import MAX_LOGITS, NO_DISTRIBUTION, RowEncoder, values_at_positions
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished, is_device_error

_log = logging.getLogger(__name__)

_NO_LIMIT = 2**62  # A number of tokens that no batch reaches.

# Default max tokens of one prompt in a step, on a CPU and on other devices: more tokens hardly save time per token.
_CPU_CHUNK, _CHUNK = 512, 2048


@dataclass(slots=True, eq=False)
class PromptState:
    """Progress of a waiting prompt, stored as the `state` of the prompt's job.

    A long prompt is computed one chunk per step, so that other prompts can run between its chunks. Values at positions
    are computed in chunks too, because the logits of all positions together take too much memory.
    """

    ids: memoryview  # Token ids of the prompt, not copied.
    reached: int = 0  # Number of the prompt's first tokens that `PREFILL` chunks have put into the KV pool.
    computed: int = 0  # Number of tokens that all chunks so far have computed.
    # Root in the KV pool that only this prompt uses, because it is long and "fresh" (shares no cached tokens); or None.
    root: int | None = None
    # Values at positions that were computed so far, one array per chunk: float32 (n,) or (n, width).
    parts: list[NDArray[np.float32]] = field(default_factory=list)
    # The next chunk of the prompt; after a step, the chunk that the step has computed.
    chunk: PromptChunk | None = None


@dataclass(slots=True)
class _Results:
    """The results of a running step: blocks of rows; digest -> message of failed prompts; digest -> values."""

    blocks: list[RowBlock] = field(default_factory=list)
    failures: dict[bytes, str] = field(default_factory=dict)
    vectors: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)


class HfBackend(EngineBackend):
    """Serves one model of transformers; see `lmpool.workers.execution.contract.Backend`.

    Raises:
        SettingsError: the model cannot be loaded or run with these settings.
    """

    _settings: HfSettings
    _held: dict[bytes, BackendJob]

    @torch.inference_mode()
    def __init__(self, settings: HfSettings) -> None:
        super().__init__(settings)
        model, max_prompt_tokens, revision, folder = hf_model.load_model(settings)
        self._forward = Forward(model)
        self._encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        _log.info("weights are loaded: checking how prompts can run together")
        try:
            abilities = hf_model.check_model(self._forward, max_prompt_tokens)
        except hf_model.FORWARD_ERRORS as error:
            name, where = ("device_map", " in parts") if settings.device_map else ("model", "")
            text = f"{name}: {settings.model} cannot run a prompt{where}: {first_line(error)}"
            raise SettingsError(text) from error
        self.batch, self.device = settings.max_batch, str(self._forward.device)
        is_cpu, vocab_size = self._forward.device.type == "cpu", abilities.vocab_size
        self._pool: KVPool | None = None
        if (layout := abilities.layout) is not None and (capacity := layout.capacity(settings.kv_cache_bytes)):
            try:
                self._pool = KVPool(layout, capacity)
            except RuntimeError as error:
                text = f"kv_cache_bytes: {settings.kv_cache_bytes} bytes cannot be allocated: {first_line(error)}"
                raise SettingsError(text) from error
            longest, reason = min(
                (capacity, "--kv-cache-bytes has no capacity for more"),
                (abilities.horizon, "a longer prompt changes the values of its prefix (sliding window, or RoPE)"),
            )
            if longest < max_prompt_tokens:
                _log.info("prompts are computed in chunks up to %d tokens: %s", longest, reason)
        # Use the smaller chunk for eager attention, which stores a score for each pair of tokens.
        chunk = settings.chunked_prefill_size or (_CPU_CHUNK if is_cpu or abilities.attention else _CHUNK)
        self._rules = BatchRules(
            tokens=settings.max_batch_tokens,
            # Max logits of a forward, or of the head at once. A batch of rows may need more.
            logits=max(settings.max_batch, MAX_LOGITS // vocab_size),
            kv_tokens=max(self._pool.capacity, settings.max_batch_tokens) if self._pool else _NO_LIMIT,
            pads=abilities.pads,
            horizon=abilities.horizon,
            chunk=min(chunk, settings.max_batch_tokens),
            shares=self._pool is not None,
        )
        self._limit = batching.BatchLimit(settings.max_batch)
        least = batching.MIN_BULK_TOKENS_CPU if is_cpu else batching.MIN_BULK_TOKENS
        bulk_limit = partial(batching.BulkLimit, self._rules.chunk, least, self._rules.tokens)
        self._bulk_limit = bulk_limit()
        self._bulk_rules = self._rules
        self._shorter_went_first = False
        self._head, self._is_exact_head = hf_model.find_head(model, vocab_size)
        layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        names = (name.rpartition(".")[2] for name, module in model.named_modules() if module is layer)
        self._head_name = next(names, self._head_name)
        if abilities.attention:  # Eager attention computes slightly different rows, so change the revision.
            revision = blake2b(f"{revision} {abilities.attention}".encode(), digest_size=16).hexdigest()
        self._roots: dict[str, int] = {}
        self._adapters = HfAdapters(self._forward, settings.model)
        self._folder = Path(settings.model)
        # Do this before peft renames weights for adapters. Quantised weights cannot be read in inference mode.
        with torch.inference_mode(mode=False):
            self._weights = weights_of(model.state_dict().items())
            self._replaceable = ReplaceableWeights(model, folder, settings)
        self._prepare(
            model.dtype,
            vocab_size=vocab_size,
            max_prompt_tokens=max_prompt_tokens,
            revision=revision,
            positions=True,
            gguf_file=settings.gguf_file or "",
        )
        # Forget the prompts of the checks, which no client has requested.
        self._bulk_limit = bulk_limit()
        if self._pool is not None:
            self._pool.clear()

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Accept jobs. Two jobs with one digest are computed once, with interactive priority unless both are bulk."""
        for job in jobs:
            held = self._held.setdefault(job.digest, job)
            if held.state is None:
                held.state = PromptState(decode_ids(job.ids).data)
            if held is not job and held.bulk and not job.bulk:
                job.state = held.state
                self._held[job.digest] = job

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop waiting jobs."""
        for digest in digests:
            if (job := self._held.pop(digest, None)) is not None:
                job.state = None

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`."""
        if is_offloaded(self._forward.model):
            reason = "parts of the model are offloaded, and adapters need all its weights in memory"
            remedy = "give its device more memory (--max-memory), or serve it without adapters"
            raise SettingsError(f"adapters: {name!r} cannot be loaded: {reason}; {remedy}")
        return super().load_adapter(name, source)

    def _load(self, adapter: str, folder: Path) -> None:
        self._adapters.load(adapter, folder)
        if self._pool is not None:
            self._roots[adapter] = self._pool.new_root()

    def _read_factors(self, adapter: str, folder: Path) -> tuple[Any, Any] | str | None:
        if self._adapters.replaces_head(adapter):
            return f"the adapter {folder.name} has a head, or rows of the head, of its own"
        return super()._read_factors(adapter, folder)

    def _unload(self, adapter: str) -> None:
        """Drop an adapter. The KV pool evicts the adapter's keys and values later, because no prompt uses them."""
        self._adapters.drop(adapter)
        self._roots.pop(adapter, None)

    def tensors(self) -> Mapping[str, TensorType]:
        """See `ChangesWeights.tensors`."""
        return self._replaceable.types

    def load_weights(self, full: Path | None, sparse: Sequence[Path], held: int) -> None:
        """See `ChangesWeights.load_weights`. Adapters and the head refer to the weights, which are changed in place."""
        if self._pool is not None:
            self._pool.clear()
        self._replaceable.load(full, sparse, held)

    @property
    def devices(self) -> list[str]:
        """See `TellsDevices.devices`: the GPUs that hold layers, or the only device."""
        places = getattr(self._forward.model, "hf_device_map", {}).values()
        named = dict.fromkeys(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places)
        return [name for name in named if name not in ("cpu", "disk")] or [self.device]

    def close(self) -> None:
        """Free the model, the KV pool and the waiting prompts. The backend cannot be used afterwards."""
        self.abort(list(self._held))
        self._pool = None
        folder: Any = self._forward.model.lmpool_offloaded
        if folder is not None:
            folder.cleanup()
        del self._forward, self._adapters, self._replaceable
        self._weights = None
        self._free_memory()

    @torch.inference_mode()
    def step(self) -> Finished:
        """Run one batch: the oldest prompt and similar prompts, or (at most every second step) a much shorter batch.

        Bulk prompts run in steps of their own; `BulkLimit` limits the tokens of these steps.
        """
        bulk = [job for job in self._held.values() if job.bulk]
        others = [job for job in self._held.values() if not job.bulk] if bulk else [*self._held.values()]
        is_bulk = bool(bulk) and self._bulk_limit.is_turn(others_wait=bool(others))
        jobs, others = (bulk, others) if is_bulk else (others, bulk)
        rules, most, max_rows = self._rules, self._bulk_limit.tokens, self._limit.rows
        self._bulk_rules = rules._replace(tokens=min(rules.tokens, most), chunk=min(rules.chunk, most))
        rules = self._bulk_rules if is_bulk else rules
        waiting = {job.digest: self._next_chunk(job) for job in jobs}
        batch = batching.choose(waiting, max_rows, rules)
        if not is_bulk:
            shorter = {} if self._shorter_went_first else batching.choose_shorter(batch, waiting, max_rows, rules)
            self._shorter_went_first = bool(shorter)
            batch = shorter or batch
        if self._pool is not None:
            # Keep the slots of two partly computed prompts: the oldest bulk prompt and the oldest interactive prompt.
            begun = [job for kind in (jobs, others) for job in [job for job in kind if job.state.computed][:1]]
            self._pool.held = [self._next_chunk(job).path for job in begun]
        tokens = len(batch) * max(chunk.new for chunk in batch.values())
        started, results = time.monotonic(), _Results()
        self._run(batch, results)
        seconds = time.monotonic() - started
        if is_bulk:
            self._bulk_limit.bulk_step(tokens, seconds)
        else:
            self._bulk_limit.interactive_step(seconds)
        vectors = VectorBlock(list(results.vectors), list(results.vectors.values())) if results.vectors else None
        finished = Finished(results.blocks, results.failures, vectors)
        self.abort(finished.digests)
        return finished

    def _next_chunk(self, job: BackendJob) -> PromptChunk:
        """The next chunk of a waiting prompt: the earlier chunk, if its limit and the pool are unchanged."""
        state: PromptState = job.state
        pool, chunk, rules = self._pool, state.chunk, self._bulk_rules if job.bulk else self._rules
        if chunk is not None and chunk.max_new == rules.chunk:
            ids, path, root = state.ids[: chunk.end], chunk.path, chunk.root
            if pool is None or root is None:
                return chunk
            if pool.slots.holds(path, chunk.mark) and pool.slots.is_longest(ids, path, root):
                return chunk
        length = end = len(state.ids)
        kind, kept, later = "fresh" if job.fresh else "row", 1, 0
        if job.positions is not None:
            # Logits of many positions take much memory: compute them from hidden states, some positions at a time.
            has_head = self._is_exact_head or (self._head is not None and job.positions.values == "hidden")
            kind = "states" if has_head and not self._adapters.replaces_head(job.adapter) else "vector"
            span = job.positions.span(length)
            start = span.start + sum(map(len, state.parts))
            longest = min(rules.horizon, pool.capacity) if pool is not None else 0
            most = rules.tokens if kind == "states" else rules.logits
            max_kept = most if length > longest else min(most, rules.chunk)
            end = min(span.stop, start + max_kept)
            if start < rules.horizon:
                # End the chunk at the horizon: a forward beyond the horizon changes the logits of a prompt's prefixes.
                end = min(end, rules.horizon)
            kept, later = end - start, span.stop - end
        if pool is None or end > rules.horizon or (job.fresh and end <= rules.chunk):
            root, path, mark = None, new_path(), 0
        else:
            slots = pool.slots
            if not job.fresh:
                root = self._roots.get(job.adapter, ROOT)
            else:
                root = state.root = pool.new_root() if state.root is None else state.root
            is_held = chunk is not None and chunk.root == root and slots.holds(chunk.path, chunk.mark)
            known = chunk.path if chunk is not None and is_held else slots.recall(job.ids[: 4 * end], root)
            path = slots.match(state.ids[:end], root, known)
            mark = slots.mark(path)
            chunk_end = min(len(path) + rules.chunk, pool.capacity)
            # Prefill only tokens beyond `reached`: else a prompt would never end if the pool keeps evicting its chunks.
            if state.reached < chunk_end < end and new_tokens(end, len(path), kept) > rules.chunk:
                kind, kept, later, end = PREFILL, 1, later + end - chunk_end, chunk_end
        shared, begun = batching.shared_prefix(job.ids, end, len(path)), root is not None and state.computed > 0
        state.chunk = PromptChunk(end, path, kept, kind, job.adapter, root, shared, later, begun, mark, rules.chunk)
        return state.chunk

    def _run(self, batch: Mapping[bytes, PromptChunk], results: _Results, *, is_last_try: bool = False) -> None:
        """Compute a batch, or as many of its prompts as fit into memory; the other prompts keep waiting.

        With `is_last_try`, the batch is a single prompt that runs again, after all unused memory was freed.
        """
        try:
            self._compute(batch, results)
            return
        except Exception as error:
            signs = "out of memory", "can't allocate memory", "not enough memory"
            has_sign = any(sign in str(error) for sign in signs)
            is_memory = has_sign or isinstance(error, (MemoryError, torch.OutOfMemoryError))
            if not is_memory and is_device_error(error):
                raise
            message = first_line(error)
        # Continue outside of the `except` block: here the exception and the tensors in its frames are freed.
        digests = list(batch)
        is_alone, parts = len(digests) == 1, [[digest] for digest in digests]
        if is_memory:
            self._free_memory()
            if not is_alone:
                self._limit.too_large(len(digests))
                _log.warning("out of memory with %d prompts: running %d at once", len(digests), self._limit.rows)
                parts = [digests[: self._limit.rows]]
        if is_alone and (is_last_try or not is_memory):
            results.failures[digests[0]] = f"the model failed on this prompt: {message}"
            return
        for part in parts:
            # Make the chunks again, because the failed forward may have changed the pool.
            chunks = {digest: self._next_chunk(self._held[digest]) for digest in part}
            self._run(chunks, results, is_last_try=is_alone)

    def _compute(self, batch: Mapping[bytes, PromptChunk], results: _Results) -> None:
        """Run the forward of a batch, add its results to `results`, and update the statistics."""
        digests, chunks = list(batch), list(batch.values())
        jobs = [self._held[digest] for digest in digests]
        prompts = [job.state.ids[: chunk.end] for job, chunk in zip(jobs, chunks, strict=True)]
        first, new = chunks[0], max(chunk.new for chunk in chunks)
        kept, paths = [chunk.kept for chunk in chunks], [chunk.path for chunk in chunks]
        pool = self._pool if first.root is not None else None
        root = first.root or ROOT
        if first.adapter != self._adapters.active:
            self._adapters.activate(first.adapter)
        if first.kind == "states":
            with hf_model.hidden_in_place_of_logits(self._forward.model, max(kept)) as taken:
                self._forward.last_logits(prompts, kept, paths, pool, root)
            (logits,) = taken
        else:
            logits = self._forward.last_logits(prompts, kept, paths, pool, root)
        if pool is not None:
            for job, chunk, path in zip(jobs, chunks, paths, strict=True):
                chunk.path, chunk.mark = path, pool.slots.mark(path)  # The forward has extended the prompt's path.
                if first.kind not in (PREFILL, "fresh"):
                    pool.slots.remember(job.ids[: 4 * chunk.end], path, root)
        if first.kind == PREFILL:
            jobs[0].state.reached = first.end
        elif first.kind in ("vector", "states"):
            self._take(jobs, chunks, logits, results)
        else:
            encoded = self._encoder.encode(digests, logits[:, -1])
            results.failures.update(encoded.failures)
            if encoded.block is not None:
                results.blocks.append(encoded.block)
        self._limit.fitted(len(batch))
        # Count all tokens of a prompt when its last chunk is computed.
        steps, rows, tokens, reused = self._stats
        for job, chunk in zip(jobs, chunks, strict=True):
            state: PromptState = job.state
            state.computed += new
            chunk.max_new = 0
            failed = job.digest in results.failures
            if not chunk.later or failed:
                rows += not failed
                tokens += len(state.ids)
                reused += max(0, chunk.end - state.computed)
        self._stats = BackendStats(steps + 1, rows, tokens, reused)

    def _take(self, jobs: list[BackendJob], chunks: list[PromptChunk], states: Tensor, results: _Results) -> None:
        """Compute the requested values at the positions of each chunk; add the complete vectors to `results`.

        `states` holds the logits of the last positions (n, kept, V) for chunks of the kind "vector", else their hidden
        states (n, kept, d).
        """
        is_logits, row, spans = chunks[0].kind == "vector", 0, list[range]()
        for job, chunk in zip(jobs, chunks, strict=True):
            if is_logits and job.positions is not None and job.positions.values == "hidden":
                raise ValueError(
                    "this adapter has a head, or rows of the head, of its own: hidden states are not returned"
                )
            spans.append(range(row, row := row + chunk.kept))
        kept = torch.cat([rows[-chunk.kept :] for chunk, rows in zip(chunks, states, strict=True)])
        # Compute the values of all chunks before recording any values: if memory runs out, the batch runs again.
        taken: list[list[NDArray[np.float32] | None]] = [[] for _ in jobs]
        at_once = max(1, MAX_LOGITS // self._info.vocab_size)
        for first in range(0, row, at_once):
            part = kept[first : first + at_once]
            logits = part if is_logits else None
            for job, chunk, span, parts in zip(jobs, chunks, spans, taken, strict=True):
                query, begin, end = job.positions, max(span.start, first), min(span.stop, first + len(part))
                if query is None or begin >= end:
                    continue
                if query.values != "hidden" and logits is None:
                    logits = self._logits(part)
                source = part if logits is None or query.values == "hidden" else logits
                position = chunk.end - chunk.kept + begin - span.start
                parts.append(values_at_positions(source[begin - first : end - first], query, job.ids, position))
        for job, chunk, parts in zip(jobs, chunks, taken, strict=True):
            if any(part is None for part in parts):
                results.failures[job.digest] = NO_DISTRIBUTION
                continue
            job.state.parts += parts
            if not chunk.later:
                results.vectors[job.digest] = np.concatenate(job.state.parts).ravel()

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits (m, V) of hidden states (m, d), with the adapter of the forward in progress."""
        assert self._head is not None
        layer: Any = self._forward.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return self._head.finished(layer(hidden))

    def _free_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
