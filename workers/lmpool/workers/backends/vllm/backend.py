"""The vllm backend: prompts become requests of vLLM's engine core, which schedules them as it likes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.request import RequestStatus

from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.job import decode_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import NewRows, RowBlock, VectorBlock
from lmpool.workers.backends.canary import check_canary, completed_info
from lmpool.workers.backends.row_encoder import log_threads
from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.backends.tokenizer import TellsTexts
from lmpool.workers.backends.vllm.capture import KEY
from lmpool.workers.backends.vllm.engine import START_ERRORS, open_engine, refusal
from lmpool.workers.backends.vllm.sessions import Session, Sessions
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished

_MAX_IDLE_STEPS = 1000
_SESSION_SHARE = 0.5


class _Request(NamedTuple):
    """A request that the engine runs.

    Attributes:
        job: what it answers.
        is_session: it stays open when it has answered.
        held: tokens that the session had computed which it continues; 0 if it continues none.
        preemptions: how often that session had lost its memory before.
    """

    job: BackendJob
    is_session: bool
    held: int = 0
    preemptions: int = 0


class VllmBackend(TellsTexts):
    """Serves one model of vLLM; see `lmpool.workers.execution.contract.Backend`.

    Args:
        settings: what to load and how.

    Raises:
        SettingsError: the model cannot be loaded, or its first rows are wrong.
    """

    _settings: VllmSettings

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine = engine = open_engine(settings)
        self._core = engine.core
        self._scheduler = engine.core.engine_core.scheduler
        self._sessions = Sessions(engine.sessions, int(engine.kv_tokens * _SESSION_SHARE), engine.block_size)
        self._numbers = count()
        self._requests: dict[str, _Request] = {}
        self._held: dict[bytes, str] = {}
        self._left_waiting = 0
        self._idle_steps = 0
        self._stats = BackendStats()
        self._info = ModelInfo(
            name=settings.served_as,
            backend="vllm",
            vocab_size=engine.vocab_size,
            max_prompt_tokens=engine.max_prompt_tokens,
            revision=engine.revision,
            dtype=engine.dtype,
            source=engine.source,
            positions=engine.positions is not None,
        )
        try:
            self._info = completed_info(self)
            check_canary(self)
        except (WorkerError, *START_ERRORS) as error:
            self.close()
            # Too little memory and missing kernels show with the first forward.
            raise error if isinstance(error, SettingsError) else refusal(settings, "cannot run", error) from error
        except BaseException:
            self.close()
            raise
        self._stats = BackendStats()
        log_threads(self.device)  # Known by now, from the first forwards.

    @property
    def info(self) -> ModelInfo:
        """What the backend serves."""
        return self._info

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that prompts may name, and where they came from."""
        return {adapter: source for adapter, (_, source) in self._engine.adapters.items()}

    @property
    def batch(self) -> int:
        """Prompts that make a full step."""
        return self._engine.max_batch

    @property
    def device(self) -> str:
        """Where the model lies."""
        return self._engine.captured.device

    def capacity(self) -> int:
        """Room for one batch beside the one that runs; less as long as the scheduler leaves prompts waiting."""
        # Those that were dropped since the last step wait no longer.
        if waiting := min(self._left_waiting, len(self._held)):
            return max(0, self.batch - waiting)
        return max(0, 2 * self.batch - len(self._held))

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Hand jobs to the engine; one that is held already is computed once."""
        for job in jobs:
            if job.digest not in self._held:
                self._submit(job)

    def _submit(self, job: BackendJob) -> None:
        if job.positions or job.fresh:
            self._request(job, None, is_session=False)
            return
        session = self._sessions.take(job.adapter, job.ids)
        # Asked in any case: what continues a session is seen too, and may be continued by several.
        is_growing = self._sessions.is_growing(job.adapter, job.ids)
        # The longest prompt can grow no more.
        is_session = session is not None or (is_growing and len(job.ids) // 4 < self._info.max_prompt_tokens)
        self._request(job, session, is_session)

    def _request(self, job: BackendJob, session: Session | None, is_session: bool) -> None:
        """Hand a job to the engine: all of it, or to the session that it continues what this lacks."""
        if session is None:
            name, held, preemptions = str(next(self._numbers)), 0, 0
        else:
            name, held = session.request, len(session.ids) // 4
            preemptions = self._scheduler.requests[name].num_preemptions
        lora = self._engine.adapters[job.adapter][0] if job.adapter else None
        if job.positions is not None:
            assert self._engine.positions is not None  # Else the info says so, and nobody asks.
            self._engine.positions.open(name, job, lora.lora_int_id if lora is not None else 0)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=job.fresh or None,
            extra_args=None if job.positions is not None else {KEY: job.digest},
        )
        self._core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=decode_ids(job.ids)[held:].tolist(),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=lora,
                cache_salt=None,
                data_parallel_rank=None,
                resumable=is_session,
            )
        )
        self._requests[name] = _Request(job, is_session, held, preemptions)
        self._held[job.digest] = name

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._engine.captured.write_to(new_rows)

    def step(self) -> Finished:
        """Run one step of the engine.

        Raises:
            WorkerError: the engine has answered what it was not asked, or nothing for very long.
        """
        outputs = self._core.get_output().outputs
        ended = {
            output.request_id: self._end(output)
            for output in outputs
            if output.new_token_ids or output.finish_reason is not None
        }
        failures = {job.digest: text for job, text in ended.values() if text}
        for name, (job, text) in ended.items():
            if text:
                self._drop(name, job.digest)
        good = {name: job for name, (job, text) in ended.items() if not text}
        blocks, unsound = self._engine.captured.take([job.digest for job in good.values() if job.positions is None])
        failures |= unsound
        vectors, unsound = self._take_positions(good)
        failures |= unsound
        self._make_room(bool(outputs))
        self._count(blocks, len(vectors))
        return Finished(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _take_positions(
        self, ended: dict[str, BackendJob]
    ) -> tuple[dict[bytes, NDArray[np.float32]], dict[bytes, str]]:
        """What was wanted of the positions of prompts that have ended, and failures."""
        vectors, failures = {}, {}
        for name, job in ended.items():
            if job.positions is not None and self._engine.positions is not None:
                answer = self._engine.positions.take(name)
                if isinstance(answer, str):
                    failures[job.digest] = answer
                else:
                    vectors[job.digest] = answer
        return vectors, failures

    def _drop(self, name: str, digest: bytes) -> None:
        """Forget what was taken for a request that is not answered."""
        self._engine.captured.drop(digest)
        if self._engine.positions is not None:
            self._engine.positions.drop(name)

    def _end(self, output: Any) -> tuple[BackendJob, str]:
        """A request has ended: its job, and what went wrong or ""."""
        request = self._requests.pop(output.request_id, None)
        if request is None:
            raise WorkerError(f"vLLM has answered the request {output.request_id}, which it was not asked")
        job = request.job
        del self._held[job.digest]
        stats, reused = self._stats, self._reused(request, output)
        self._stats = stats._replace(tokens=stats.tokens + len(job.ids) // 4, reused=stats.reused + reused)
        if output.finish_reason is not FinishReason.LENGTH:
            self._close([output.request_id])
            return job, f"vLLM has ended the prompt: {output.finish_reason!s}"
        if request.is_session:
            self._keep(job, output.request_id)
        return job, ""

    def _reused(self, request: _Request, output: Any) -> int:
        """Tokens of a prompt that has ended whose keys and values were there."""
        if not request.held:
            return output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0
        held = self._scheduler.requests.get(output.request_id)
        # One that was preempted was computed anew; vLLM does not tell how much of it its prefix cache still had.
        return request.held if held is None or held.num_preemptions == request.preemptions else 0

    def _keep(self, job: BackendJob, name: str) -> None:
        """Have a session wait for its next tokens, if the engine holds all of it."""
        held = self._scheduler.requests.get(name)
        # One that was preempted while its answer was on the way waits too, but with nothing computed and in no queue.
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

    def _make_room(self, has_answered: bool) -> None:
        """See what waits, and close sessions if it waits for their memory."""
        running, waiting = self._scheduler.get_request_counts()
        self._left_waiting = max(0, waiting - len(self._sessions))
        if has_answered or running or not self._requests:
            self._idle_steps = 0
            return
        if self._sessions:
            self._close(self._sessions.close_oldest((len(self._sessions) + 1) // 2))
        else:
            self._give_up_session()
        self._idle_steps += 1
        if self._idle_steps > _MAX_IDLE_STEPS:
            raise WorkerError(f"vLLM has answered none of {len(self._requests)} prompts for {_MAX_IDLE_STEPS} steps")

    def _give_up_session(self) -> None:
        """Compute the youngest prompt that continues a session from its beginning: its session's memory is needed.

        The scheduler cannot take it back, and when all memory is held by sessions that need one more block each, none
        of them can go on.
        """
        for name, request in reversed(self._requests.items()):
            if request.is_session:
                del self._requests[name]
                self._close([name])
                self._request(request.job, None, is_session=False)
                return

    def _count(self, blocks: list[RowBlock], further: int) -> None:
        stats = self._stats
        rows = sum(len(block.digests) for block in blocks) + further
        self._stats = stats._replace(steps=stats.steps + 1, rows=stats.rows + rows)

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs that wait or run."""
        names = [self._held.pop(digest) for digest in digests if digest in self._held]
        for name in names:
            self._drop(name, self._requests.pop(name).job.digest)
        self._close(names)

    def load_adapter(self, name: str, source: str) -> str:
        """Load a LoRA adapter; see `Engine.load_adapter`."""
        return self._engine.load_adapter(name, source)

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter, and the sessions of prompts that named it."""
        self._close(self._sessions.close_adapter(adapter))
        self._engine.drop_adapter(adapter)

    def stats(self) -> BackendStats:
        """Counters since the start."""
        return self._stats

    def close(self) -> None:
        """End the engine and free what it holds. The backend cannot be used afterwards."""
        self._requests.clear()
        self._held.clear()
        self._core.shutdown()
