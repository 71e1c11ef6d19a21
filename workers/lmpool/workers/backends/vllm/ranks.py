"""Runs a model of vLLM that is spread over several processes (ranks), and brings the ranks' rows to the worker.

With tensor or pipeline parallelism, vLLM runs each part of a model in a process of its own. The worker's process keeps
vLLM's scheduler. `RanksExecutor` replaces vLLM's executor there. `RankExtension` adds methods to vLLM's worker class in
each rank. Only the output rank answers, which is the first tensor rank of the last pipeline stage. The output rank
captures and encodes rows, and sends them with the answer of each step.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from mmap import MAP_POPULATE, MAP_SHARED, PROT_READ, mmap
from multiprocessing import util
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock
from pathlib import Path
from tempfile import gettempdir
from threading import Event
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.lora.layers import base_linear
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import multiproc_executor
from vllm.v1.outputs import AsyncModelRunnerOutput

from lmpool.embedded import ending
from lmpool.errors import WorkerError, first_line
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Encoding, RowBlock, no_new_rows
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.row_encoder import PositionAnswers, RowEncoder
from lmpool.workers.backends.vllm.capture import KEY, Captured, CaptureProcessor, PositionCapture
from lmpool.workers.backends.vllm.head import HeadFacts, HeadPart, joined_head
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.execution.folders import locked_folder
from lmpool.workers.execution.ranks import RankProcess, stay_with

RANK_ARGUMENTS = {
    "logits_processors": [f"{__name__}:RankCapture"],
    "worker_extension_cls": f"{__name__}.RankExtension",
    "distributed_executor_backend": "mp",
}
"""Options of an engine whose model is spread over several processes."""

_LEADER_CHECK_S = 5.0  # Seconds between two checks on another machine that the worker's first rank still runs.
_MAX_MISSED = 3  # Max failed checks in a row: the network or the worker's machine may be busy.
_REPORT_S = 1.0  # Max seconds from an error to the end of the rank that caused it.
_MARK_SIZE = 16  # Bytes by which a rank recognises the worker's shared memory.
_SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's environment variable: folder of its sockets.
_ERRORS = "LMPOOL_RANK_ERRORS"  # Environment variable of starting ranks: path of the worker's memory for their errors.

_log = logging.getLogger(__name__)
_engine_log = logging.getLogger("vllm.v1.executor.multiproc_executor")


class OpenedPositions(NamedTuple):
    """A positions query that a step begins to compute."""

    request: str  # The engine's request name of the prompt.
    ids: bytes  # The prompt's token ids, encoded as in a job.
    query: bytes  # The query, encoded with msgpack.
    adapter: int  # vLLM's number of the prompt's adapter; 0 without an adapter.


class RankFacts(NamedTuple):
    """What a rank says about itself before the first step."""

    device: str  # Its torch device, such as "cuda:1".
    missing: str  # Error message about a method for positions queries that this release of vLLM lacks; "" if none is.
    head: HeadFacts | str  # Its part of the output head, or the reason why clients cannot use the head.


class Place(NamedTuple):
    """Where the output rank may write the rows of a step: rows of shared memory that the worker has reserved."""

    offset: int  # Byte of the shared memory at which the first row begins.
    stride: int  # Bytes from one row to the next row.
    encoding: str  # Name of the encoding for which the rows are reserved.


class RowsInPlace(NamedTuple):
    """A block of rows that the output rank has written into the reserved shared memory, in the order of the digests."""

    digests: list[bytes]
    log_z: Any  # float32 (n,), or None for F32.


class Answer(NamedTuple):
    """What the output rank sends at the end of a step."""

    output: Any  # vLLM's own output of the step.
    blocks: list[RowBlock | RowsInPlace]  # The rows of the prompts that the step completes.
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
    add_lora: Any
    execute_model: Any
    sample_tokens: Any

    def lmpool_attach(self, lossy: bool, has_positions: bool) -> RankFacts:
        """Prepare a loaded rank for steps."""
        if _start_errors is not None:
            _engine_log.removeFilter(_start_errors)
        was_frozen = gc.get_freeze_count() > 0  # A rank on a GPU is, and `get_objects` leaves out frozen objects.
        gc.unfreeze()
        remove_names(gc.get_objects())
        if was_frozen:
            gc.freeze()
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
        self._lmpool_head: HeadPart | str = ""
        self._lmpool_memory: NDArray[np.uint8] | None = None
        self._lmpool_is_output = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
        missing = ""
        if get_pp_group().is_last_rank:
            RankCapture.current.captured.encoder = RowEncoder(model.dtype, lossy=lossy)
            if has_positions:
                positions = PositionCapture(model.get_vocab_size(), int, is_output=self._lmpool_is_output)
                try:
                    positions.attach(runner)
                    self._lmpool_positions = positions
                    self._lmpool_head = positions.find_head()
                except AttributeError as error:
                    missing = first_line(error)
        head = self._lmpool_head
        return RankFacts(str(runner.device), missing, head.facts if isinstance(head, HeadPart) else head)

    def lmpool_head(self, first: int, count: int) -> NDArray[np.uint8] | None:
        """See `HeadPart.weights`; None if this rank holds no part of the head."""
        return self._lmpool_head.weights(first, count) if isinstance(self._lmpool_head, HeadPart) else None

    def lmpool_add_lora(self, request: Any) -> str:
        """Load an adapter; returns the error, or ""."""
        try:
            return "" if self.add_lora(request) else "it does not fit the model"
        except Exception as error:  # noqa: BLE001  The worker raises the error.
            return first_line(error)

    def lmpool_map(self, path: str, begin: bytes, size: int) -> str:
        """Map the worker's shared memory, which begins with the bytes `begin`; returns the error, or ""."""
        try:
            # In another container or on another host, the path may name another file: do not change that file.
            with Path(path).open("rb") as file, mmap(file.fileno(), size, prot=PROT_READ) as memory:
                if memory[: len(begin)] != begin:
                    return f"{path} is another file on the rank's machine"
            with Path(path).open("r+b") as writable:
                # Map all pages now: mapping a page at its first write would take longer than the write.
                mapped = mmap(writable.fileno(), size, flags=MAP_SHARED | MAP_POPULATE)
            self._lmpool_memory = np.frombuffer(mapped, np.uint8)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def lmpool_execute(self, scheduler_output: Any, opened: Sequence[OpenedPositions], dropped: Sequence[str]) -> Any:
        """Run the forward of a step. The positions queries are opened and dropped on all ranks in the same order."""
        if (positions := self._lmpool_positions) is not None:
            for name in dropped:
                positions.drop(name)
            for request, ids, query, adapter in opened:
                decoded = msgspec.msgpack.decode(query, type=PositionsQuery)
                positions.open(request, BackendJob(b"", ids, str(adapter or ""), positions=decoded))
        return self.execute_model(scheduler_output)

    def lmpool_sample(
        self, grammar_output: Any, digests: list[bytes], positions: list[str], place: Place | None
    ) -> Any:
        """End a step.

        Args:
            grammar_output: vLLM's argument.
            digests: digests of the prompts whose rows the step completes.
            positions: request names of the prompts whose values at positions the step completes.
            place: shared memory for the rows, or None to send the rows with the answer.
        """
        capture = RankCapture.current
        capture.wanted = set(digests) if self._lmpool_is_output else set()
        memory = None
        if place is not None and self._lmpool_is_output:
            encoding, shape = Encoding[place.encoding], (len(digests), self.model_runner.model_config.get_vocab_size())
            strides = (place.stride, encoding.dtype.itemsize)
            memory = np.ndarray(shape, encoding.dtype, self._lmpool_memory, place.offset, strides)
            capture.captured.encoder.new_rows = lambda *wanted: memory if wanted == (*shape, encoding) else None
        output = self.sample_tokens(grammar_output)
        capture.captured.encoder.new_rows = no_new_rows
        answers = {}
        if self._lmpool_positions is not None:  # Take the answers on all ranks, because all ranks hold them.
            answers = {name: self._lmpool_positions.take(name) for name in positions}
        if not self._lmpool_is_output or output is None:
            return output
        taken, failures = capture.captured.take(digests)
        blocks = [
            block if memory is None or block.numbers.ctypes.data != memory.ctypes.data
            else RowsInPlace(block.digests, block.log_z)
            for block in taken
        ]  # fmt: skip
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


def remove_names(parts: Iterable[Any]) -> None:
    """Remove the names of shared memory that vLLM has mapped in several processes; other objects are ignored.

    The system then frees the memory with the last process, even if all processes are killed.
    """
    for memory in parts:
        if type(memory) is SharedMemory:
            with suppress(FileNotFoundError):  # Another process has removed the name.
                memory.unlink()
            memory.unlink = lambda: None  # type: ignore[method-assign]  # vLLM would remove the name again.


def remove_names_of_collectives() -> None:
    """Have the collectives of a CPU remove the name of this rank's shared memory when all ranks have mapped it."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Collectives

    init = Collectives._init_cpu_shm

    def init_and_remove_name(self: Any) -> Any:
        handle = init(self)
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    Collectives._init_cpu_shm = init_and_remove_name


def _device_for_adapters(layer: Any, find: Any = base_linear._get_lora_device) -> torch.device:
    """The device of a layer, which vLLM reads from its weight. The int8 kernel for CPUs without AMX drops weights."""
    return torch.device(current_platform.device_type) if getattr(layer, "weight", layer) is None else find(layer)


base_linear._get_lora_device = _device_for_adapters  # Here, because each process of a model imports this module.


class RanksExecutor(multiproc_executor.MultiprocExecutor):  # type: ignore[misc]  # vllm has no types here
    """vLLM's executor for several processes; it also passes on the rows and values that the output rank sends."""

    def attach(self, scheduler: Any, captured: Captured, positions: PositionsOfRanks | None) -> OutputHead | str:
        """Prepare all ranks for steps, with positions queries unless `positions` is None.

        Returns the model's head, or the reason why clients cannot use it.

        Raises:
            AttributeError: this release of vLLM lacks a method for positions queries; rows are captured.
        """
        self._scheduler, self._captured, self._positions = scheduler, captured, positions
        self._step: Any = None
        self._base: int | None = None  # Address of the shared memory in this process; None if the output rank has none.
        self._encoding = Encoding.F32  # The encoding of the last rows; the next rows will have it too.
        facts = self.collective_rpc("lmpool_attach", args=(captured.encoder.is_lossy, positions is not None))
        self.devices = [fact.device for fact in facts]
        captured.device = facts[self.output_rank].device
        if missing := next((fact.missing for fact in facts if fact.missing), ""):
            self._positions = None
            raise AttributeError(missing)
        heads = [fact.head for fact in facts[self.output_rank :]]  # The ranks of the last pipeline stage.
        parts = [head for head in heads if not isinstance(head, str)]
        if len(parts) < len(heads):
            return next(head for head in heads if isinstance(head, str))
        return joined_head(parts, self.model_config, self._fetch_weights)

    def _fetch_weights(self, first: int, count: int) -> Iterator[NDArray[np.uint8]]:
        found = self.collective_rpc("lmpool_head", args=(first, count))
        return (part for part in found if part is not None)

    def _init_executor(self) -> None:
        """Start the ranks; called by vLLM's constructor."""
        self._error: WorkerError | None = None  # The error, if a rank has ended too early.
        self._has_ended = Event()
        self._is_starting = True
        # The ranks of one machine meet at this memory: a port would be open on all interfaces, and a file would remain
        # if all processes were killed. Keep the memory, because process groups that are created later need it too.
        self._store = os.fdopen(os.memfd_create("lmpool-store"), "rb")
        path = f"file:///proc/{os.getpid()}/fd/{self._store.fileno()}"
        try:
            with patch.object(multiproc_executor, "get_file_store_init_method", lambda: path):
                super()._init_executor()
        except Exception as error:
            if self._error:
                raise self._error from error
            raise
        self._is_starting = False
        parts = (getattr(self.rpc_broadcast_mq, name, None) for name in ("buffer", "tensor_arena"))
        remove_names(getattr(part, "shared_memory", None) for part in parts)

    def _ensure_worker_termination(self, worker_procs: list[Any]) -> None:
        """End the ranks. If a rank has ended already, note its end.

        vLLM calls this method when it shuts down or cannot start, and in its own thread when a rank has ended.
        """
        if self._is_starting or self.is_failed:
            ended = wait([rank.sentinel for rank in worker_procs], _REPORT_S)
            for rank in worker_procs:
                if rank.sentinel in ended and not self._error:
                    rank.join(_REPORT_S)
                    # A rank that cannot start ends with code 0 after it has reported its error.
                    if rank.exitcode or self.is_failed:
                        number = rank.name.rpartition("-")[2]
                        text = f"rank {number} of the model has failed: its process {ending(rank.exitcode or 0)}"
                        self._error = WorkerError(text)
        # The ranks may wait for a rank that has ended.
        if self._error or self._is_starting or self.parallel_config.node_rank:
            for rank in worker_procs:
                rank.kill()
        self._has_ended.set()
        super()._ensure_worker_termination(worker_procs)

    def cause_of(self, error: BaseException) -> BaseException:
        """The error of a rank whose end may have caused an error of this process; `error` itself if all ranks run."""
        self._has_ended.wait(_REPORT_S)
        return self._error or error

    def collective_rpc(self, *arguments: Any, **options: Any) -> Any:
        """Call a method of all ranks. If a rank has ended, raises its error in place of vLLM's unspecific one."""
        try:
            return super().collective_rpc(*arguments, **options)
        except Exception as error:
            if (cause := self.cause_of(error)) is not error:
                raise cause from error
            raise

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter in all ranks.

        Raises:
            ValueError: a rank cannot load the adapter.
            WorkerError: a rank has ended.
        """
        for error in filter(None, self.collective_rpc("lmpool_add_lora", args=(lora_request,))):
            raise ValueError(error)
        return True

    def map_memory(self, fd: int, memory: Any) -> None:
        """Have the output rank map shared memory that is mapped here as `memory`, a buffer; `fd` is its descriptor.

        Writes a mark at the beginning of the memory.
        """
        seen = np.frombuffer(memory, np.uint8)
        begin = os.urandom(_MARK_SIZE)
        seen[:_MARK_SIZE] = np.frombuffer(begin, np.uint8)
        error = self._call("lmpool_map", (f"/proc/{os.getpid()}/fd/{fd}", begin, seen.nbytes), non_block=False)
        if error:
            _log.warning("rows are copied once more, because a rank cannot map the worker's shared memory: %s", error)
        else:
            self._base = seen.ctypes.data

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run the forward of a step on all ranks."""
        self._step = scheduler_output
        changes = ([], []) if self._positions is None else self._positions.changes()
        return self._call("lmpool_execute", (scheduler_output, *changes), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End the step that `execute_model` began last."""
        digests, positions = dict[bytes, str](), list[str]()  # Digest -> request name; request names.
        for name in self._step.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            if not request.is_prefill_chunk:
                digest = (request.sampling_params.extra_args or {}).get(KEY)
                if digest is None:
                    positions.append(name)
                else:
                    digests[digest] = name
        # Note the encoding: the answer of a step before this step may change it while this step runs.
        memory, place, base, encoding = None, None, self._base, self._encoding
        if digests and base is not None:
            memory = self._captured.encoder.new_rows(len(digests), self._captured.vocab_size, encoding)
        if memory is not None and base is not None:
            place = Place(memory.ctypes.data - base, memory.strides[0], encoding.name)
        future = self._call("lmpool_sample", (grammar_output, list(digests), positions, place), non_block=True)
        future.aggregate = partial(self._received, digests, memory, encoding)
        return future if non_block else future.result()

    def _call(self, method: str, arguments: tuple[Any, ...], non_block: bool) -> Any:
        # Without a timeout: the worker's watchdog ends a step that hangs.
        return self.collective_rpc(method, args=arguments, unique_reply_rank=self.output_rank, non_block=non_block)

    def _received(
        self, names: Mapping[bytes, str], memory: NDArray[Any] | None, encoding: Encoding, answer: Answer
    ) -> Any:
        """Store the rows and values of an answer, except those of aborted requests; returns vLLM's own output.

        Args:
            names: digest of each prompt whose row the step completes -> request name.
            memory: the memory that was reserved for the rows, if any.
            encoding: the encoding for which the memory was reserved.
            answer: the output rank's answer.
        """
        if not isinstance(answer, Answer):
            return answer
        blocks = []
        for block in answer.blocks:
            if isinstance(block, RowsInPlace):
                assert memory is not None
                block = RowBlock(block.digests, memory[: len(block.digests)], block.log_z, encoding)
            blocks.append(block)
            self._encoding = block.encoding
        self._captured.store(blocks, answer.failures)
        # A request may have been aborted while the step ran: the backend does not take its results.
        requests = self._scheduler.requests
        for digest, name in names.items():
            if name not in requests:
                self._captured.drop(digest)
        if self._positions is not None:
            kept = {name: values for name, values in answer.positions.items() if name in requests}
            self._positions.received.update(kept)
        return answer.output


class PositionsOfRanks(PositionAnswers):
    """The positions queries in flight, in the worker's process; the ranks compute the values.

    `lora_id` is a function that returns vLLM's number of a job's adapter.
    """

    def __init__(self, lora_id: Callable[[str], int]) -> None:
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
        if request in self._open and self._opened.pop(request, None) is None:
            self._dropped.append(request)
        super().drop(request)
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


def wait_for_worker(executor: RanksExecutor) -> None:
    """Wait until the worker on the machine with `node_rank` 0 has ended, and end the ranks of this machine.

    Raises:
        WorkerError: a rank of this machine has ended before.
    """
    parallel, missed = executor.parallel_config, 0
    try:
        while missed < _MAX_MISSED:
            if wait([rank.proc.sentinel for rank in executor.workers], _LEADER_CHECK_S):
                raise executor.cause_of(WorkerError("a process of the model has ended"))
            try:  # The worker's first rank listens on this port as long as it runs.
                socket.create_connection((parallel.master_addr, parallel.master_port), _LEADER_CHECK_S).close()
                missed = 0
            except ConnectionRefusedError:
                return
            except OSError:
                missed += 1
    finally:
        executor.shutdown()


def start_core(config: Any) -> InprocClient:
    """Start an engine core whose model is spread over processes.

    Raises:
        WorkerError: a rank cannot start; the message is the rank's error.
    """
    with starting():
        executor = RanksExecutor(config)
        try:
            return InprocClient(config, lambda _: executor, log_stats=False)
        except BaseException:
            executor.shutdown()
            raise


@contextmanager
def starting() -> Iterator[None]:
    """Start ranks in this context; raises the first error of a rank in place of vLLM's, which does not name it."""
    # vLLM's sockets are not needed after this context.
    folders, memory = locked_folder("lmpool-ranks-", Path(gettempdir())), os.memfd_create("lmpool-ranks")
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
    before = set(registry)
    with folders as folder, os.fdopen(memory, "r+", encoding="utf-8") as errors:
        sockets = os.environ.get(_SOCKETS)
        os.environ[_SOCKETS], os.environ[_ERRORS] = folder, f"/proc/{os.getpid()}/fd/{errors.fileno()}"
        # A forked rank would inherit the worker's connections, and would not import this module again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        try:
            with patch.object(SpawnContext, "Process", RankProcess):
                yield
        except WorkerError:
            raise
        except Exception as error:
            errors.seek(0)
            if reason := errors.readline().rstrip():
                raise WorkerError(reason) from error
            raise
        finally:
            # Remove the names of the semaphores that vLLM has made: all ranks have opened them.
            for key in set(registry) - before:
                if (finalizer := registry.get(key)) and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
                    finalizer()
            del os.environ[_ERRORS], os.environ[_SOCKETS]
            if sockets is not None:
                os.environ[_SOCKETS] = sockets


class _StartErrors(logging.Filter):
    """Writes the errors of a starting rank into the worker's memory, and hides vLLM's tracebacks of them."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115  The process's end closes it.

    def filter(self, record: logging.LogRecord) -> bool:
        """Handle one record of vLLM's logger."""
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        self._file.write(first_line(record.exc_info[1]) + "\n")
        return False


_start_errors: _StartErrors | None = None
_parent = multiprocessing.parent_process()
if _parent is not None and os.environ.get(_ERRORS, "").startswith(f"/proc/{_parent.pid}/"):
    # This process is a rank, which imports this module after most of vLLM, and before it loads the model.
    gc.enable()
    stay_with(cast(int, _parent.pid))  # Ignore signals again: vLLM has installed its handlers.
    _start_errors = _StartErrors(os.environ[_ERRORS])
    _engine_log.addFilter(_start_errors)
    if current_platform.is_cpu():
        remove_names_of_collectives()
