"""The vllm backend: passes prompts as requests to vLLM's engine core, runs its steps, and returns the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.request import RequestStatus

from lmpool.errors import WorkerError
from lmpool.protocol.job import decode_ids
from lmpool.protocol.row import VectorBlock
from lmpool.protocol.tensors import TensorType
from lmpool.workers.backends.checkpoint import checkpoint_folder, replaceable_tensors
from lmpool.workers.backends.engines import EngineBackend
from lmpool.workers.backends.row_encoder import log_threads
from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.backends.vllm.capture import KEY
from lmpool.workers.backends.vllm.engine import VllmEngine, refusing
from lmpool.workers.backends.vllm.sessions import KvSession, KvSessions
from lmpool.workers.backends.vllm.weights import checked_weights, load_weights
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished

_MAX_IDLE_STEPS = 1000  # Max consecutive steps without a result: each step frees memory, so more steps would not help.
# Sampling parameters of every request: vLLM returns logits only to sample a token, which is discarded.
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
_SESSION_SHARE = 0.5  # Max share of the memory for keys and values that sessions may hold.


class _Request(NamedTuple):
    """A request in the engine."""

    job: BackendJob  # The job of this request.
    is_session: bool  # Whether the request stays open after its result, as a session.
    held: int  # Number of tokens of the session that the request extends; 0 without a session.


class VllmBackend(EngineBackend):
    """Serves one model of vLLM; see `lmpool.workers.execution.contract.Backend`."""

    _settings: VllmSettings

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings)
        self._folder = checkpoint_folder("model", settings.model, settings.revision)
        self._engine = engine = VllmEngine(settings, self._folder)
        self._encoder = engine.captured.encoder
        self._head = engine.head
        self._core = engine.core
        self._scheduler = engine.core.engine_core.scheduler
        model, cache, limits = (getattr(engine.config, f"{part}_config") for part in ("model", "cache", "scheduler"))
        # On a CPU, vLLM packs the weights of experts, and its reload does not replace the packed weights.
        is_packed = current_platform.is_cpu() and model.is_moe
        is_plain = model.quantization is None and engine.config.load_config.load_format != "dummy" and not is_packed
        self._tensors = replaceable_tensors(self._folder) if is_plain else {}
        # Let sessions have at most half of the slots in vLLM's batch, because a waiting session takes a slot too.
        places = limits.max_num_active_seqs or limits.max_num_seqs
        sessions = min(settings.sessions, places // 2)
        tokens = int((cache.num_gpu_blocks or 0) * cache.block_size * _SESSION_SHARE)
        self._sessions = KvSessions(sessions, tokens, cache.block_size)
        self.batch = places - sessions
        self._numbers = count(1)  # Numbers for the names of requests and the ids of adapters.
        self._requests: dict[str, _Request] = {}  # Name -> request in flight.
        self._left_waiting = 0
        self._idle_steps = 0
        # Report errors of the first forward, which fails if memory is short or kernels are missing.
        is_wide = model.quantization is not None and model.dtype is torch.float32
        remedy = " in float32 (try --dtype bfloat16 for quantised weights)" if is_wide else ""
        with refusing(f"model: vLLM {vllm_version} cannot run {settings.model}{remedy}"):
            self._prepare(
                model.dtype,
                vocab_size=model.get_vocab_size(),
                max_prompt_tokens=model.max_model_len - 1,  # vLLM needs one position for the token that it samples.
                revision=engine.revision,
                positions=engine.has_positions,
            )
        self.device = engine.captured.device  # The first forward, in `_prepare`, has set this device.
        log_threads(self.device)

    def capacity(self) -> int:
        """Number of jobs to accept: one batch next to the running batch, less the prompts that vLLM leaves waiting."""
        # Limit the count of waiting prompts, because some may have been aborted since the last step.
        if waiting := min(self._left_waiting, len(self._held)):
            return max(0, self.batch - waiting)
        return super().capacity()

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Pass jobs that are not in flight to the engine."""
        for job in jobs:
            if job.digest in self._held:
                continue
            session, is_growing = None, False
            if job.positions is None and not job.fresh:
                session = self._sessions.take(job.adapter, job.ids)
                # Call `is_growing` even if the prompt extends a session: the call records the prompt for later prompts.
                is_growing = self._sessions.is_growing(job.adapter, job.ids)
            can_grow = len(job.ids) // 4 < self._info.max_prompt_tokens
            self._request(job, session, session is not None or (is_growing and can_grow))

    def _request(self, job: BackendJob, session: KvSession | None, is_session: bool) -> None:
        """Pass a job to the engine: all its tokens, or only the new tokens if it extends a session."""
        if session is None:
            name, held = str(next(self._numbers)), 0
        else:
            name, held = session.request, len(session.ids) // 4
            self._scheduler.requests[name].num_preemptions = 0
        if job.positions is not None:
            self._engine.positions.open(name, job)
        extra = None if job.positions is not None else {KEY: job.digest}
        params = SamplingParams(**_ONE_TOKEN, skip_reading_prefix_cache=job.fresh or None, extra_args=extra)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=decode_ids(job.ids)[held:].tolist(),
            sampling_params=params,
            arrival_time=time.time(),
            lora_request=self._engine.loras[job.adapter] if job.adapter else None,
            resumable=is_session,
            **dict.fromkeys(("mm_features", "pooling_params", "cache_salt", "data_parallel_rank")),  # Unused fields.
        )
        self._core.add_request(request)
        self._requests[name] = _Request(job, is_session, held)
        self._held[job.digest] = name

    def step(self) -> Finished:
        """Run one step of the engine."""
        try:
            outputs = self._core.get_output().outputs
        except Exception as error:
            if (ranks := self._engine.ranks) is not None and (cause := ranks.cause_of(error)) is not error:
                raise cause from None
            raise
        rows, failures, vectors = list[bytes](), dict[bytes, str](), dict[bytes, NDArray[np.float32]]()
        tokens = reused = 0
        for output in outputs:
            if not output.new_token_ids and output.finish_reason is None:
                continue
            name = output.request_id
            if (request := self._requests.pop(name, None)) is None:
                raise WorkerError(f"vLLM has answered the request {name}, which it was not asked")
            job = request.job
            del self._held[job.digest]
            tokens += len(job.ids) // 4
            held = self._scheduler.requests.get(name)
            if not request.held:
                reused += output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0
            # Do not count a preempted session as reused: vLLM computes its tokens again, and reports no cached tokens.
            elif held is None or not held.num_preemptions:
                reused += request.held
            answer: NDArray[np.float32] | str | None = None
            if output.finish_reason is not FinishReason.LENGTH:
                self._close([name])
                answer = f"vLLM has ended the prompt: {output.finish_reason!s}"
            else:
                if request.is_session:
                    self._keep(job, name)
                if job.positions is not None:
                    answer = self._engine.positions.take(name)
            if answer is None:
                rows.append(job.digest)
            elif isinstance(answer, str):
                failures[job.digest] = answer
                self._engine.captured.drop(job.digest)
                self._engine.positions.drop(name)
            else:
                vectors[job.digest] = answer
        blocks, unsound = self._engine.captured.take(rows)
        self._free_memory(bool(outputs))
        answered, stats = sum(len(block.digests) for block in blocks) + len(vectors), self._stats
        self._stats = BackendStats(stats.steps + 1, stats.rows + answered, stats.tokens + tokens, stats.reused + reused)
        answers = VectorBlock(list(vectors), list(vectors.values())) if vectors else None
        return Finished(blocks, failures | unsound, answers)

    def _keep(self, job: BackendJob, name: str) -> None:
        """Keep a request open as a session, if the engine holds the keys and values of all tokens of its prompt."""
        held = self._scheduler.requests.get(name)
        # Check the computed tokens: a session that was preempted before its result has none, although it waits too.
        is_whole = (
            held is not None
            and held.status is RequestStatus.WAITING_FOR_STREAMING_REQ
            and held.num_computed_tokens == len(job.ids) // 4
        )
        self._close(self._sessions.keep(job.adapter, job.ids, name) if is_whole else [name])

    def _close(self, names: list[str]) -> None:
        for name in names:
            self._sessions.forget(name)
        self._core.abort_requests(names)

    def _free_memory(self, has_answered: bool) -> None:
        """Count the waiting prompts, and close sessions if no prompt can run without their memory."""
        running, waiting = self._scheduler.get_request_counts()
        self._left_waiting = max(0, waiting - len(self._sessions))
        if has_answered or running or not self._requests:
            self._idle_steps = 0
            return
        if self._sessions:
            self._close(self._sessions.close_oldest((len(self._sessions) + 1) // 2))
        else:
            # The scheduler cannot preempt a session. If sessions in use hold all memory and each needs one more block,
            # no prompt can run. Free memory: close the youngest session, and compute its prompt from its first token.
            for name, request in reversed(self._requests.items()):
                if request.is_session:
                    del self._requests[name]
                    self._close([name])
                    self._request(request.job, None, is_session=False)
                    break
        self._idle_steps += 1
        if self._idle_steps > _MAX_IDLE_STEPS:
            raise WorkerError(f"vLLM has answered none of {len(self._requests)} prompts for {_MAX_IDLE_STEPS} steps")

    def abort(self, digests: Collection[bytes]) -> None:
        """Abort jobs that are in flight."""
        names = [self._held.pop(digest) for digest in digests if digest in self._held]
        for name in names:
            self._engine.captured.drop(self._requests.pop(name).job.digest)
            self._engine.positions.drop(name)
        self._close(names)

    @property
    def devices(self) -> list[str]:
        """See `TellsDevices.devices`."""
        return [self.device] if (ranks := self._engine.ranks) is None else ranks.devices

    def when_broken(self, report: Callable[[BaseException], object]) -> None:
        """See `TellsEnd.when_broken`."""
        if (ranks := self._engine.ranks) is not None:
            error = WorkerError("a process of the model has ended")
            # vLLM calls the function at once if a rank has ended before.
            ranks.register_failure_callback(lambda: report(ranks.cause_of(error)))

    def map_memory(self, fd: int, memory: Any) -> None:
        """See `MapsMemory.map_memory`."""
        if (ranks := self._engine.ranks) is not None:
            ranks.map_memory(fd, memory)

    def _load(self, adapter: str, folder: Path) -> None:
        # Use the name with revision, by which vLLM's prefix cache tells adapters apart, and a number never used before.
        request = LoRARequest(adapter, next(self._numbers), str(folder))
        with refusing(f"adapters: vLLM {vllm_version} cannot load {adapter}", WorkerError):
            try:
                if not self._core.add_lora(request):
                    raise RuntimeError("it does not fit the model")
            except Exception:
                self._core.remove_lora(request.lora_int_id)  # It may have a slot, and only some weights.
                raise
        self._engine.loras[adapter] = request

    def _unload(self, adapter: str) -> None:
        self._close(self._sessions.close_adapter(adapter))
        self._core.remove_lora(self._engine.loras.pop(adapter).lora_int_id)

    def tensors(self) -> Mapping[str, TensorType]:
        """See `ChangesWeights.tensors`."""
        return self._tensors

    def load_weights(self, full: Path | None, sparse: Sequence[Path], held: int) -> None:
        """See `ChangesWeights.load_weights`."""
        new = checked_weights(full or self._folder, sparse, held, self._tensors)
        self._close(self._sessions.close_oldest(len(self._sessions)))
        if not self._core.reset_prefix_cache():
            raise WorkerError("vLLM has requests in flight, and its prefix cache cannot be dropped")
        if new.names:
            self._core.collective_rpc(load_weights, args=(new,))

    def close(self) -> None:
        """End the engine and free its memory. The backend cannot be used afterwards."""
        self._requests.clear()
        self._held.clear()
        self._core.shutdown()
