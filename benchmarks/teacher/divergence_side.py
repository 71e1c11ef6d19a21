"""A process with one side of a measure of divergences: `python -m benchmarks.teacher.divergence_side SIDE POSITIONS`.

SIDE is "states" for `lmpool.distill`, or "rows" for whole arrays of logits in torch, as TRL computes them.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.harness.line_protocol import serve
from lmpool.distill import States, divergence
from lmpool.protocol.row import Head

VOCAB_SIZE, WIDTH = 49_152, 576  # The head of SmolLM2-135M.
_CPUS = 2  # Threads of torch, on machines with more cores too.
_SPREAD = 0.05  # Standard deviation of the weights: logits get a standard deviation of 1.2.


class Step:
    """One step of distillation: the mean forward KL of a bfloat16 teacher and a float32 student, and its gradients."""

    def __init__(self, side: str, positions: int) -> None:
        """Draw the same states and heads on both sides."""
        torch.set_num_threads(_CPUS)
        torch.manual_seed(0)
        self._side = side
        self._taught = torch.randn(positions, WIDTH).bfloat16()
        self._head = (_SPREAD * torch.randn(VOCAB_SIZE, WIDTH)).bfloat16()
        self._hidden = torch.randn(positions, WIDTH, requires_grad=True)
        self._weights = (_SPREAD * torch.randn(VOCAB_SIZE, WIDTH)).requires_grad_()
        # A producer returns states and the head of a bfloat16 model as float32, because numpy lacks bfloat16.
        head = Head(self._head.float().numpy(), None, 1.0, None, "bfloat16")
        self._teacher = States.of(self._taught.float().numpy(), head)

    async def run(self) -> dict[str, Any]:
        """Seconds of a step, MB that its peak of memory adds, the divergence, and the norms of the gradients."""
        self._hidden.grad = self._weights.grad = None
        before = _reset_peak()
        start = time.perf_counter()
        loss = self._from_states() if self._side == "states" else self._from_rows()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - start
        norms = [float(array.grad.norm()) for array in (self._hidden, self._weights) if array.grad is not None]
        return {"seconds": seconds, "megabytes": _memory("VmHWM") - before, "values": [loss.item(), *norms]}

    def _from_states(self) -> Tensor:
        loss: Tensor = divergence(self._teacher, States(self._hidden, self._weights))
        return loss

    def _from_rows(self) -> Tensor:
        taught = (self._taught @ self._head.T).float().log_softmax(-1)
        student = (self._hidden @ self._weights.T).log_softmax(-1)
        return kl_div(student, taught, reduction="batchmean", log_target=True)


def _reset_peak() -> float:
    """Set the kernel's peak of this process to its memory now; returns this memory in MB."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    """A field of this process's status, in MB."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no field {name}"
    return int(found[1]) * 1024 / 1e6


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    step = Step(sys.argv[1], int(sys.argv[2]))
    await serve({"run": step.run})


if __name__ == "__main__":
    asyncio.run(main())
