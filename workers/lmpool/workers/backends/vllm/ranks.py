"""Runs a model of vLLM that is spread over several processes (ranks), and brings the ranks' rows to the worker.

With tensor or pipeline parallelism, vLLM runs each part of a model in a process of its own. The worker's process keeps
vLLM's scheduler. `RanksExecutor` replaces vLLM's executor there. `RankExtension` adds methods to vLLM's worker class in
each rank. Only the output rank answers, which is the first tensor rank of the last pipeline stage. The output rank
captures and encodes rows, and sends them with the answer of each step.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput

from lmpool.errors import WorkerError, first_line
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import RowBlock
from lmpool.workers.backends.row_encoder import PositionAnswers, RowEncoder
from lmpool.workers.backends.vllm.capture import KEY, Captured, CaptureProcessor, PositionCapture
from lmpool.workers.execution.contract import BackendJob

RANK_ARGUMENTS = {
    "logits_processors": [f"{__name__}:RankCapture"],
    "worker_extension_cls": f"{__name__}.RankExtension",
    "distributed_executor_backend": "mp",
}
"""Options of an engine whose model is spread over several processes."""

_ERROR_FILE = "LMPOOL_RANK_ERROR"  # Environment variable: path of the file for the reason why a rank cannot start.

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Signals for the worker; the ranks end after the worker.


class OpenedPositions(NamedTuple):
    """A positions query that a step begins to compute."""

    request: str  # The engine's request name of the prompt.
    ids: bytes  # The prompt's token ids, encoded as in a job.
    query: bytes  # The query, encoded with msgpack.
    adapter: int  # vLLM's number of the prompt's adapter; 0 without an adapter.


class RankFacts(NamedTuple):
    """What a rank says about itself before the first step."""

    pid: int
    device: str  # Its torch device, such as "cuda:1".
    missing: str  # Error message about a method for positions queries that this release of vLLM lacks; "" if none is.


class Answer(NamedTuple):
    """What the output rank sends at the end of a step."""

    output: Any  # vLLM's own output of the step.
    blocks: list[RowBlock]  # The rows of the prompts that the step completes.
    failures: dict[bytes, str]  # Digest -> reason of each prompt whose logits are no distribution.
    positions: dict[str, Any]  # Request name -> values at positions, float32 (n * width,), or a text: why it failed.


class RankCapture(CaptureProcessor):
    """Captures rows in a rank; only the output rank keeps rows."""

    current: RankCapture

    def __init__(self, config: Any, *more: Any) -> None:
        super().__init__(config, *more)
        model = config.model_config
        self.captured = Captured(model.get_vocab_size(), RowEncoder(model.dtype, lossy=False))
        self.wanted = set()
        RankCapture.current = self


class RankExtension:
    """Methods of a rank that the worker calls. vLLM mixes this class into its own worker class."""

    model_runner: Any
    execute_model: Any
    sample_tokens: Any

    def lmpool_attach(self, lossy: bool, has_positions: bool) -> RankFacts:
        """Prepare a loaded rank for steps."""
        for number in _IGNORED:  # Ctrl-C reaches the ranks too, but they must finish the prompts that the worker holds.
            signal.signal(number, signal.SIG_IGN)
        # Request Intel AMX in this process too; see `VllmEngine`.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        runner, model = self.model_runner, self.model_runner.model_config
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", 1) is None:
            # vLLM creates these tensors in a warm-up, which it leaves out on a CPU if the memory for keys and values
            # is given.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=model.dtype, device=runner.device
            )
        self._lmpool_positions = None
        self._lmpool_is_output = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
        missing = ""
        if get_pp_group().is_last_rank:
            RankCapture.current.captured.encoder = RowEncoder(model.dtype, lossy=lossy)
            if has_positions:
                positions = PositionCapture(model.get_vocab_size(), int)
                try:
                    positions.attach(runner)
                    self._lmpool_positions = positions
                except AttributeError as error:
                    missing = first_line(error)
        return RankFacts(os.getpid(), str(runner.device), missing)

    def lmpool_execute(self, scheduler_output: Any, opened: Sequence[OpenedPositions], dropped: Sequence[str]) -> Any:
        """Run the forward of a step. The positions queries are opened and dropped on all ranks in the same order."""
        if (positions := self._lmpool_positions) is not None:
            for name in dropped:
                positions.drop(name)
            for request, ids, query, adapter in opened:
                decoded = msgspec.msgpack.decode(query, type=PositionsQuery)
                positions.open(request, BackendJob(b"", ids, str(adapter or ""), positions=decoded))
        return self.execute_model(scheduler_output)

    def lmpool_sample(self, grammar_output: Any, digests: list[bytes], positions: list[str]) -> Any:
        """End a step.

        Args:
            grammar_output: vLLM's argument.
            digests: digests of the prompts whose rows the step completes.
            positions: request names of the prompts whose values at positions the step completes.
        """
        capture = RankCapture.current
        capture.wanted = set(digests) if self._lmpool_is_output else set()
        output = self.sample_tokens(grammar_output)
        answers = {}
        if self._lmpool_positions is not None:  # Take the answers on all ranks, because all ranks hold them.
            answers = {name: self._lmpool_positions.take(name) for name in positions}
        if not self._lmpool_is_output or output is None:
            return output
        blocks, failures = capture.captured.take(digests)
        if isinstance(output, AsyncModelRunnerOutput):
            return _LaterAnswer(output, blocks, failures, answers)
        return Answer(output, blocks, failures, answers)


class _LaterAnswer(AsyncModelRunnerOutput):  # type: ignore[misc]  # vllm has no types here
    """An answer whose output vLLM copies from the device in another thread."""

    def __init__(self, output: Any, *more: Any) -> None:
        self._output = output
        self._more = more

    def get_output(self) -> Any:
        """Wait for the output; vLLM calls this method in another thread."""
        return Answer(self._output.get_output(), *self._more)


class RanksExecutor(MultiprocExecutor):  # type: ignore[misc]  # vllm has no types here
    """vLLM's executor for several processes; it also passes on the rows and values that the output rank sends."""

    def attach(self, scheduler: Any, captured: Captured, positions: PositionsOfRanks | None) -> None:
        """Prepare all ranks for steps, with positions queries unless `positions` is None.

        Raises:
            AttributeError: this release of vLLM lacks a method for positions queries; rows are captured.
        """
        self._scheduler, self._captured, self._positions = scheduler, captured, positions
        self._step: Any = None
        facts = self.collective_rpc("lmpool_attach", args=(captured.encoder.is_lossy, positions is not None))
        captured.device = facts[self.output_rank].device
        if missing := next((fact.missing for fact in facts if fact.missing), ""):
            self._positions = None
            raise AttributeError(missing)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run the forward of a step on all ranks."""
        self._step = scheduler_output
        changes = ([], []) if self._positions is None else self._positions.changes()
        return self._call("lmpool_execute", (scheduler_output, *changes), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End the step that `execute_model` began last."""
        digests, positions = [], []
        for name in self._step.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            if not request.is_prefill_chunk:
                digest = (request.sampling_params.extra_args or {}).get(KEY)
                if digest is None:
                    positions.append(name)
                else:
                    digests.append(digest)
        future = self._call("lmpool_sample", (grammar_output, digests, positions), non_block=True)
        future.aggregate = self._received
        return future if non_block else future.result()

    def _call(self, method: str, arguments: tuple[Any, ...], non_block: bool) -> Any:
        return self.collective_rpc(
            method,
            args=arguments,
            unique_reply_rank=self.output_rank,
            non_block=non_block,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
        )

    def _received(self, answer: Answer) -> Any:
        """Store the rows and values of an answer; returns vLLM's own output."""
        if not isinstance(answer, Answer):
            return answer
        self._captured.store(answer.blocks, answer.failures)
        if self._positions is not None:
            self._positions.received.update(answer.positions)
        return answer.output


class PositionsOfRanks(PositionAnswers):
    """The positions queries in flight, in the worker's process; the ranks compute the values.

    `lora_id` is a function that returns vLLM's number of a job's adapter.
    """

    def __init__(self, _: int, lora_id: Callable[[str], int]) -> None:
        super().__init__()
        self._lora_id = lora_id
        self._opened: dict[str, OpenedPositions] = {}
        self._dropped: list[str] = []
        self.received: dict[str, Any] = {}  # Request name -> values, or the reason of a failure, of a finished request.

    def open(self, request: str, job: BackendJob) -> None:
        """Have the ranks compute the answer of a job from the next step on."""
        super().open(request, job)
        adapter = self._lora_id(job.adapter) if job.adapter else 0
        self._opened[request] = OpenedPositions(request, job.ids, msgspec.msgpack.encode(job.positions), adapter)

    def drop(self, request: str) -> None:
        """Discard the answer of a request, if there is one."""
        super().drop(request)
        if self._opened.pop(request, None) is None:
            self._dropped.append(request)
        self.received.pop(request, None)

    def changes(self) -> tuple[list[OpenedPositions], list[str]]:
        """The queries to open and the names of requests to drop in the ranks since the last call."""
        changes = list(self._opened.values()), self._dropped
        self._opened, self._dropped = {}, []
        return changes

    def take(self, request: str) -> Any:
        """Remove a finished request; returns its answer, float32 (n * width,), or the reason of its failure."""
        super().drop(request)
        if request not in self.received:
            raise WorkerError("vLLM's ranks have ended a prompt without its values at positions")
        return self.received.pop(request)


def start_ranks(config: Any) -> InprocClient:
    """Start an engine core whose model is spread over processes.

    Raises:
        WorkerError: a rank cannot start; the message is the rank's error.
    """
    with TemporaryDirectory(prefix="lmpool-ranks-") as folder:
        path = Path(folder, "error")
        os.environ[_ERROR_FILE] = str(path)
        try:
            return InprocClient(config, RanksExecutor, log_stats=False)
        except Exception as error:
            # vLLM raises a plain Exception that does not name the rank's error.
            with suppress(OSError):
                raise WorkerError(path.read_text("utf-8")) from error
            raise
        finally:
            del os.environ[_ERROR_FILE]


class _WritesError(logging.Filter):
    """Writes the first error of a rank into a file, and hides vLLM's traceback of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Handle one record of vLLM's logger."""
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        try:
            with Path(os.environ[_ERROR_FILE]).open("x", encoding="utf-8") as file:
                file.write(first_line(record.exc_info[1]))
        except FileExistsError:
            pass
        return False


if multiprocessing.parent_process() is not None and _ERROR_FILE in os.environ:
    # This process is a rank, which imports this module before it loads the model.
    logging.getLogger("vllm.v1.executor.multiproc_executor").addFilter(_WritesError())
    # End with the worker, however it ends: a rank that waits for other ranks does not notice the worker's end.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if multiprocessing.parent_process().is_alive() is False:  # type: ignore[union-attr]
        os._exit(1)
