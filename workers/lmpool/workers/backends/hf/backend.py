"""The hf backend: waiting prompts in, one padded forward a step, rows out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import qualify
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock, VectorBlock
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backend.contract import BackendJob, BackendStats, Finished
from lmpool.workers.backends.checkpoint import checkpoint_source, read_vocabulary
from lmpool.workers.backends.hf.adapters import HfAdapters
from lmpool.workers.backends.hf.batching import PART, BatchLimit, BatchRules, Candidate, Waiting, choose, choose_shorter
from lmpool.workers.backends.hf.forward import Abilities, Forward, check_model, new_tokens
from lmpool.workers.backends.hf.kv_pool import ROOT, KVPool
from lmpool.workers.backends.hf.loading import load_model
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.row_encoder import RowEncoder, scores_of
from lmpool.workers.backends.settings import HfSettings

_logger = logging.getLogger(__name__)

_NO_LIMIT = 2**62

_CPU_CHUNK, _CHUNK = 512, 2048
"""Tokens of a prompt that make a step worth its while: more would not be faster by much, only longer."""

_HELD_LOGITS = 1 << 25
"""Logits that a forward may leave (128 MiB in float32), unless a batch of rows needs more."""


class _Answer(NamedTuple):
    """What became of a batch: rows, digest -> message of prompts that failed, digest -> scores."""

    block: RowBlock | None
    failures: dict[bytes, str]
    scores: dict[bytes, NDArray[np.float32]]


class HfBackend:
    """Serves one model of transformers; see `lmpool.workers.backend.contract.Backend`.

    Args:
        settings: what to load and how.

    Raises:
        SettingsError: the model cannot be loaded or run as the settings say.
    """

    @torch.inference_mode()
    def __init__(self, settings: HfSettings) -> None:
        loaded = load_model(settings)
        model = loaded.model
        self._settings = settings
        self._forward = Forward(model)
        self._encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
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
            chunk=_chunk(settings, self._forward.device),
            shares=self._pool is not None,
        )
        self._tell_longest(loaded.max_prompt_tokens)
        self._limit = BatchLimit(settings.max_batch)
        self._has_let_by = False
        self._waiting: dict[bytes, Waiting] = {}
        self._roots: dict[str, int] = {}
        self._stats = BackendStats()
        encoding = self._encoder.encoding_of(abilities.logits)
        self._info = ModelInfo(
            name=settings.served_as,
            backend="hf",
            vocab_size=abilities.logits.shape[-1],
            max_prompt_tokens=loaded.max_prompt_tokens,
            revision=loaded.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            encoding=encoding.name.lower(),
            scores=True,
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

    def vocabulary(self) -> Vocabulary | None:
        """The byte strings of the model's tokens; None where its tokenizer does not tell them."""
        settings = self._settings
        return read_vocabulary(self._info, settings.revision, trust_remote_code=settings.trust_remote_code)

    def capacity(self) -> int:
        """Room for one batch beside the one that runs."""
        return max(0, 2 * self._settings.max_batch - len(self._waiting))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs; one that is held already is computed once."""
        for job in jobs:
            self._waiting.setdefault(job.digest, Waiting.of(job))

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that wait."""
        for digest in digests:
            self._waiting.pop(digest, None)

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
        self._pool = None
        del self._forward, self._adapters
        self._free_memory()

    @torch.inference_mode()
    def step(self) -> Finished:
        """Run one batch: the one of the oldest prompt, or every second time one of much shorter prompts before it."""
        waiting = [self._candidate(digest) for digest in self._waiting]
        rows, rules = self._limit.rows, self._rules
        batch = choose(waiting, rows, rules)
        shorter = [] if self._has_let_by else choose_shorter(batch, waiting, rows, rules)
        self._has_let_by = bool(shorter)
        if self._pool is not None:
            self._pool.held = next((one.path for one in waiting if one.begun), [])
        answers = self._answer(shorter or batch)
        scores = {digest: own for answer in answers for digest, own in answer.scores.items()}
        finished = Finished(
            [answer.block for answer in answers if answer.block is not None],
            {digest: text for answer in answers for digest, text in answer.failures.items()},
            VectorBlock(list(scores), list(scores.values())) if scores else None,
        )
        self.abort(finished.digests)
        return finished

    def _tell_longest(self, max_prompt_tokens: int) -> None:
        """Say from which length on a prompt keeps short ones waiting, if there is one."""
        if self._pool is None:
            return
        bounds = (
            (self._pool.capacity, "--kv-cache-bytes has room for no more"),
            (self._rules.horizon, "a longer one gives its beginning other values (sliding window, or RoPE)"),
        )
        most, reason = min(bounds)
        if most < max_prompt_tokens:
            _logger.info("prompts are computed in chunks up to %d tokens: %s", most, reason)

    def _candidate(self, digest: bytes) -> Candidate:
        waiting, rules, pool = self._waiting[digest], self._rules, self._pool
        longest = min(rules.horizon, pool.capacity) if pool is not None else 0
        most = rules.logits if len(waiting.ids) > longest else min(rules.logits, rules.chunk)
        ids, kept = waiting.part(most, rules.horizon)
        later = len(waiting.ids) - len(ids) - 1 if waiting.next else 0
        if pool is None or len(ids) > rules.horizon or (waiting.fresh and len(ids) <= rules.chunk):
            return Candidate(digest, ids, [], kept, waiting.kind, waiting.adapter, later=later)
        if waiting.fresh and waiting.root is None:
            waiting.root = pool.new_root()
        root = waiting.root if waiting.root is not None else self._roots.get(waiting.adapter, ROOT)
        path = pool.slots.match(ids, root)
        end = min(len(path) + rules.chunk, pool.capacity)
        begun = waiting.reached > 0 or bool(waiting.scores)
        # A part that got no further than the last one, because the pool has lost that, would not end.
        if waiting.reached < end < len(ids) and new_tokens(len(ids), len(path), kept) > rules.chunk:
            return Candidate(digest, ids[:end], path, 1, PART, waiting.adapter, root, later + len(ids) - end, begun)
        return Candidate(digest, ids, path, kept, waiting.kind, waiting.adapter, root, later, begun)

    def _answer(self, batch: Sequence[Candidate]) -> list[_Answer]:
        """The rows of a batch, or of as many of its prompts as memory suffices for; the others keep waiting."""
        try:
            return [self._compute(batch)]
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            # What torch and model code raise for too little memory or a prompt that they cannot take.
            out_of_memory = _is_out_of_memory(error)
            if not out_of_memory and "CUDA error" in str(error):
                raise  # No later call on this device would work.
            message = first_line(error)
        # Only out here are the exception and the tensors that its frames hold gone.
        if out_of_memory:
            self._free_memory()
        if len(batch) == 1:
            return [_Answer(None, {batch[0].digest: f"the model failed on this prompt: {message}"}, {})]
        if out_of_memory:
            self._limit.too_large(len(batch))
            _logger.warning("out of memory with %d prompts: running %d at once", len(batch), self._limit.rows)
            return self._answer([self._candidate(one.digest) for one in batch[: self._limit.rows]])
        return [answer for one in batch for answer in self._answer([self._candidate(one.digest)])]

    def _compute(self, batch: Sequence[Candidate]) -> _Answer:
        prompts = [one.ids for one in batch]
        lengths = [len(ids) for ids in prompts]
        new = max(one.new for one in batch)
        first = batch[0]
        pool = self._pool if first.root is not None else None
        self._adapters.use(first.adapter)
        kept, paths = [one.kept for one in batch], [one.path for one in batch]
        logits = self._forward.last_logits(prompts, kept, paths, pool, first.root or ROOT)
        if first.kind == PART:
            part = self._waiting[first.digest]
            part.reached, part.computed = lengths[0], part.computed + new
            self._stats = self._stats._replace(steps=self._stats.steps + 1)
            return _Answer(None, {}, {})
        if first.kind == "score":
            answer = self._score(batch, logits)
        else:
            answer = _Answer(*self._encoder.encode([one.digest for one in batch], logits[:, -1]), {})
        self._limit.fitted(len(batch))
        self._stats = BackendStats(
            steps=self._stats.steps + 1,
            rows=self._stats.rows + len(batch) - len(answer.failures),
            tokens=self._stats.tokens + sum(lengths),
            reused=self._stats.reused
            + sum(max(0, len(one.ids) - new - self._waiting[one.digest].computed) for one in batch),
        )
        return answer

    def _score(self, batch: Sequence[Candidate], logits: Tensor) -> _Answer:
        answer = _Answer(None, {}, {})
        wants = [self._waiting[one.digest] for one in batch]
        # All of them before the first is noted: memory may run out, and then they are computed again.
        found = [
            scores_of(own[-one.kept :], waiting.targets(one.kept))
            for one, waiting, own in zip(batch, wants, logits, strict=True)
        ]
        for one, waiting, scores in zip(batch, wants, found, strict=True):
            if np.isnan(scores).any():
                answer.failures[one.digest] = "the model returned logits that are no distribution: NaN or infinite"
            elif (all_scores := waiting.add(scores)) is not None:
                answer.scores[one.digest] = all_scores
        return answer

    def _free_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _chunk(settings: HfSettings, device: torch.device) -> int:
    usual = _CPU_CHUNK if device.type == "cpu" else _CHUNK
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
