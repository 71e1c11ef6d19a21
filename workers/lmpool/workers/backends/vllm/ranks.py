"""Runs a model of vLLM that is spread over several processes (ranks), and brings the ranks' rows to the worker.

With tensor or pipeline parallelism, vLLM runs each part of a model in a process of its own. The worker's process keeps
vLLM's scheduler. `RanksExecutor` replaces vLLM's executor there. `RankExtension` adds methods to vLLM's worker class in
each rank. Only one rank answers: the output rank, which is the first tensor rank of the last pipeline stage. It captures
and encodes rows, and sends them with the answer of each step.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput

from lmpool.errors import first_line
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import RowBlock
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.vllm.capture import KEY, Captured, CaptureProcessor, PositionCapture, PositionsElsewhere
from lmpool.workers.execution.contract import BackendJob

CAPTURE = f"{__name__}:RankCapture"
"""The logits processor of each rank, as vLLM's option `logits_processors` names it."""

EXTENSION = f"{__name__}.RankExtension"
"""The class of further methods of vLLM's workers, as vLLM's option `worker_extension_cls` names it."""

ERROR_FILE = "LMPOOL_RANK_ERROR"
"""The environment variable with the path of the file in which a rank writes why it cannot start."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Signals for the worker; the ranks end after the worker.


class OpenedPositions(NamedTuple):
    """A positions query that a step begins to compute."""

    request: str  # The engine's request name of the prompt.
    ids: bytes  # The prompt's token ids, encoded as in a job.
    query: bytes  # The query, encoded with msgpack.
    adapter: int  # vLLM's number of the prompt's adapter; 0 without an adapter.


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

    def lmpool_attach(self, lossy: bool, has_positions: bool) -> dict[str, Any]:
        """Prepare a loaded rank for steps; returns its process id, its device and the names of missing methods."""
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
                positions = PositionCapture(model.get_vocab_size(), {})
                try:
                    positions.attach(runner)
                    self._lmpool_positions = positions
                except AttributeError as error:
                    missing = first_line(error)
        return {"pid": os.getpid(), "device": str(runner.device), "missing": missing}

    def lmpool_execute(self, scheduler_output: Any, opened: Sequence[OpenedPositions], dropped: Sequence[str]) -> Any:
        """Run the forward of a step. The positions queries are opened and dropped on all ranks in the same order."""
        if (positions := self._lmpool_positions) is not None:
            for name in dropped:
                positions.drop(name)
            for request, ids, query, adapter in opened:
                decoded = msgspec.msgpack.decode(query, type=PositionsQuery)
                name = str(adapter) if adapter else ""
                positions.lora_ids[name] = adapter
                positions.open(request, BackendJob(b"", ids, name, positions=decoded))
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

    def attach(self, scheduler: Any, captured: Captured, positions: PositionsElsewhere, *, lossy: bool) -> list[Any]:
        """Prepare all ranks for steps; returns what each rank says about itself (see `lmpool_attach`)."""
        self._scheduler, self._captured, self._positions = scheduler, captured, positions
        self._step: Any = None
        facts: list[Any] = self.collective_rpc("lmpool_attach", args=(lossy, positions.is_used))
        captured.device = facts[self.output_rank]["device"]
        return facts

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run the forward of a step on all ranks."""
        self._step = scheduler_output
        changes = self._positions.changes()
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
        self._positions.received.update(answer.positions)
        return answer.output


class _WritesError(logging.Filter):
    """Writes the first error of a rank into a file, and hides vLLM's traceback of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Handle one record of vLLM's logger."""
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        try:
            with open(os.environ[ERROR_FILE], "x", encoding="utf-8") as file:
                file.write(first_line(record.exc_info[1]))
        except FileExistsError:
            pass
        return False


if multiprocessing.parent_process() is not None and ERROR_FILE in os.environ:
    # This process is a rank, which imports this module before it loads the model.
    logging.getLogger("vllm.v1.executor.multiproc_executor").addFilter(_WritesError())
    # End with the worker, however it ends: a rank that waits for other ranks does not notice the worker's end.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if multiprocessing.parent_process().is_alive() is False:  # type: ignore[union-attr]
        os._exit(1)
