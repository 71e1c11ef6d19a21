"""The gateway as prime-rl's teacher, for the requests of prime-rl 0.8.0 and of the main branch of August 2026.

prime-rl is not on PyPI and trains only on GPUs. These tests send the requests of `check_health`,
`maybe_check_has_model` and `prefill_logprobs` in its file `utils/client.py`, the last with OpenAI's client as prime-rl
does, and read the responses in the same way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from lmpool.producer import SyncProducer
from tests.gateway.service import GatewayService
from tests.support.pool import Pool
from tests.web.service import TOKEN

CONFIG = Path(__file__).parents[2] / "examples/trainers/prime_rl.toml"
IDS = [5, 400, 17, 17, 3]


@pytest.fixture(scope="module")
def served(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with the model and the adapter that the configuration names."""
    folder = tmp_path_factory.mktemp("prime")
    (folder / "adapter_model.bin").write_bytes(b"poet")
    pool = Pool(server_url, "prime", folder)
    pool.start("--adapters", f"poet={folder}", model="smollm2")
    yield pool
    pool.end()


async def logprobs_of(client: openai.AsyncOpenAI, model: str, ids: list[int]) -> list[float]:
    """The log-probability of each token of a text; 0 for the first."""
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    url = f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/inference/v1/generate"
    body = {"model": model, "token_ids": ids, "sampling_params": params}
    response: Any = await client.post(url, cast_to=object, body=body)
    # prime-rl takes the first entry of each position.
    return [next(iter(entry.values()))["logprob"] if entry else 0.0 for entry in response["prompt_logprobs"]]


async def test_each_source_has_the_teacher_of_the_configuration(served: Pool) -> None:
    gateway = GatewayService(served, token=TOKEN)
    teachers: list[dict[str, Any]] = [
        source["algo"]["teacher"]
        for source in tomllib.loads(CONFIG.read_text("utf-8"))["orchestrator"]["train"]["source"]
    ]
    assert [teacher["api_key_var"] for teacher in teachers] == ["LMPOOL_HTTP_TOKEN"] * 2
    with SyncProducer("smollm2", redis=served.url, prefix=served.prefix) as producer:
        scored = []
        for teacher in teachers:
            assert teacher["base_url"] == "http://127.0.0.1:8000/v1"
            assert gateway.request("/health").status == 200
            listed = gateway.request("/v1/models", token=TOKEN).json["data"]
            assert teacher["name"] in [model["id"] for model in listed]
            async with openai.AsyncOpenAI(base_url=f"{gateway.base}/v1", api_key=TOKEN) as client:
                found = await logprobs_of(client, teacher["name"], IDS)
            expected = producer.score(IDS[:1], IDS[1:], adapter=teacher["name"].partition(":")[2])
            np.testing.assert_allclose(found, [0, *expected], rtol=0, atol=1e-5)
            scored.append(found)
    assert scored[0] != scored[1]
