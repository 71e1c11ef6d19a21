"""The two places at which SGLang's scheduler is touched: where it receives requests, and where it has results."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from torch import Tensor

from lmpool.errors import WorkerError


class Order(NamedTuple):
    """What is handed to the scheduler.

    Attributes:
        requests: prompts to compute; each is SGLang's request, its `rid` a name that was never used before.
        dropped: names of those that nobody waits for any more.
    """

    requests: list[Any]
    dropped: list[str]


class EngineBatch(NamedTuple):
    """What one forward of the engine brought.

    Attributes:
        names: of the prompts that it has completed, one a row of logits.
        logits: tensor (n, V) on the engine's device, ours alone; None if no prompt is complete.
        computed: what must have happened on the engine's device before the logits may be read; None on a CPU.
        tokens: tokens of the completed prompts.
        reused: tokens among them whose keys and values were there already.
        failures: name -> message of the prompts that the engine has refused.
    """

    names: list[str]
    logits: Tensor | None
    computed: Any
    tokens: int
    reused: int
    failures: dict[str, str]

    def wait(self) -> None:
        """Have what this thread does with the logits from now on wait for them."""
        if self.logits is not None and self.computed is not None:
            torch.cuda.current_stream(self.logits.device).wait_event(self.computed)


Orders = SimpleQueue[Order | None]
"""To the scheduler; None ends it."""
Results = SimpleQueue[EngineBatch | BaseException]
"""From the scheduler; an exception ended it."""


class Seams:
    """Feeds a scheduler from a queue and takes the logits of its prefills. All of it happens in the scheduler's thread.

    Args:
        scheduler: SGLang's.
        orders: what comes in.
        results: what goes out: one entry a forward.
    """

    def __init__(self, scheduler: Any, orders: Orders, results: Results) -> None:
        self._scheduler = scheduler
        self._orders = orders
        self._results = results
        self._vocab_size: int = scheduler.model_config.vocab_size
        self._owed: dict[str, int] = {}  # name -> tokens that were asked for
        self._process = scheduler.process_batch_result
        scheduler.process_batch_result = self._take
        # It has slots and is frozen, so it is replaced.
        scheduler.request_receiver = _Receiver(scheduler.request_receiver, self._receive)

    def _receive(self, local_reqs: list[Any] | None = None) -> list[Any]:
        """In place of reading a socket: requests and abortions; waits for some when there is nothing to do.

        Args:
            local_reqs: abortions that the scheduler has decided on itself.
        """
        found = list(local_reqs or ())
        gone = [request.rid for request in found if isinstance(request, AbortReq) and request.rid in self._owed]
        if gone:
            for name in gone:
                del self._owed[name]
            failures = dict.fromkeys(gone, "SGLang has taken the prompt back")
            self._results.put(EngineBatch([], None, None, 0, 0, failures))
        for order in self._waiting_orders():
            if order is None:
                self._scheduler.gracefully_exit = True
                break
            for request in order.requests:
                self._owed[request.rid] = len(request.input_ids)
            found += order.requests
            found += [AbortReq(rid=name) for name in order.dropped if self._owed.pop(name, None) is not None]
        return found

    def _waiting_orders(self) -> list[Order | None]:
        found = []
        if self._scheduler.is_fully_idle():
            self._give_up()
            found.append(self._orders.get())
        while True:
            try:
                found.append(self._orders.get_nowait())
            except Empty:
                return found

    def _give_up(self) -> None:
        """An idle scheduler owes nothing: what it has not answered it has dropped, and told a socket so."""
        if self._owed:
            failures = dict.fromkeys(self._owed, "SGLang has dropped the prompt without an answer")
            self._owed.clear()
            self._results.put(EngineBatch([], None, None, 0, 0, failures))

    def _take(self, batch: Any, result: Any, *more: Any, **named: Any) -> None:
        """Around what the scheduler does with a result: the rows of the prompts that it completes."""
        # The engine drops both when it is done with them.
        requests = list(batch.reqs)
        logits = result.logits_output.next_token_logits if result.logits_output is not None else None
        self._process(batch, result, *more, **named)
        rows, names, failures = [], [], {}
        tokens = reused = 0
        for row, request in enumerate(requests):
            # A prompt that is computed in parts has a row of logits for each.
            if not request.finished() or (length := self._owed.pop(request.rid, None)) is None:
                continue
            if isinstance(request.finished_reason, FINISH_ABORT):
                failures[request.rid] = f"SGLang refuses the prompt: {request.finished_reason.message}"
                continue
            if len(request.origin_input_ids) != length:
                raise WorkerError(f"SGLang has computed {len(request.origin_input_ids)} tokens of a prompt of {length}")
            rows.append(row)
            names.append(request.rid)
            tokens += length
            reused += request.cached_tokens
        taken = self._rows(batch, logits, rows, len(requests)) if rows else None
        computed = None
        if taken is not None and taken.is_cuda:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch is partly untyped
            computed.record()
        self._results.put(EngineBatch(names, taken, computed, tokens, reused, failures))

    def _rows(self, batch: Any, logits: Any, rows: list[int], count: int) -> Tensor:
        """A copy of some rows: the engine may write over its own with the next forward."""
        if not batch.forward_mode.is_extend():
            raise WorkerError(f"SGLang has completed prompts in a forward that is no prefill: {batch.forward_mode}")
        shape = None if logits is None else tuple(logits.shape)
        if logits is None or shape != (count, self._vocab_size):
            raise WorkerError(f"SGLang returned logits of shape {shape} for {count} prompts and V = {self._vocab_size}")
        taken: Tensor = logits.clone() if len(rows) == count else logits[rows]
        return taken


class _Receiver:
    """SGLang's receiver with another way to receive."""

    def __init__(self, inner: Any, receive: Any) -> None:
        self._inner = inner
        self.recv_requests = receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
