"""The thread that SGLang's event loop runs in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

from lmpool.errors import WorkerError
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.sglang.scheduler import (
    SchedulerFacts,
    collect,
    end_scheduler,
    facts_of,
    make_request,
    make_scheduler,
)
from lmpool.workers.backends.sglang.seams import EngineBatch, Order, Orders, Results, Seams

_logger = logging.getLogger(__name__)

_CLOSE_S = 30.0


class Engine:
    """A scheduler of SGLang that runs in a thread of its own; `wait` for it before anything else.

    Args:
        options: SGLang's.

    Attributes:
        facts: what the scheduler has decided on.
        scheduler: SGLang's; None when it has ended.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.facts: SchedulerFacts
        self.scheduler: Any = None
        self._orders: Orders = SimpleQueue()
        self._results: Results = SimpleQueue()
        self._error: BaseException | None = None
        self._ready = threading.Event()
        # A daemon: a forward that never returns must not keep a process alive that was told to stop now.
        self._thread = threading.Thread(target=self._run, args=(options,), name="lmpool-sglang", daemon=True)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until the model is loaded; returns what SGLang has raised if it cannot be."""
        self._ready.wait()
        return self._error

    def request(self, name: str, ids: bytes, adapter: str) -> Any:
        """A request for the logits after a prompt; as `make_request`, but for the adapter's name, or "" for none."""
        return make_request(name, ids, self.facts.adapters[adapter] if adapter else None)

    def put(self, requests: list[Any], dropped: list[str]) -> None:
        """Hand requests over, and take some back by their names."""
        self._orders.put(Order(requests, dropped))

    def results(self) -> list[EngineBatch]:
        """What the engine's forwards have brought since the last call; waits for one.

        Raises:
            WorkerError: the engine has ended.
        """
        found: list[EngineBatch] = []
        while self._error is None:
            try:
                result = self._results.get(block=not found)
            except Empty:
                return found
            if isinstance(result, BaseException):
                self._error = result
            else:
                found.append(result)
        if isinstance(self._error, WorkerError):
            raise self._error
        raise WorkerError(f"SGLang's engine died: {first_line(self._error)}") from self._error

    def close(self) -> None:
        """End the event loop after its present forward and free what the engine holds."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _logger.warning("SGLang's engine has not ended within %g s: its memory is not freed", _CLOSE_S)
        collect()

    def _run(self, options: Mapping[str, Any]) -> None:
        # Whatever fails, somebody waits to hear of it.
        try:
            self.scheduler = make_scheduler(options)
            self.facts = facts_of(self.scheduler)
            Seams(self.scheduler, self._orders, self._results)
            self._ready.set()
            self.scheduler.run_event_loop()
            self._results.put(WorkerError("SGLang's event loop has ended"))
        except BaseException as error:  # noqa: BLE001  told to whoever waits, who raises it
            self._fail(error)
        finally:
            self._end()

    def _fail(self, error: BaseException) -> None:
        if self._ready.is_set():
            self._results.put(error)
        else:
            self._error = error
            self._ready.set()

    def _end(self) -> None:
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            end_scheduler(scheduler)
