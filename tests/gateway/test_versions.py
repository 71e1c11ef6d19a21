"""The gateway serves versions of a model's weights by name, and says which version computed a response."""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from lmpool.http.limits import TIMEOUT_HEADER, VERSION_HEADER, HttpCounters, Limits, Turn
from lmpool.http.models import GatewayModel, Target, Targets
from lmpool.producer import SyncProducer
from lmpool.synthetic import synthetic_row
from lmpool.web.models import Models
from tests.gateway.service import GatewayService
from tests.support.pool import DEADLINE_S, Pool, V, until


def rows_of(gateway: GatewayService, ids: list[list[int]], model: str = "syn") -> tuple[NDArray[np.float32], int]:
    """Rows from the gateway, and the version that it says."""
    answer = gateway.post("/v1/rows", {"ids": ids, "model": model})
    assert answer.status == 200, answer
    return np.load(io.BytesIO(answer.body)), int(answer.headers["x-lmpool-version"])


def expected(ids: list[list[int]], seed: int) -> NDArray[np.float32]:
    """The rows of the synthetic model with a seed."""
    return np.stack([synthetic_row(prompt, vocab_size=V, seed=seed) for prompt in ids])


def test_every_response_is_of_the_version_in_its_header(pool: Pool) -> None:
    for _ in range(2):  # A request takes several steps, so that versions change in the middle of requests.
        pool.start("--max-batch", 1, "--step-ms", 20)
    gateway = GatewayService(pool)
    last = 4

    def ask(client: int) -> int:
        count = seen = 0
        while seen < last:
            prompts = [[client, count, each] for each in range(8)]
            rows, version = rows_of(gateway, prompts)
            assert version >= seen
            assert np.array_equal(rows, expected(prompts, seed=version))
            count, seen = count + 1, version
        return count

    with ThreadPoolExecutor(2) as clients, SyncProducer(redis=pool.url, prefix=pool.prefix) as publisher:
        asking = [clients.submit(ask, client) for client in range(2)]
        for number in range(1, last + 1):
            publisher.publish_weights({"seed": np.array(number)})
        assert all(each.result() for each in asking)


class NamedTargets(Targets):
    """The models of requests that all name a model."""

    def __init__(self, models: Models[GatewayModel]) -> None:
        self._models, self._names = models, {}


async def test_a_response_is_made_again_until_the_deadline_of_the_request(pool: Pool) -> None:
    pool.start()
    models, attempts = Models(GatewayModel, pool.url, pool.prefix), itertools.count()
    targets = NamedTargets(models)
    scope: Any = {"headers": [(TIMEOUT_HEADER.encode(), b"50")], "query_string": b""}
    turn = Turn(scope, Limits(), HttpCounters())

    async def make(target: Target) -> Response:
        if not next(attempts):
            await target.producer.publish_weights({"seed": np.array(7)}, timeout=DEADLINE_S)
        return Response()

    try:
        async with targets.use("syn", turn) as target:
            # The request is allowed more time than the gateway's default, which ends during the first attempt.
            target.producer._timeout = 1e-9
        response = await targets.answer("syn", turn, make)
        assert (next(attempts), response.headers[VERSION_HEADER]) == (2, "1")
    finally:
        await models.close()


def test_a_version_is_a_model_that_requests_can_name(pool: Pool) -> None:
    pool.start()
    gateway = GatewayService(pool)
    body = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0}
    assert gateway.post("/v1/completions", body).headers["x-lmpool-version"] == "0"
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as publisher:
        publisher.publish_weights({"seed": np.array(7)})
    until(lambda: gateway.post("/v1/completions", body).headers["x-lmpool-version"] == "1", "the gateway follows")
    others: dict[str, dict[str, Any]] = {
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
        "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}},
        "/v1/positions": {"ids": [1, 2], "top": 1},
        "/get_sequence_logprobs/": {"sequences": [[1, 2]], "prompt_lengths": [1]},
    }
    for path, more in others.items():
        assert gateway.post(path, {**more, "model": "syn@1"}).headers["x-lmpool-version"] == "1"
    assert np.array_equal(rows_of(gateway, [[5]], "syn@1")[0], expected([[5]], seed=7))
    assert gateway.sent("/v1/completions", **body)["model"] == "syn"
    facts = gateway.request("/model_info").json
    assert facts["served_model_name"] == "syn"
    assert "@1." in facts["weight_version"]
    cards = gateway.request("/v1/models").json["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("syn", None), ("syn@1", "syn")]
    assert gateway.request("/v1/models/syn@1").json["id"] == "syn@1"
    assert gateway.post("/v1/rows", {"ids": [1], "model": "syn@9"}).status == 404
