"""Measures the hf backend on a CUDA device, with large models whose weights are random."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.comparison import PROMPT_TOKENS, PromptSource, alternated, compare
from benchmarks.harness.pairs import Result, Side
from benchmarks.harness.processes import Child, Skipped
from benchmarks.harness.testbed import Testbed
from lmpool.protocol.row import Encoding, encoded_size

_V = 128_256  # Vocabulary size of Llama 3.
# The sizes of Llama 3.2 1B and Llama 3.1 8B, and a small model that shows on a CPU that the measure runs.
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": False},
}  # fmt: skip
_PROMPTS, _TEXTS, _TEXT_TOKENS, _TOP = 1024, 128, 128, 32  # Prompts per sample; texts and their tokens; top-k tokens.
_COPY_MIB = 1024  # MiB per copy from the device to the host.


def measured(size: str) -> Callable[[Testbed], list[Result]]:
    """The measure of a size: it compares the pool with transformers called directly in one process."""
    return partial(_measure, size)


def _measure(size: str, testbed: Testbed) -> list[Result]:
    import torch  # Import here: other measures need no torch in this process.

    device = os.environ.get("LMPOOL_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise Skipped("torch finds no CUDA device")
    with ExitStack() as stack:
        model = str(_write_model(testbed.folder / size, size, device))
        options = ("--backend", "hf", "--device", device, "--dtype", "bfloat16")
        stack.enter_context(testbed.workers(size, model, *options))
        ours = stack.enter_context(testbed.producer(size))
        peer = stack.enter_context(testbed.child("peers.hf_peer", model, device, "bfloat16"))
        testbed.wait_for_shared_memory(size)
        return _Measures(size, testbed, ours, peer).results()


class _Measures:
    """The measures of one size. Both sides of a pair receive the same prompts."""

    def __init__(self, size: str, testbed: Testbed, ours: Child, peer: Child) -> None:
        self._name = f"hf-{size}"
        self._what = f"model of the size of Llama {size.upper()} with random weights, bf16, V = {_V:,}"
        self._testbed, self._ours, self._peer = testbed, ours, peer
        self._prompts, self._texts = testbed.scaled(_PROMPTS, 64), testbed.scaled(_TEXTS, 8)
        self._source = PromptSource()

    def results(self) -> list[Result]:
        """All results, from the cheapest to the dearest values."""
        return [*self._rows(), self._values("top", top=_TOP), self._values("hidden", top=0)]

    def _rows(self) -> list[Result]:
        samples = compare(self._testbed, self._ours, self._peer, self._prompts, narrow=True)
        size = encoded_size(_V, Encoding.BF16) / 1e9
        copies = [float(self._peer.request("copied", mib=_COPY_MIB)) for _ in samples["pool"]]
        rows = f"rows of {self._prompts:,} prompts of {PROMPT_TOKENS} tokens, {self._what}"
        return [
            Result(f"{self._name}-rows", f"rows/s: {rows}, through the pool ÷ transformers called directly, batches of "
                   "64, float32 rows on the host", None, *[Side(*side, taken) for side, taken in
                   zip((("pool", "rows/s"), ("transformers", "rows/s")), samples.values(), strict=True)]),
            Result(f"{self._name}-bytes", f"GB/s: encoded {rows}, that a client received ÷ one copy of {_COPY_MIB} MiB "
                   "from the device to pinned memory", None,
                   Side("pool", "GB/s", [taken * size for taken in samples["pool"]]), Side("copy", "GB/s", copies)),
        ]  # fmt: skip

    def _values(self, name: str, top: int) -> Result:
        def take(side: Child, draw: bool) -> float:
            texts = self._source.draw(self._texts, _TEXT_TOKENS) if draw else self._source.last
            answer = (
                side.request("top_tokens", within=900, texts=texts, top=top)
                if top
                else side.request("hidden_states", within=900, texts=texts)
            )
            return len(texts) * _TEXT_TOKENS / float(answer["seconds"])

        samples = alternated(
            {"pool": lambda: take(self._ours, True), "transformers": lambda: take(self._peer, False)},
            self._testbed.repeats,
        )
        what = f"with top-{top} log-probabilities" if top else "with the last hidden state"
        return Result(
            f"{self._name}-{name}",
            f"positions/s {what} of {self._texts} texts of {_TEXT_TOKENS} tokens, {self._what}, through the pool ÷ "
            "transformers called directly, batches of 16 texts",
            None,
            *[Side(side, "positions/s", taken) for side, taken in samples.items()],
        )


def _write_model(folder: Path, size: str, device: str) -> Path:
    """Write a model with random weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=_V, max_position_embeddings=4096, dtype="bfloat16", **_SIZES[size])
    maker: Any = AutoModelForCausalLM  # Its methods have no types.
    with torch.device(device):
        model = maker.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
