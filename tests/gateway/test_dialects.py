"""Each dialect of the gateway gives its own client the results of `Producer`."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from playwright._impl._driver import compute_driver_executable

from lmpool.producer import SyncProducer
from lmpool.synthetic import synthetic_row
from tests.gateway.service import GatewayService
from tests.support.pool import DEADLINE_S, Pool, V
from tests.web.service import TOKEN

# Import the clients where they are used: collecting the tests would take seconds more.
if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parents[2]
TEXT = "The capital of France is"
IDS = [504, 3575, 282, 4649, 314]
OTHER = [1, 2, 3]
# Forward passes of different lengths round differently.
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def served(server_url: str, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that serves SmolLM2, and a synthetic model with an adapter."""
    folder = tmp_path_factory.mktemp("http")
    weights = folder / "weights"
    weights.mkdir()
    (weights / "adapter_model.bin").write_bytes(b"poet")
    pool = Pool(server_url, "http", folder)
    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder), wait=False)
    pool.start("--adapters", f"poet={weights}")
    pool.workers[0].until_says("serving ")
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def gateway(served: Pool) -> GatewayService:
    """A gateway with a token."""
    return GatewayService(served, "--model", "smollm2", token=TOKEN)


@pytest.fixture(scope="module")
def open_gateway(served: Pool) -> GatewayService:
    """A gateway without a token."""
    return GatewayService(served, "--model", "smollm2")


@pytest.fixture(scope="module")
def producer(served: Pool) -> Iterator[SyncProducer]:
    """A producer of SmolLM2."""
    with SyncProducer("smollm2", redis=served.url, prefix=served.prefix) as producer:
        yield producer


@pytest.fixture(scope="module")
def client(gateway: GatewayService) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    import openai

    with openai.OpenAI(base_url=f"{gateway.base}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def followed(producer: SyncProducer, ids: list[int]) -> NDArray[np.float32]:
    """The log-probabilities of all tokens of a text but the first."""
    return producer.score(ids[:1], ids[1:])


def from_base64(data: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(data), dtype)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different."""
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_openai_client_gets_the_tokens_and_logprobs_of_a_producer(
    client: openai.OpenAI, producer: SyncProducer
) -> None:
    done = client.completions.create(model="smollm2", prompt=[TEXT, "Once"], n=2, seed=7, max_tokens=4, logprobs=2)
    made = [producer.generate(producer.encode(text), 4, seed=7 + ((2 * at + n) << 32))[0]
            for at, text in enumerate([TEXT, "Once"]) for n in range(2)]  # fmt: skip
    assert [choice.text for choice in done.choices] == [producer.decode(each.ids) for each in made]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice, each in zip(done.choices, made, strict=True):
        logprobs: Any = choice.logprobs
        assert np.allclose(logprobs.token_logprobs, each.logprobs, **CLOSE)
        assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16

    (echoed,) = client.completions.create(model="smollm2", prompt=IDS, echo=True, max_tokens=0, logprobs=1).choices
    logprobs = echoed.logprobs
    assert (echoed.text, logprobs.token_logprobs[0]) == (TEXT, None)
    assert logprobs.tokens == ["The", " capital", " of", " France", " is"]
    assert np.allclose(logprobs.token_logprobs[1:], followed(producer, IDS), **CLOSE)
    ids = producer.topk(IDS[:2], 1).ids
    assert max(logprobs.top_logprobs[2].items(), key=lambda item: item[1])[0] == producer.decode(ids)
    assert logprobs.text_offset == [0, 3, 11, 14, 21]

    # As lm-evaluation-harness requests it: one greedy token after the echoed text.
    options: Any = {"model": "smollm2", "prompt": [IDS], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    (both,) = client.completions.create(**options, extra_body={"prompt_logprobs": 3}).choices
    top = producer.topk(IDS, 2)
    assert both.text == TEXT + producer.decode(top.ids[:1])
    logprobs = both.logprobs
    assert len(logprobs.tokens) == len(IDS) + 1
    assert list(logprobs.top_logprobs[-1]) == [producer.decode([token]) for token in top.ids]
    assert np.allclose(list(logprobs.top_logprobs[-1].values()), top.values, **CLOSE)
    assert logprobs.token_logprobs[-1] == logprobs.top_logprobs[-1][logprobs.tokens[-1]]
    listed: Any = both.model_extra
    assert [len(entries) >= 3 for entries in listed["prompt_logprobs"][1:]] == [True] * 4


def test_openai_client_streams_the_same_text_and_stops_at_stop_texts(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "smollm2", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 3
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    word = whole.choices[0].text.split()[3]
    for stream in (False, True):
        found: Any = client.completions.create(**options, stop=[word], stream=stream)
        choices = [choice for chunk in (found if stream else [found]) for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == whole.choices[0].text.partition(word)[0]
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", word)
    # The end tokens of the model end a continuation, unless the request says otherwise.
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    ended = client.completions.create(model="smollm2", prompt=chat, max_tokens=24, temperature=0)
    assert (ended.choices[0].finish_reason, "<|im_end|>" in ended.choices[0].text) == ("stop", False)


def test_openai_client_lists_models_and_raises_its_own_errors(client: openai.OpenAI, gateway: GatewayService) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["smollm2", "syn", "syn:poet"]
    assert client.models.retrieve("syn:poet").id == "syn:poet"
    with pytest.raises(openai.NotFoundError, match="'absent' is not served; served are: smollm2, syn"):
        client.completions.create(model="absent", prompt=[1])
    with pytest.raises(openai.NotFoundError, match="rhyme"):
        client.completions.create(model="syn:rhyme", prompt=[1])
    with pytest.raises(openai.BadRequestError, match="from 0 to 511"):
        client.completions.create(model="syn", prompt=[512])
    with pytest.raises(openai.BadRequestError, match="top_k: 5 is not served"):
        client.completions.create(model="syn", prompt=[1], extra_body={"top_k": 5})
    with pytest.raises(openai.BadRequestError, match="unknown field `surprise`"):
        client.completions.create(model="syn", prompt=[1], extra_body={"surprise": 5})
    with pytest.raises(openai.AuthenticationError, match="the token is wrong"):
        client.with_options(api_key="wrong").models.list()
    # A model without a tokenizer serves token ids, and names tokens by their ids.
    found: Any = client.completions.create(model="syn:poet", prompt=OTHER, max_tokens=1, temperature=0, logprobs=0)
    assert found.choices[0].logprobs.tokens[0].startswith("token_id:")
    assert gateway.sent("/detokenize", model="smollm2", tokens=IDS) == {"prompt": TEXT}
    tokens = gateway.sent("/tokenize", prompt=TEXT, return_token_strs=True)
    assert (tokens["tokens"], tokens["count"], tokens["token_strs"][1]) == (IDS, 5, " capital")


def test_trl_client_scores_sequences(
    monkeypatch: pytest.MonkeyPatch, open_gateway: GatewayService, producer: SyncProducer
) -> None:
    from trl.generation import vllm_client

    # TRL's client checks that vLLM is installed, but needs vLLM only to send weights.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    client = vllm_client.VLLMClient(base_url=open_gateway.base)
    assert client.model == "smollm2"
    found = client.get_sequence_logprobs([IDS, [*IDS, 7042]], [2, 5], top_logprobs=4)
    top = producer.topk(IDS, 4)
    assert found["logprob_token_ids"][1] == [top.ids.tolist()]
    assert np.allclose(found["logprobs"][1], [top.values], **CLOSE)
    assert np.allclose(found["actual_logprobs"][0], followed(producer, IDS)[1:, None], **CLOSE)
    made = client.generate([IDS], n=2, max_tokens=3, logprobs=0, generation_kwargs={"seed": 3})
    expected = producer.generate(IDS, 3, n=2, seed=3)
    assert made["completion_ids"] == [each.ids.tolist() for each in expected]
    assert np.allclose(made["logprobs"], [each.logprobs[:, None] for each in expected], **CLOSE)


def test_the_route_of_older_trl_returns_arrays(gateway: GatewayService, producer: SyncProducer) -> None:
    # The request of TRL 1.8, whose client needs vLLM, and its way to decode the response.
    body = {"sequences": [IDS, IDS[:3]], "prompt_lengths": [3, 0], "top_logprobs": 5, "temperature": 1.0}
    found = gateway.sent("/get_sequence_logprobs/", **body, response_format="binary")
    assert (found["shape"], found["completion_lengths"]) == ([2, 3, 5], [2, 3])
    ids = from_base64(found["token_ids_b64"], "int32").reshape(found["shape"])
    values = from_base64(found["logprobs_b64"], "float32").reshape(found["shape"])
    actual = from_base64(found["actual_logprobs_b64"], "float32").reshape(2, 3)
    top = producer.topk(IDS[:4], 5)
    assert ids[0, 1].tolist() == top.ids.tolist()
    assert np.allclose(values[0, 1], top.values, **CLOSE)
    assert np.allclose(actual[0, :2], followed(producer, IDS)[2:], **CLOSE)
    # Padding, and the first token of a text, which no token precedes.
    assert np.isneginf(values[0, 2]).all()
    assert np.isneginf(actual[1, 0])
    listed = gateway.sent("/get_sequence_logprobs/", **body, response_format="json")
    assert listed["logprob_token_ids"][0][1] == top.ids.tolist()
    assert listed["logprobs"][1][0] == []
    wrong = gateway.post("/get_sequence_logprobs/", {**body, "prompt_lengths": [9, 0]})
    text = "prompt_lengths[0]: 9 must be from 0 to 5, the sequence's length"
    assert (wrong.status, wrong.json) == (400, {"detail": text})


def test_vllm_token_route_returns_tokens_and_named_logprobs(gateway: GatewayService, producer: SyncProducer) -> None:
    params = {"max_tokens": 3, "seed": 5, "logprobs": 1, "prompt_logprobs": 2, "n": 2,
              "prompt_logprob_token_ids": [[7042, 260], [11]], "prompt_logprob_start": 2}  # fmt: skip
    body = gateway.post(
        "/inference/v1/generate", {"token_ids": IDS, "model": "smollm2", "sampling_params": params}
    ).body
    found = json.loads(body, object_pairs_hook=unique)
    made = producer.generate(IDS, 3, n=2, seed=5)
    assert [choice["token_ids"] for choice in found["choices"]] == [each.ids.tolist() for each in made]
    content = found["choices"][1]["logprobs"]["content"]
    assert np.allclose([entry["logprob"] for entry in content], made[1].logprobs, **CLOSE)
    own = [entry[str(token)]["logprob"] for token, entry in zip(IDS[1:], found["prompt_logprobs"][1:], strict=True)]
    assert np.allclose(own, followed(producer, IDS), **CLOSE)
    assert found["prompt_logprobs"][0] is None
    # Each token is listed once: the one that follows, and the two most likely ones, of which it may be one.
    for entries, position in zip(found["prompt_logprobs"][1:], range(4), strict=True):
        top = producer.topk(IDS[: position + 1], 2).ids.tolist()
        follows = IDS[position + 1]
        places = {str(token): place for place, token in enumerate(top, 1)}
        assert {token: entry["rank"] for token, entry in entries.items()} == {str(follows): 3, **places}
    named = np.load(io.BytesIO(base64.b64decode(found["prompt_token_id_logprobs"])), allow_pickle=False)
    assert named.shape == (2, 2)
    assert np.allclose(named[0], producer.logprobs(IDS[:3])[[7042, 260]], **CLOSE)
    assert np.allclose(named[1], [producer.logprobs(IDS[:4])[11], -np.inf], **CLOSE)
    events = gateway.post(
        "/inference/v1/generate",
        {"token_ids": IDS, "model": "smollm2", "stream": True, "sampling_params": {"max_tokens": 5, "seed": 5}},
    ).body.decode().split("\n\n")  # fmt: skip
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == producer.generate(IDS, 5, seed=5)[0].ids.tolist()


def test_sglang_route_returns_logprobs_of_input_and_output(gateway: GatewayService, producer: SyncProducer) -> None:
    body = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [11, 12]}
    (first, second) = gateway.sent("/generate", input_ids=[IDS, IDS[:3]], sampling_params={"max_new_tokens": 0}, **body)
    info = first["meta_info"]
    assert (first["output_ids"], info["prompt_tokens"], len(second["meta_info"]["input_token_logprobs"])) == ([], 5, 2)
    assert info["input_token_logprobs"][0] == [None, IDS[1], None]
    values, ids, _ = zip(*info["input_token_logprobs"][1:], strict=True)
    assert list(ids) == IDS[2:]
    assert np.allclose(values, followed(producer, IDS)[1:], **CLOSE)
    top = producer.topk(IDS[:4], 2)
    assert [entry[1] for entry in info["input_top_logprobs"][-1]] == top.ids.tolist()
    named = [entry[0] for entry in info["input_token_ids_logprobs"][-1]]
    assert np.allclose(named, producer.logprobs(IDS[:4])[[11, 12]], **CLOSE)
    is_flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    flat = gateway.sent("/generate", input_ids=IDS, sampling_params={"max_new_tokens": 0}, **body, **is_flat)[
        "meta_info"
    ]
    assert flat["input_top_logprobs_shape"] == [3, 2]
    assert from_base64(flat["input_top_logprobs_idx_flat_b64"], "int32")[-2:].tolist() == top.ids.tolist()

    params = {"max_new_tokens": 3, "temperature": 0}
    done = gateway.sent("/generate", text=TEXT, sampling_params=params, return_logprob=True, top_logprobs_num=1)
    made = producer.generate(IDS, 3, temperature=0)[0]
    assert done["output_ids"] == made.ids.tolist()
    assert done["text"] == producer.decode(made.ids)
    assert [row[0][1] for row in done["meta_info"]["output_top_logprobs"]] == made.ids.tolist()
    assert done["meta_info"]["input_token_logprobs"] == []
    assert gateway.post("/generate", {"text": "a", "input_ids": [1]}).json == {
        "error": {"message": "give either text or input_ids"}
    }
    assert gateway.request("/get_model_info", token=TOKEN).json["served_model_name"] == "smollm2"


def test_own_routes_return_arrays_of_rows_and_positions(gateway: GatewayService, producer: SyncProducer) -> None:
    row = synthetic_row(OTHER, vocab_size=V)
    found = gateway.post("/v1/rows", {"model": "syn", "ids": OTHER})
    assert np.array_equal(np.load(io.BytesIO(found.body)), row)
    texts = io.BytesIO()
    np.save(texts, np.array([OTHER, [4, 5, -1]]))
    rows = gateway.post("/v1/rows?model=syn&format=safetensors", texts.getvalue())
    assert rows.headers["content-type"] == "application/vnd.safetensors"
    arrays = safetensors.numpy.load(rows.body)
    assert np.array_equal(arrays["rows"], [row, synthetic_row([4, 5], vocab_size=V)])
    entries = gateway.post("/v1/rows", {"model": "syn:poet", "ids": [OTHER], "targets": [3, 1], "keep_row": True})
    assert np.load(io.BytesIO(entries.body)).shape == (1, 2)
    assert not np.array_equal(np.load(io.BytesIO(entries.body))[0], row[[3, 1]]), "the adapter has other rows"

    named = gateway.post("/v1/positions", {"model": "syn", "ids": OTHER, "top": 2, "next_token": True, "targets": [7]})
    arrays = safetensors.numpy.load(named.body)
    assert {name: array.shape for name, array in arrays.items()} == {
        "top": (3, 2), "top_ids": (3, 2), "next_token": (3,), "targets": (3, 1)
    }  # fmt: skip
    assert np.array_equal(arrays["targets"][2], row[[7]])
    assert arrays["next_token"][1] == synthetic_row(OTHER[:2], vocab_size=V)[OTHER[2]]
    several = gateway.post("/v1/positions", {"model": "syn", "ids": [OTHER, [4]], "top": 1, "format": "arrow"})
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.ipc.open_stream(several.body).read_all()
    assert (table.num_rows, json.loads(table.schema.metadata[b"lengths"])) == (4, [3, 1])
    one = gateway.post("/v1/positions", {"model": "syn", "ids": OTHER, "full": True, "start": 2})
    assert np.array_equal(np.load(io.BytesIO(one.body)), [row])
    wrong = gateway.post("/v1/positions", {"model": "syn", "ids": OTHER})
    assert (wrong.status, wrong.json["error"]["type"]) == (400, "SettingsError")


def test_the_programs_on_the_pages_run(open_gateway: GatewayService, producer: SyncProducer, tmp_path: Path) -> None:
    def programs(page: str, language: str) -> str:
        text = (ROOT / "docs" / page).read_text("utf-8").replace("http://127.0.0.1:8000", open_gateway.base)
        return "".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))

    def run(*command: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run("bash", "-euc", programs("tutorials/curl.md", "bash")).splitlines()
    best = int(producer.topk(IDS, 1).ids[0])
    assert shown[0].startswith('{"id":"cmpl-')
    assert f"(49152,) {best}" in "\n".join(shown)
    assert "'tail': (5,)" in shown[-1]
    assert np.array_equal(np.load(tmp_path / "rows.npy").shape, (2, 49152))
    (tmp_path / "row.mjs").write_text(programs("http.md", "js"))
    node, _ = compute_driver_executable()
    assert run(str(node), "row.mjs").split() == ["49152", str(int(producer.topk(IDS[:2], 1).ids[0]))]
