"""`PooledLM` and genlm-backend compute equal rows with the same LoRA adapters, on a real model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from lmpool.errors import UnknownAdapter
from lmpool.producer.genlm import PooledLM

NAME = "style"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters of SmolLM2 with random weights."""
    # Import peft here: at the head of the file, its import would delay each process that collects tests by seconds.
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    written = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folder = tmp_path_factory.mktemp("adapter")
        get_peft_model(AutoModelForCausalLM.from_pretrained(smollm2_folder), config).save_pretrained(str(folder))
        written.append(str(folder))
    return written


def test_an_adapter_is_loaded_replaced_and_removed(real: PooledLM, theirs: Any, folders: list[str]) -> None:
    prompt = real.tokenizer.encode("The capital of France is")

    async def rows_of(llm: Any) -> list[torch.Tensor]:
        """Compute rows with both adapters in one event loop; its session starts without adapters."""
        rows = [await llm.next_token_logprobs(prompt)]
        for folder in folders:
            llm.add_new_lora(folder, NAME)
            rows.append(await llm.next_token_logprobs(prompt, lora_name=NAME))
            rows.append(llm.next_token_logprobs_sync(prompt, lora_name=NAME))
            rows.append((await llm.batch_next_token_logprobs([prompt], lora_name=NAME))[0])
            rows.append(await llm.next_token_logprobs(prompt))
        llm.remove_lora(NAME)
        with pytest.raises(ValueError, match=NAME):
            await llm.next_token_logprobs(prompt, lora_name=NAME)
        return rows

    ours, wanted = asyncio.run(rows_of(real)), asyncio.run(rows_of(theirs))
    torch.testing.assert_close(torch.stack(ours), torch.stack(wanted), atol=TOLERANCE, rtol=0)
    base, first, second = ours[0], ours[1], ours[5]
    assert min((base - first).abs().max(), (first - second).abs().max()) > 100 * TOLERANCE


def test_an_unknown_adapter_cannot_be_removed(real: PooledLM) -> None:
    with pytest.raises(UnknownAdapter, match="gone") as caught:
        real.remove_lora("gone")
    assert isinstance(caught.value, ValueError)
