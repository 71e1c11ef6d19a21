"""A process that calls a transformers model directly: `python -m benchmarks.peers.hf_peer MODEL DEVICE DTYPE`."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.line_protocol import serve
from benchmarks.teacher.targets import tokens_at

Ids = list[int]

_BATCH = 64  # Prompts per forward.
_TEXTS = 16  # Texts per forward: the logits of 16 texts of 128 tokens take 400 MB.


class Peer:
    """Handlers of the benchmark's requests, which return timings."""

    def __init__(self, model: str, device: str, dtype: str) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to(device).eval()
        self._device = device

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to compute the rows of prompts of equal length, and the first entries of the last row."""
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(prompts), _BATCH):
                ids = torch.tensor(prompts[at : at + _BATCH], device=self._device)
                logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
                rows = torch.log_softmax(logits.float(), -1).cpu()
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in rows[-1][:8]]}

    async def top_tokens(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """Seconds for the top-k tokens of each position of equally long texts, and values at the last position."""
        found: list[tuple[Any, Any]] = []
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(texts), _TEXTS):
                ids = torch.tensor(texts[at : at + _TEXTS], device=self._device)
                logits = self._model(input_ids=ids, use_cache=False).logits
                values, tokens = torch.log_softmax(logits.float(), -1).topk(top)
                found += zip(values.cpu().numpy(), tokens.cpu().numpy(), strict=True)
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in found[-1][0][-1][:8]]}

    async def given_tokens(self, texts: list[Ids], count: int) -> dict[str, Any]:
        """Seconds for `count` other tokens at each position of texts, the next token, logZ and the tail."""
        targets = torch.tensor([tokens_at(ids, count, self._model.config.vocab_size).tolist() for ids in texts])
        start, last = time.perf_counter(), torch.empty(0)
        with torch.inference_mode():
            for at in range(0, len(texts), _TEXTS):
                ids = torch.tensor(texts[at : at + _TEXTS], device=self._device)
                given = targets[at : at + _TEXTS].to(self._device)
                logits = self._model(input_ids=ids, use_cache=False).logits.float()
                rows = torch.log_softmax(logits, -1)
                found = rows.gather(-1, given).cpu()
                rows[:, :-1].gather(-1, ids[:, 1:, None]).cpu()
                (logits.amax(-1) - rows.amax(-1)).cpu()
                rows.scatter_(-1, given, -torch.inf).logsumexp(-1).cpu()
                last = found[-1, -1]
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in last[:8]]}

    async def hidden_states(self, texts: list[Ids]) -> dict[str, Any]:
        """Seconds for the last hidden state of each position of equally long texts, on the host."""
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(texts), _TEXTS):
                ids = torch.tensor(texts[at : at + _TEXTS], device=self._device)
                self._model.model(input_ids=ids, use_cache=False).last_hidden_state.cpu()
        return {"seconds": time.perf_counter() - start}

    async def copied(self, mib: int) -> float:
        """GB/s of one copy of `mib` MiB from the device to pinned memory of the host."""
        source = torch.ones(mib << 20, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source, device="cpu", pin_memory=self._device != "cpu")
        target.copy_(source)
        start = time.perf_counter()
        target.copy_(source)
        return (mib << 20) / 1e9 / (time.perf_counter() - start)


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    peer = Peer(*sys.argv[1:])
    await serve(
        {
            "together": peer.together,
            "top_tokens": peer.top_tokens,
            "hidden_states": peer.hidden_states,
            "given_tokens": peer.given_tokens,
            "copied": peer.copied,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
