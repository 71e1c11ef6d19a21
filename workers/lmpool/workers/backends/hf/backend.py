"""The hf backend: waiting prompts in, one padded forward a step, rows out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from lmpool.adapters import qualify
from lmpool.card import ModelCard
from lmpool.errors import SettingsError
from lmpool.prompts import decode_ids
from lmpool.rows import Encoding
from lmpool.vocab import Vocabulary
from lmpool.workers.backend import BackendJob, BackendStats, Finished
from lmpool.workers.backends.hf.adapters import HfAdapters
from lmpool.workers.backends.hf.batching import BatchLimit, BatchRules, Candidate, choose
from lmpool.workers.backends.hf.forward import Forward
from lmpool.workers.backends.hf.kv_pool import KVPool
from lmpool.workers.backends.hf.loading import load_model
from lmpool.workers.backends.hf.prefix_slots import ROOT
from lmpool.workers.backends.hf.self_check import Abilities, check_model
from lmpool.workers.backends.hf.settings import HfSettings
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.row_encoder import EncodedRows, RowEncoder
from lmpool.workers.backends.vocabulary import read_vocabulary

_logger = logging.getLogger(__name__)

_NO_LIMIT = 2**62


class HfBackend:
    """Serves one model of transformers; see `lmpool.workers.backend.Backend`.

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
            kv_tokens=max(self._pool.capacity, settings.max_batch_tokens) if self._pool else _NO_LIMIT,
            pads=abilities.pads,
            horizon=abilities.horizon,
            shares=self._pool is not None,
        )
        self._limit = BatchLimit(settings.max_batch)
        self._waiting: dict[bytes, list[int]] = {}
        self._adapter_of: dict[bytes, str] = {}
        self._roots: dict[str, int] = {}
        self._stats = BackendStats()
        encoding = self._encoder.encoding_of(abilities.logits)
        self._card = ModelCard(
            name=settings.served_as,
            backend="hf",
            vocab_size=abilities.logits.shape[-1],
            max_prompt_tokens=loaded.max_prompt_tokens,
            revision=loaded.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            encoding=encoding.name.lower(),
            lossy=encoding is Encoding.F16 and model.dtype != torch.float16,
            # A relative folder means another one to a client in another folder.
            source=str(Path(settings.model).resolve()) if Path(settings.model).is_dir() else settings.model,
            gguf_file=settings.gguf_file or "",
        )
        self._adapters = HfAdapters(self._forward, settings.model)
        for name, source in settings.adapter_folders.items():
            self.load_adapter(name, source)

    @property
    def card(self) -> ModelCard:
        """What the backend serves."""
        return self._card

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
        return read_vocabulary(self._card, settings.revision, trust_remote_code=settings.trust_remote_code)

    def capacity(self) -> int:
        """Room for one batch beside the one that runs."""
        return max(0, 2 * self._settings.max_batch - len(self._waiting))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Take jobs; one that is held already is computed once."""
        for job in jobs:
            self._waiting.setdefault(job.digest, decode_ids(job.ids).tolist())
            if job.adapter:
                self._adapter_of[job.digest] = job.adapter

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that wait."""
        for digest in digests:
            self._waiting.pop(digest, None)
            self._adapter_of.pop(digest, None)

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
        self._adapter_of.clear()
        self._pool = None
        del self._forward, self._adapters
        self._free_memory()

    @torch.inference_mode()
    def step(self) -> Finished:
        """Run one batch."""
        waiting = [self._candidate(digest) for digest in self._waiting]
        answers = self._answer(choose(waiting, self._limit.rows, self._rules))
        finished = Finished([answer.block for answer in answers if answer.block is not None], {})
        for answer in answers:
            finished.failures.update(answer.failures)
        for block in finished.blocks:
            self.abort(block.digests)
        self.abort(finished.failures)
        return finished

    def _candidate(self, digest: bytes) -> Candidate:
        ids = self._waiting[digest]
        reuses = self._pool is not None and len(ids) <= self._rules.horizon
        adapter = self._adapter_of.get(digest, "")
        path = self._pool.slots.match(ids, self._roots.get(adapter, ROOT)) if self._pool and reuses else []
        return Candidate(digest, ids, path, adapter)

    def _answer(self, batch: Sequence[Candidate]) -> list[EncodedRows]:
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
            return [EncodedRows(None, {batch[0].digest: f"the model failed on this prompt: {message}"})]
        if out_of_memory:
            self._limit.too_large(len(batch))
            _logger.warning("out of memory with %d prompts: running %d at once", len(batch), self._limit.rows)
            return self._answer([self._candidate(one.digest) for one in batch[: self._limit.rows]])
        return [rows for one in batch for rows in self._answer([self._candidate(one.digest)])]

    def _compute(self, batch: Sequence[Candidate]) -> EncodedRows:
        prompts = [one.ids for one in batch]
        lengths = [len(ids) for ids in prompts]
        new = max(one.new for one in batch)
        pool = self._pool if max(lengths) <= self._rules.horizon else None
        adapter = batch[0].adapter
        self._adapters.use(adapter)
        root = self._roots.get(adapter, ROOT)
        logits = self._forward.logits(prompts, [one.path for one in batch], pool, root)
        rows = self._encoder.encode([one.digest for one in batch], logits)
        self._limit.fitted(len(batch))
        self._stats = BackendStats(
            steps=self._stats.steps + 1,
            rows=self._stats.rows + len(batch) - len(rows.failures),
            tokens=self._stats.tokens + sum(lengths),
            reused=self._stats.reused + sum(max(0, length - new) for length in lengths),
        )
        return rows

    def _free_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
