"""A process that calls SGLang's scheduler directly: `python -m benchmarks.peers.sglang_peer MODEL`.

This is the minimal program for rows in one process: no queue, no cache, no checks. The program replaces the scheduler's
receiver and processing of results. It runs in SGLang's environment on a CPU, and imports only stubs of lmpool's tests.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import threading
import time
from array import array
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from tests.engines.sglang_cpu.shim import install

install()

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from benchmarks.harness.line_protocol import serve

Ids = list[int]


class Receiver:
    """Replaces SGLang's receiver of requests, and passes the requests of this process to the scheduler."""

    def __init__(self, inner: Any, receive: Any) -> None:
        self._inner, self.recv_requests = inner, receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Peer:
    """Handlers of the benchmark's requests, which return timings."""

    def __init__(self, model: str) -> None:
        self._submitted: queue.SimpleQueue[tuple[Any, Future[torch.Tensor]]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[torch.Tensor]] = {}
        self._numbers = count()
        ready: Future[None] = Future()
        threading.Thread(target=self._run, args=(model, ready), daemon=True).start()
        ready.result()

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to compute the rows of prompts all at once, and the first entries of the last row."""
        start = time.perf_counter()
        rows = [future.result() for future in [self._request(ids) for ids in prompts]]
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in rows[-1][:8]]}

    def _request(self, ids: Ids) -> Future[torch.Tensor]:
        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"{next(self._numbers):08x}", input_text="", input_ids=array("q", ids), input_embeds=None,
            mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False,
        )  # fmt: skip
        future: Future[torch.Tensor] = Future()
        self._submitted.put((request, future))
        return future

    def _run(self, model: str, ready: Future[None]) -> None:
        """Create the scheduler and run its loop, both in this thread."""
        try:
            args = ServerArgs(
                model_path=model, device="cpu", dtype="float32", attention_backend="torch_native",
                sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True,
                max_total_tokens=16384, max_running_requests=256, watchdog_timeout=1e9, log_level="error",
            )  # fmt: skip
            args.resolve_once()
            ports = PortArgs.init_new(args)
            ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
            runtime_context.publish(args, role="scheduler", ranks=ranks)
            known = {"gpu_id": 0, "tp_rank": 0, "moe_ep_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0,
                     "dp_rank": None}  # fmt: skip
            wanted = inspect.signature(Scheduler.__init__).parameters
            scheduler = Scheduler(args, ports, **{name: known[name] for name in known if name in wanted})
            scheduler.ipc_channels.send_to_detokenizer.socket = None
            scheduler.ipc_channels.send_to_tokenizer.socket = None
            self._scheduler, self._process = scheduler, scheduler.process_batch_result
            scheduler.request_receiver = Receiver(scheduler.request_receiver, self._receive)
            scheduler.process_batch_result = self._collect
        except BaseException as error:  # noqa: BLE001  raised in `__init__`
            ready.set_exception(error)
            return
        ready.set_result(None)
        scheduler.run_event_loop()

    def end(self) -> None:
        """Delete SGLang's snapshot from shared memory, and exit although SGLang's threads still run."""
        Path(self._scheduler.load_snapshot_writer.path).unlink(missing_ok=True)
        os._exit(0)

    def _receive(self, *_: Any, **__: Any) -> list[Any]:
        taken = []
        if not self._waiting and self._scheduler.last_batch is None:
            taken.append(self._submitted.get())
        taken += [self._submitted.get_nowait() for _ in range(self._submitted.qsize())]
        self._waiting.update((request.rid, future) for request, future in taken)
        return [request for request, _ in taken]

    def _collect(self, batch: Any, result: Any, *more: Any, **named: Any) -> None:
        self._process(batch, result, *more, **named)
        rows = [row for row, request in enumerate(batch.reqs) if request.finished()]
        logprobs = torch.log_softmax(result.logits_output.next_token_logits[rows].float(), -1)
        for index, row in enumerate(rows):
            self._waiting.pop(batch.reqs[row].rid).set_result(logprobs[index])


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    peer = Peer(sys.argv[1])
    try:
        await serve({"together": peer.together})
    finally:
        peer.end()


if __name__ == "__main__":
    asyncio.run(main())
