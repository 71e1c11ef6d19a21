"""Prints how many ms of a step of the hf backend are not spent in the forward, one line per step.

In each step 64 prompts wait; each extends a prompt of 2,000 tokens, whose keys and values are cached, by one token. The
model is tiny, so that the backend's own code takes most of the time. `python -m benchmarks.clients.hf_steps N` prints
the processor times of N steps.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmpool.protocol.job import encode_prompt
from lmpool.workers.backends.hf.forward import Forward
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import BackendJob

_V, _PROMPTS, _TOKENS = 97, 64, 2000


def main(steps: int) -> None:
    """Print the ms of each of `steps` steps."""
    torch.set_num_threads(1)
    inside = [0.0]
    last_logits = Forward.last_logits

    def timed(*given: Any) -> torch.Tensor:
        began = time.thread_time()
        try:
            return last_logits(*given)
        finally:
            inside[0] += time.thread_time() - began

    Forward.last_logits = timed  # type: ignore[method-assign, assignment]
    config = LlamaConfig(vocab_size=_V, hidden_size=8, intermediate_size=8, num_attention_heads=1,
                         num_key_value_heads=1, num_hidden_layers=1, max_position_embeddings=4096)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model: Any = LlamaForCausalLM
        model(config).save_pretrained(folder)
        backend = HfSettings(folder, device="cpu", max_batch=_PROMPTS).open()
    prompts = [[random.randrange(_V) for _ in range(_TOKENS)] for _ in range(_PROMPTS)]
    for number in range(steps + 1):
        encoded = [encode_prompt(prompt, vocab_size=_V, max_tokens=4096) for prompt in prompts]
        waiting = {prompt.digest for prompt in encoded}
        backend.submit([BackendJob(prompt.digest, prompt.ids) for prompt in encoded])
        while waiting:
            inside[0], began = 0.0, time.thread_time()
            finished = backend.step()
            outside = time.thread_time() - began - inside[0]
            waiting.difference_update(finished.digests)
            if number:  # Print nothing for the first step, which fills the cache.
                print(1000 * outside)
        prompts = [[*prompt, random.randrange(_V)] for prompt in prompts]


if __name__ == "__main__":
    main(int(sys.argv[1]))
