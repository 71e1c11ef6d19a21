"""Runs SGLang's scheduler in a thread: starts it, sends requests, captures rows and positions, and ends it."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
from argparse import ArgumentParser
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar, get_type_hints
from uuid import uuid4

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt import runtime_context
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.managers import io_struct
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import cpu_has_amx_support
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from tqdm import std as tqdm  # type: ignore[import-untyped]

from lmpool.errors import SettingsError, WorkerError, first_line
from lmpool.protocol.job import decode_ids
from lmpool.workers.backends.checkpoint import NewWeights
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.row_encoder import MAX_LOGITS, Piece, PositionAnswers
from lmpool.workers.backends.sglang.head import RankHead
from lmpool.workers.backends.sglang.weights import RankWeights
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.execution.ranks import Followers

_CLOSE_S = 30.0  # Max seconds to wait for the forward in progress when the engine is closed.
_CHECK_S = 1.0  # Seconds between two checks that the scheduler's thread is alive, while another thread waits for it.
# Seconds between two broadcasts of rank 0 while it is idle: the followers wait for a broadcast, at most for torch's
# timeout of a collective, which is minutes.
_IDLE_S = 1.0
_TOO_LITTLE_MEMORY = re.compile("(?i)out of memory|not enough memory|allocate memory|memory pool|memory capacity")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EngineBatch(NamedTuple):
    """The results of one forward, by the objects that were passed to `SglangEngine.submit`."""

    prompts: Sequence[BackendJob] = ()  # The job of each row of `logits`.
    logits: Tensor | None = None  # A copy of the logits (n, V) on the engine's device; None if no row is complete.
    computed: Any = None  # CUDA event after which the logits may be read; None on a CPU.
    tokens: int = 0  # Number of tokens of the completed prompts.
    reused: int = 0  # Number of tokens of the completed prompts that were in the prefix cache.
    failures: Mapping[BackendJob, str] = MappingProxyType({})  # Job -> reason why SGLang has not computed a result.
    positions: Mapping[BackendJob, NDArray[np.float32]] = MappingProxyType({})  # Job -> float32 values (n * width,).


class SglangEngine:
    """A scheduler of SGLang in its own thread: it takes requests from one queue, and puts results into another queue.

    Values at positions are captured where SGLang computes logprobs of prompts. A request with a positions query sets
    `return_logprob` from the first requested position on. SGLang then uses its prefix cache up to this position only,
    and computes the logits of the remaining tokens, some rows at a time. Hidden states are captured in the same place.

    With tensor parallelism, this scheduler is rank 0. The other ranks are followers, which run SGLang's own loop with
    the requests that rank 0 broadcasts. Each pass of rank 0's loop makes one broadcast.

    `context` is the beginning of the error message if the model cannot be loaded. `command` starts a follower.

    Attributes:
        end: the error that ends the engine, as soon as one does.
        head: the output head, if the first forward has shown that it gives the model's logits.
    """

    def __init__(self, options: Mapping[str, Any], context: str, command: Sequence[str]) -> None:
        self.scheduler: Any = None  # SGLang's scheduler; None before its start and after its end.
        self.answers_positions = False
        self._lora_ids: dict[str, str | None] = {"": None}  # Adapter -> SGLang's id of the adapter.
        self._loads: dict[str, Future[Any]] = {}  # SGLang's id of each adapter that is being loaded -> SGLang's result.
        self._weights: Future[Tensor] = Future()  # The weights of the head that another thread waits for.
        self._updated: Future[tuple[bool, str]] = Future()  # SGLang's result of `load_weights`.
        self._update: Any = None  # The request of `load_weights` until SGLang is idle.
        self._dropped: dict[str | None, str] = {}  # SGLang's id -> adapter that was dropped, but is not yet unloaded.
        # Use names of equal length: to abort a name, SGLang aborts every request whose name starts with this name.
        self._names = (f"{number:016x}" for number in count())
        self._owed: dict[str, BackendJob] = {}  # Name of each request in flight -> its job.
        self._positions = PositionAnswers()
        self._batch: Any = None  # SGLang's batch in progress.
        # Functions that the scheduler's thread must call; a function may return requests for SGLang.
        self._orders: SimpleQueue[Callable[[], list[Any] | None]] = SimpleQueue()
        # Results of forwards; the first result reports the start. An exception in the queue means that the thread ends.
        self._results: SimpleQueue[EngineBatch | BaseException] = SimpleQueue()
        self._error: BaseException | None = None
        self._command = command
        self._followers: Followers | None = None
        self.end: Future[BaseException] = Future()
        self.head: OutputHead | None = None
        # Make the thread a daemon, so that a forward that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(options,), name="lmpool-sglang", daemon=True)
        self._thread.start()
        if isinstance(failure := self._results.get(), SettingsError):
            raise failure
        if isinstance(failure, BaseException):  # SGLang has no exception type of its own, so catch all.
            is_too_little = isinstance(failure, MemoryError) or _TOO_LITTLE_MEMORY.search(str(failure)) is not None
            setting = "kv_cache_bytes" if is_too_little else "model"
            # Leave out the long lists of accepted values.
            reason = first_line(failure).partition(" Must be one of [")[0]
            if "EADDRINUSE" in reason:
                reason = "another program has taken the port of SGLang's processes: start the worker again"
            raise SettingsError(f"{setting}: {context}: {reason}") from failure

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Submit jobs, which the caller must not change afterwards."""
        named = {next(self._names): job for job in jobs}
        requests = [make_request(name, job, self._lora_ids[job.adapter]) for name, job in named.items()]

        def order() -> list[Any]:
            self._owed.update(named)
            for name, job in named.items():
                if job.positions is not None:
                    self._positions.open(name, job)
            return requests

        self._orders.put(order)

    def drop(self, digests: Collection[bytes]) -> None:
        """Abort the requests of these jobs that are still in flight."""

        def order() -> list[Any]:
            names = [name for name, job in self._owed.items() if job.digest in digests]
            return [io_struct.AbortReq(rid=name) for name in names if self._forget(name)]

        self._orders.put(order)

    def load_adapter(self, adapter: str, folder: Path) -> None:
        """Load an adapter ("name@revision") from a folder with the weights and config of `plain_adapter`."""
        lora_id = uuid4().hex  # Use a new id for each load, because the prefix cache tells adapters apart by id.
        wanted = io_struct.LoadLoRAAdapterReqInput(lora_name=adapter, lora_path=str(folder), lora_id=lora_id)
        loaded = self._loads[lora_id] = Future()
        self._orders.put(lambda: [*self._take_dropped(), wanted])
        result = self._result_of(loaded)
        if not result.success:
            raise SettingsError(f"adapters: SGLang cannot load {adapter!r}: {result.error_message}")
        self._lora_ids[adapter] = lora_id

    @property
    def packs_weights(self) -> bool:
        """Whether SGLang has packed weights for AMX. It would pack weights again that are not loaded again."""
        return str(self.scheduler.server_args.device) == "cpu" and bool(cpu_has_amx_support())

    def load_weights(self, new: NewWeights) -> None:
        """Load weights in all ranks and drop the prefix cache, as soon as SGLang is idle."""
        loaded = self._updated = Future()
        wanted = io_struct.UpdateWeightFromDiskReqInput(model_path=msgspec.json.encode(new).decode())

        def order() -> None:
            self._update = wanted

        self._orders.put(order)
        succeeded, message = self._result_of(loaded)
        if not succeeded:
            raise WorkerError(f"SGLang cannot load the weights: {message}")

    def _read_weights(self, first: int, count: int) -> Tensor:
        """Rows of the head's weights, which the ranks read together."""
        read = self._weights = Future()
        wanted = io_struct.GetWeightsByNameReqInput(name=str(first), truncate_size=count)
        self._orders.put(lambda: [wanted])
        return self._result_of(read)

    def _result_of(self, future: Future[_T]) -> _T:
        """Wait for a result of the scheduler's thread."""
        while True:
            try:
                return future.result(_CHECK_S)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise WorkerError("SGLang's engine died") from None

    def drop_adapter(self, adapter: str) -> None:
        """Unload an adapter soon, or if a request still uses it, at a later load or drop of an adapter."""
        self._dropped[self._lora_ids.pop(adapter)] = adapter
        self._orders.put(self._take_dropped)

    def _take_dropped(self) -> list[Any]:
        """Requests that unload the dropped adapters that no request uses; called in the scheduler's thread."""
        scheduler = self.scheduler
        lists = [scheduler.waiting_queue]
        lists += [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        in_use = {request.lora_id for requests in lists for request in requests}
        unused = self._dropped.keys() - in_use - {getattr(scheduler.chunked_req, "lora_id", None)}
        make = io_struct.UnloadLoRAAdapterReqInput
        return [make(lora_name=self._dropped.pop(lora_id), lora_id=lora_id) for lora_id in unused]

    def results(self) -> list[EngineBatch]:
        """The results since the last call; waits for at least one result."""
        batches: list[EngineBatch] = []
        while self._error is None and not (batches and self._results.empty()):
            result = self._results.get()
            if isinstance(result, BaseException):
                self._error = result
            else:
                batches.append(result)
        if batches or self._error is None:
            return batches
        if isinstance(self._error, WorkerError):
            raise self._error
        raise WorkerError(f"SGLang's engine died: {first_line(self._error)}") from self._error

    def close(self) -> None:
        """End the event loop after its current forward, and free the engine's memory."""
        self._orders.put(lambda: [io_struct.ShutdownReq()])
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("SGLang's engine has not ended within %g s: its memory is not freed", _CLOSE_S)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # The methods below run in the scheduler's thread.

    def _run(self, options: Mapping[str, Any]) -> None:
        timeout_s = 0.0
        try:
            server_args = make_server_args(options)
            ports = make_ports(server_args)
            if (ranks := server_args.tp_size) > 1:
                setups = [{"options": dict(options), "ports": vars(ports), "rank": rank} for rank in range(1, ranks)]
                self._followers = Followers(self._command, setups, self._fail)
            self.scheduler = make_scheduler(server_args, ports)
            self._redirect(self.scheduler)
            self._results.put(EngineBatch())
            self.scheduler.run_event_loop()
            if self._followers is not None:
                self._followers.expect_end()
            self._results.put(WorkerError("SGLang's event loop has ended"))
            timeout_s = _CLOSE_S
        except BaseException as error:  # noqa: BLE001  # The thread that reads the results raises the error.
            self._fail(error if self._followers is None else self._followers.cause_of(error))
        finally:
            scheduler, self.scheduler = self.scheduler, None
            if scheduler is not None:
                end_scheduler(scheduler)
            if self._followers is not None:
                self._followers.close(timeout_s)

    def _fail(self, error: BaseException) -> None:
        self._results.put(error)
        with suppress(InvalidStateError):  # The first error was the end of a follower, which caused this error.
            self.end.set_result(error)

    def _redirect(self, scheduler: Any) -> None:
        """Have a scheduler receive requests from the queue, and capture the logits of its prefills."""
        scheduler.run_batch = partial(self._run_noted, scheduler.run_batch)
        scheduler.process_batch_result = partial(self._process_and_capture, scheduler.process_batch_result)
        receive = partial(self._receive, scheduler.request_receiver._broadcast_reqs_across_ranks)
        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)  # Replace SGLang's socket.
        scheduler.tp_worker.load_lora_adapter = partial(self._load_and_report, scheduler.tp_worker.load_lora_adapter)
        worker = scheduler.tp_worker
        worker.get_weights_by_name = partial(self._read_and_report, worker.get_weights_by_name)
        updater = worker.model_runner.weight_updater
        updater.update_weights_from_disk = partial(self._update_and_report, updater.update_weights_from_disk)
        for processor in logprob_processors(scheduler):
            self.answers_positions = True
            processor.forward = partial(self._capture_positions, processor.forward)

    def _load_and_report(self, load: Callable[[Any], Any], wanted: Any) -> Any:
        result = load(wanted)
        self._loads.pop(wanted.lora_id).set_result(result)
        return result

    def _read_and_report(self, read: Callable[[Any], Tensor], wanted: Any) -> None:
        self._weights.set_result(read(wanted))

    def _update_and_report(self, update: Callable[..., tuple[bool, str]], *given: Any, **named: Any) -> Any:
        result = update(*given, **named)
        self._updated.set_result(result)
        return result

    def _receive(self, broadcast: Callable[[list[Any]], list[Any]], local_reqs: list[Any] | None = None) -> list[Any]:
        """The requests and aborts for SGLang, broadcast to all ranks; waits if SGLang is idle.

        `local_reqs`: SGLang's own abort requests.
        """
        received, is_idle = list(local_reqs or ()), self.scheduler.is_fully_idle()
        taken_back = {request.rid for request in received if isinstance(request, io_struct.AbortReq)}
        # An idle scheduler has dropped all requests that have no result, and has reported them only to its socket.
        if lost := [name for name in self._owed if is_idle or name in taken_back]:
            text = "SGLang has dropped the prompt without an answer"
            self._results.put(EngineBatch(failures={self._forget(name): text for name in lost}))
        if is_idle and self._update is not None:
            received.append(self._update)
            self._update, is_idle = None, False
        with suppress(Empty):
            while is_idle or not self._orders.empty():
                received += self._orders.get(timeout=_IDLE_S if self._followers else None)() or ()
                is_idle = False
        return broadcast(received)

    def _forget(self, name: str) -> BackendJob:
        """Discard a request in flight; returns its job."""
        self._positions.drop(name)
        return self._owed.pop(name)

    def _process_and_capture(self, process: Any, batch: Any, result: Any, *more: Any, **named: Any) -> None:
        """Process a batch's result as SGLang does, and capture the results of the prompts that the batch completes."""
        # Keep requests and logits: SGLang discards both while it processes the result.
        requests = list(batch.reqs)
        logits: Any = result.logits_output.next_token_logits if result.logits_output is not None else None
        process(batch, result, *more, **named)
        rows, prompts, failures, positions = [], [], {}, {}
        tokens = reused = 0
        for row, request in enumerate(requests):
            # Skip logits of incomplete prompts: a prompt that is computed in parts has a row of logits for each part.
            if not request.finished() or (job := self._owed.pop(request.rid, None)) is None:
                continue
            if isinstance(request.finished_reason, FINISH_ABORT):
                failures[job] = f"SGLang refuses the prompt: {request.finished_reason.message}"
                self._positions.drop(request.rid)
                continue
            length = len(job.ids) // 4
            if len(request.origin_input_ids) != length:
                raise WorkerError(f"SGLang has computed {len(request.origin_input_ids)} tokens of a prompt of {length}")
            if job.positions is None:
                rows.append(row)
                prompts.append(job)
            elif isinstance(answer := self._positions.take(request.rid), str):
                failures[job] = answer
            else:
                positions[job] = answer
            tokens += length
            reused += request.cached_tokens
        taken = computed = None
        if rows:
            shape, count = None if logits is None else tuple(logits.shape), len(requests)
            vocab_size = self.scheduler.model_config.vocab_size
            if not batch.forward_mode.is_extend():
                raise WorkerError(f"SGLang has completed prompts in a forward that is no prefill: {batch.forward_mode}")
            if shape != (count, vocab_size):
                raise WorkerError(f"SGLang returned logits of shape {shape} for {count} prompts and V = {vocab_size}")
            # Copy the logits, because the next forward may overwrite the engine's memory.
            taken = logits.clone() if len(rows) == count else logits[rows]
            if taken.is_cuda:
                computed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch is partly untyped
                computed.record()
        if self.head is None and (part := self.scheduler.output_head.part) is not None:
            self.head = replace(part, weights=self._read_weights)
        self._results.put(EngineBatch(prompts, taken, computed, tokens, reused, failures, positions))

    def _run_noted(self, run: Callable[..., Any], batch: Any, *more: Any, **named: Any) -> Any:
        self._batch = batch
        try:
            return run(batch, *more, **named)
        finally:
            self._batch = None  # Drop the reference to the batch, which holds device memory.

    def _capture_positions(self, forward: Callable[..., Any], **named: Any) -> Any:
        """Run SGLang's logprob processor, and add hidden states, or values of the computed logits, to the answers."""
        compute, batch, row, first = named["get_logits_fn"], self._batch, 0, 0
        of_states, of_logits = list[Piece](), list[Piece]()
        # Find the positions of each prompt's rows of logits. The last row is the prompt's last token in this forward.
        for index, rows in groupby(named["token_to_seq_idx"]):
            count, end = len(list(rows)), batch.prefix_lens[index] + batch.extend_lens[index]
            name = batch.reqs[index].rid
            pieces = of_states if self._positions.wants_states(name) else of_logits
            pieces += self._positions.wanted(name, range(end - count, end), row)
            row += count
        if self._followers is None and all(self._positions.wants_states(request.rid) for request in batch.reqs):
            # No request needs logits. With followers, compute logits in any case: all ranks must do so together.
            self._positions.add(of_states, 0, named["pruned_states"])
            return LogprobResult(torch.zeros(len(named["input_logprob_indices"]))), None

        def compute_and_add(states: Tensor, *more: Any, **options: Any) -> Tensor:
            nonlocal first
            logits: Tensor = compute(states, *more, **options)
            self._positions.add(of_states, first, states)
            self._positions.add(of_logits, first, logits)
            first += len(states)
            return logits

        return forward(**{**named, "get_logits_fn": compute_and_add})


def known_options() -> dict[str, bool]:
    """SGLang's options: name -> whether the option takes a text."""
    hints = get_type_hints(ServerArgs)
    return {name: hint in (str, str | None) for name, hint in hints.items() if not name.startswith("_")}


def option_names() -> dict[str, str]:
    """Name of each option on SGLang's own command line -> its name in `ServerArgs`."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = known_options()
    flags = ((flag, action.dest) for action in parser._actions for flag in action.option_strings)
    flags = ((flag, name) for flag, name in flags if name in known and not flag.startswith("--no-"))
    return {flag.lstrip("-").replace("-", "_"): name for flag, name in flags}


def lacks_quantised_kernels(method: str) -> bool:
    """Whether SGLang supports this method of quantisation, but has no kernels for it on this CPU."""
    return method in QUANTIZATION_METHODS and not cpu_has_amx_support()


def read_facts(folder: Path, trust_remote_code: bool, ranks: int = 1) -> tuple[int, int]:
    """A model's max context length in tokens, and the count of numbers in one token's keys and values (0 for none).

    The numbers are those of one rank, which has a share of the heads.
    """
    config = get_hf_text_config(get_config(str(folder), trust_remote_code=trust_remote_code))
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        numbers = 0
    elif compressed := getattr(config, "kv_lora_rank", None):
        numbers = compressed + config.qk_rope_head_dim  # Multi-head latent attention caches one vector for all heads.
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers = 2 * max(1, (getattr(config, "num_key_value_heads", None) or heads) // ranks) * size
    return get_context_length(config), config.num_hidden_layers * numbers


def make_server_args(options: Mapping[str, Any]) -> Any:
    """SGLang's own form of its options."""
    server_args = ServerArgs(**options)
    server_args.resolve_once()
    server_args.check_server_args()
    return server_args


def make_ports(server_args: Any) -> Any:
    """The addresses of a model's schedulers. Their files are removed, because no process uses SGLang's sockets."""
    ports = PortArgs.init_new(server_args)
    for value in vars(ports).values():
        if isinstance(value, str) and value.startswith("ipc://"):
            Path(value.removeprefix("ipc://")).unlink(missing_ok=True)
    return ports


def make_scheduler(server_args: Any, ports: Any, rank: int = 0) -> Any:
    """Load a model, or a rank's part of it. Call this function in the thread that will run the event loop."""
    # Create and initialise the scheduler in two steps, so that it can be ended if the initialisation fails.
    scheduler = Scheduler.__new__(Scheduler)
    # Save sys.excepthook to restore it later: torch's process groups replace it, to prefix tracebacks with a rank.
    hook, show_bar, make_writer = sys.excepthook, tqdm.tqdm.__init__, scheduler_module.create_load_snapshot_writer
    try:
        gpu = server_args.base_gpu_id + rank * server_args.gpu_id_step
        ranks = runtime_context.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu)
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)
        if not sys.stderr.isatty():  # SGLang has no option to switch its progress bars off.
            tqdm.tqdm.__init__ = lambda bar, *more, **named: show_bar(bar, *more, **{**named, "disable": True})
        # Write no load statistics: a worker that is killed would leave their file in shared memory.
        scheduler_module.create_load_snapshot_writer = lambda *_, **__: None
        scheduler.__init__(server_args, ports)
    except BaseException:
        end_scheduler(scheduler)
        raise
    finally:
        sys.excepthook, tqdm.tqdm.__init__, scheduler_module.create_load_snapshot_writer = hook, show_bar, make_writer
    _disconnect(scheduler)
    for processor in logprob_processors(scheduler):
        # Do not let SGLang compute logprobs in the memory of CUDA graphs, which has no space for the capture. All ranks
        # must compute the same parts of the logits.
        processor._can_borrow_logprob_memory = lambda *_, **__: False
        most = max(1, MAX_LOGITS // scheduler.model_config.vocab_size)
        processor.logprobs_chunk_size = min(processor.logprobs_chunk_size, most)
    worker = scheduler.tp_worker
    group = runtime_context.get_parallel().tp_group
    scheduler.output_head = RankHead(worker.model_runner.model, scheduler.model_config, group)
    worker.get_weights_by_name = scheduler.output_head.read
    worker.model_runner.weight_updater = RankWeights(worker.model_runner, group)
    if server_args.tp_size > 1:
        worker.load_lora_adapter = partial(_load_in_all_ranks, worker.load_lora_adapter)
    return scheduler


def logprob_processors(scheduler: Any) -> Iterator[Any]:
    """The modules that compute logprobs of prompts."""
    for module in scheduler.tp_worker.model_runner.model.modules():
        if isinstance(module, LogitsProcessor):
            yield module.input_logprob_processor


def _load_in_all_ranks(load: Callable[[Any], Any], wanted: Any) -> Any:
    """Load an adapter, and wait for the other ranks, which read the same files; fails if one rank fails."""
    result = load(wanted)
    failed = torch.tensor(int(not result.success))
    all_reduce(failed, ReduceOp.MAX, runtime_context.get_parallel().tp_group.cpu_group)
    if result.success and failed:
        result.success, result.error_message = False, "another rank cannot load it"
    return result


def make_request(name: str, job: BackendJob, adapter: str | None) -> Any:
    """A request for the logits of a prompt, without a sampled token. No request's `name` may be a prefix of another."""
    tokens = array("q")
    tokens.frombytes(decode_ids(job.ids).astype(np.int64).tobytes())
    sampling = SamplingParams(max_new_tokens=0)
    sampling.normalize(None)
    return io_struct.TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=tokens,
        sampling_params=sampling,
        return_logprob=job.positions is not None,
        logprob_start_len=-1 if job.positions is None else job.positions.start,
        top_logprobs_num=0,
        stream=False,
        lora_id=adapter,
        **dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")),  # Unused fields.
    )


def end_scheduler(scheduler: Any) -> None:
    """Free the resources of a scheduler, even if its initialisation failed; its event loop must have ended."""
    if (watchdog := getattr(scheduler, "watchdog", None)) is not None:
        # Disable the watchdog: its thread never ends, and would keep a reference to the scheduler.
        watchdog.is_active = lambda: False
        watchdog.get_counter = lambda: 0
        watchdog.dump_info = None
        scheduler.release_host_resources()
    _disconnect(scheduler)
    # End this process's part of torch's process groups.
    destroy_model_parallel()
    destroy_distributed_environment()


def _disconnect(scheduler: Any) -> None:
    """Close the sockets to SGLang's other processes, which do not exist here; followers have none."""
    channels = getattr(scheduler, "ipc_channels", None)
    if channels is not None and channels.recv_from_tokenizer is not None:
        # Remove the sockets, so that SGLang sends nothing.
        channels.send_to_tokenizer.socket = channels.send_to_detokenizer.socket = None
        # Close the context explicitly: garbage collection of a context with open sockets would block forever.
        channels.recv_from_tokenizer.context.destroy(linger=0)
