"""The gateway refuses malformed requests in the format of each dialect, and serves requests at a model's limits."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import h11
import numpy as np
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from lmpool.http.dialects.openai import stream
from lmpool.http.limits import Gateway, HttpCounters, Limits, PiecewiseResponse, Turn
from lmpool.synthetic import synthetic_row
from lmpool.web.guard import Refused
from lmpool.web.server import HttpConnection
from tests.gateway.service import GatewayService
from tests.support.pool import DEADLINE_S, Pool, V, until

LONGEST = 16
HUGE = 2**70
GENERATE = "/inference/v1/generate"
SEQUENCES = "/get_sequence_logprobs/"


def npy(header: str) -> bytes:
    """A .npy file that has only a header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def sglang(**fields: Any) -> dict[str, Any]:
    """A request of SGLang for the log-probabilities of a prompt."""
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, **fields}


def tokens(**params: Any) -> dict[str, Any]:
    """A request of vLLM with token ids."""
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, **params}}


def trl(**fields: Any) -> dict[str, Any]:
    """A request of TRL."""
    return {"sequences": [[1, 2]], "prompt_lengths": [1], "top_logprobs": 3, **fields}


MALFORMED: dict[str, list[Any]] = {
    "/v1/rows": [
        b"", b"{", b"[1]", b"\xff", b'{"a":' * 5000, b"\x93NUMPY", npy("{'descr':"), npy("{[]:1}"),
        npy("(" * 1000), npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}\n"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}\n"),
        npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({10**12}, 0)}}\n"),
        {}, {"ids": 1}, {"ids": "text"}, {"ids": []}, {"ids": [[]]}, {"ids": [[1.5]]}, {"ids": [True]}, {"ids": [HUGE]},
        {"ids": [[1], 2]}, {"ids": [[1], None]}, {"ids": [[1], {"a": 1}]}, {"ids": [1], "targets": 5},
        {"ids": [1], "targets": "x"}, {"ids": [1], "targets": []}, {"ids": [[1], [2]], "targets": [[1], [2, 3]]},
        {"ids": [1], "targets": [V]}, {"ids": [1], "temperature": 2**80}, {"ids": [1], "surprise": 1},
    ],
    "/v1/rows?ids=1&temperature=" + "[" * 5000: [npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,)}\n")],
    f"/v1/rows?top={HUGE}": [npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,)}\n")],
    "/v1/positions": [
        {"ids": [1]}, {"ids": [[1], {"a": 1}], "top": 1}, {"ids": [[1], [2]], "targets": [[1], None], "top": 1},
        {"ids": [[1], [2]], "targets": [None, [1]], "top": 1}, {"ids": [1, 2], "targets": [[[1], [2, 3]], [1]]},
        {"ids": [[1], [2]], "targets": [[1], 2]}, {"ids": [[1], [2]], "targets": [[1], [2, 3]]},
        {"ids": [1, 2], "targets": [[1], 2]}, {"ids": [1], "start": HUGE, "top": 1}, {"ids": [1], "top": -1},
    ],
    "/generate": [
        {}, sglang(text="a"), sglang(top_logprobs_num=-1), sglang(top_logprobs_num=-1, stream=True),
        sglang(top_logprobs_num=[1]), sglang(logprob_start_len=[1]), sglang(sampling_params=[{}]), sglang(rid=["a"]),
        sglang(lora_path=["a"]), sglang(input_ids=[[1], 2]), sglang(input_ids=[[1], [2]], token_ids_logprob=[[1], 2]),
        sglang(token_ids_logprob=[[1, 2], [3]]), sglang(input_ids=[[1], [2]], top_logprobs_num=[1]),
        sglang(logprob_start_len=9), sglang(input_ids=[HUGE]), sglang(sampling_params={"stop": ["a"] * 17}),
        sglang(sampling_params={"stop": "a", "max_new_tokens": 1}),
    ],
    "/v1/completions": [
        {}, {"prompt": []}, {"prompt": [1, "a"]}, {"prompt": ["a", 1], "echo": True}, {"prompt": [1, [2]]},
        {"prompt": [HUGE], "echo": True}, {"prompt": [-1]}, {"prompt": [1], "stop_token_ids": [HUGE]},
        {"prompt": [1], "top_p": 5}, {"prompt": [1], "temperature": 2**80}, {"prompt": [1], "logprobs": HUGE},
        {"prompt": [1], "stop": "a" * 1025}, {"prompt": [1], "stop": ["a"] * 17}, {"prompt": [1], "max_tokens": HUGE},
        {"prompt": [1], "stop": ["a"]}, {"prompt": [1], "n": 4097}, {"prompt": [[1]] * 1000, "n": 5},
        {"prompt": [1] * (LONGEST + 1)},
    ],
    GENERATE: [
        {}, {"token_ids": [1]}, {"token_ids": [[1]], "sampling_params": {}}, tokens(n=0), tokens(logprobs=V + 1),
        tokens(prompt_logprob_token_ids=[[2**63], [1]]), tokens(prompt_logprob_token_ids=[[1.5]]),
        tokens(prompt_logprob_token_ids=[[]]), tokens(prompt_logprob_token_ids=[[1]], prompt_logprob_start=HUGE),
        tokens(stop="a"),
    ],
    SEQUENCES: [
        {}, trl(sequences=[]), trl(sequences=[[]], prompt_lengths=[0]), trl(sequences=[[1, HUGE]]),
        trl(sequences=[[999_999]], prompt_lengths=[0]), trl(prompt_lengths=[3]), trl(prompt_lengths=[-1]),
        trl(prompt_lengths=[1, 1]), trl(top_logprobs=V + 1), trl(top_logprobs=0),
    ],
    "/tokenize": [{}, {"prompt": [1]}, {"prompt": "a"}],
    "/detokenize": [{"tokens": "a"}, {"tokens": [HUGE]}],
}  # fmt: skip
"""Path -> malformed bodies, and bodies that ask the model for what it does not have."""


def error_of(path: str, found: Any) -> str:
    """The text of an error in the format of a path's dialect."""
    if path == SEQUENCES:
        (text,) = found.values()
        assert found == {"detail": text}
    elif path == "/generate":
        text = found["error"]["message"]
        assert found == {"error": {"message": text}}
    else:
        text = found["error"]["message"]
        is_own = path.startswith(("/v1/rows", "/v1/positions"))
        assert found["error"].keys() == ({"type", "message"} if is_own else {"message", "type", "param", "code"})
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def gateway(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayService]:
    """A gateway to a model that accepts short prompts, and a model whose name begins with the other's name."""
    pool = Pool(server_url, "requests", tmp_path_factory.mktemp("requests"))
    pool.start("--max-model-len", LONGEST)
    pool.start("--seed", 3, model="syn:b")
    yield GatewayService(pool, "--model", "syn")
    pool.end()


@pytest.mark.parametrize("path", MALFORMED)
def test_malformed_requests_get_status_400_in_the_format_of_the_dialect(gateway: GatewayService, path: str) -> None:
    for body in MALFORMED[path]:
        answer = gateway.post(path, body)
        assert answer.status == 400, (str(body)[:200], answer)
        assert error_of(path, answer.json)
    assert gateway.metric("lmpool_http_held_bytes") == 0
    assert "Traceback" not in gateway.process.text


def test_unknown_paths_and_wrong_methods_get_an_error_of_the_dialect(gateway: GatewayService) -> None:
    unknown = gateway.post("/v1/chat/completions", {})
    assert (unknown.status, unknown.json["error"]["type"]) == (404, "NotFoundError")
    for path in ("/v1/rows", "/generate", "/v1/completions"):
        wrong = gateway.request(path, token=None)
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        assert error_of(path, wrong.json) == f"GET {path}: Method Not Allowed"


def test_a_continuation_may_fill_the_length_of_the_model(gateway: GatewayService) -> None:
    prompt, room = [1, 2, 3], LONGEST - 3 + 1
    (choice,) = gateway.sent("/v1/completions", prompt=prompt, max_tokens=room, logprobs=2, temperature=0)["choices"]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    assert choice["logprobs"]["token_logprobs"] == best
    assert len(best) == room
    # vLLM's route continues a prompt to this length unless the request says otherwise.
    (choice,) = gateway.sent(GENERATE, token_ids=prompt, sampling_params={"logprobs": 2, "temperature": 0})["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == best
    fields = {"sampling_params": {"max_new_tokens": room, "temperature": 0}, "logprob_start_len": 1}
    body = sglang(input_ids=prompt, top_logprobs_num=2, token_ids_logprob=[11, 12], **fields)
    info = gateway.sent("/generate", **body)["meta_info"]
    assert [value for value, _, _ in info["output_token_logprobs"]] == best
    assert [len(entry) for entry in info["output_top_logprobs"]] == [2] * room
    # A chunk of a stream has all tokens so far, and the last chunk has what the response without a stream has.
    chunks = gateway.post("/generate", {**body, "stream": True}).body.decode().split("\n\n")
    last = json.loads(chunks[-3].removeprefix("data: "))["meta_info"]
    assert last == {**info, "id": last["id"]}
    assert [json.loads(chunk[6:])["meta_info"]["output_token_logprobs_length"] for chunk in chunks[:2]] == [1, 3]


def test_logprobs_of_no_token_are_empty(gateway: GatewayService) -> None:
    info = gateway.sent("/generate", **sglang(token_ids_logprob=[11, 12]))["meta_info"]
    assert (info["input_token_ids_logprobs"], info["output_token_ids_logprobs"]) == ([], [])
    none = gateway.sent(SEQUENCES, **trl(prompt_lengths=[2], response_format="binary"))
    assert (none["shape"], none["completion_lengths"], none["logprobs_b64"]) == ([1, 0, 3], [0], "")
    (choice,) = gateway.sent("/v1/completions", prompt=[1, 2], max_tokens=1, prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"][1]["2"]["rank"] is None


def test_a_model_may_have_a_name_with_a_colon(gateway: GatewayService) -> None:
    answer = gateway.post("/v1/rows", {"model": "syn:b", "ids": [1]})
    assert np.array_equal(np.load(io.BytesIO(answer.body)), synthetic_row([1], vocab_size=V, seed=3))
    absent = gateway.post("/v1/rows", {"model": "syn:c", "ids": [1]})
    assert (absent.status, absent.json["error"]["type"]) == (404, "UnknownAdapter")


def test_a_request_that_cannot_fit_gets_status_413(gateway: GatewayService) -> None:
    targets = [[1] * 1_000_000] + [[1]] * 255
    ids = [[1] * 256]
    assert gateway.post("/v1/positions", {"model": "syn:b", "ids": ids, "targets": [targets]}).status == 413
    assert gateway.metric("lmpool_http_held_bytes") == 0


async def test_a_request_that_needs_more_than_the_limit_in_parts_is_not_told_to_retry() -> None:
    counters = HttpCounters()
    scope = {"type": "http", "headers": [], "query_string": b""}
    first, second = (Turn(scope, Limits(max_held_bytes=100), counters) for _ in range(2))
    first.hold(60)
    for turn, status in ((first, 413), (second, 429)):
        with pytest.raises(Refused) as caught:
            turn.hold(60)
        assert caught.value.status == status
    first.release()
    assert counters.held_bytes == 0


async def test_a_stream_ends_with_an_error_if_the_gateway_has_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    async def chunks() -> Any:
        yield b"data: 1\n\n"
        raise KeyError("secret")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()  # The client stays connected.

    await stream("/generate", chunks())({"type": "http"}, receive, send)
    text = b"".join(sent).decode()
    assert text.endswith('its log has the details"}}\n\ndata: [DONE]\n\n')
    assert "secret" not in text
    assert "KeyError: 'secret'" in caplog.text


async def test_the_data_of_a_response_are_sent_without_a_copy() -> None:
    view: Any = memoryview(bytes(1 << 20))
    config = uvicorn.Config(Gateway, lifespan="off")
    http = HttpConnection(lambda _: True, config=config, server_state=ServerState(), app_state={}).conn
    http.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(http.next_event(), h11.Request)
    head = http.send(h11.Response(status_code=200, headers=[("Content-Length", str(len(view)))]))
    assert head == b"HTTP/1.1 200 \r\nContent-Length: 1048576\r\n\r\n"
    assert http.send(h11.Data(data=view)) is view
    assert http.send(h11.EndOfMessage()) == b""


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await PiecewiseResponse([bytes(64 << 20)], "application/octet-stream")(scope, receive, send)

    app = Gateway(large, None, (), Limits(send_s=0.2), ["/large"])
    protocol: Any = partial(HttpConnection, app.is_allowed)
    serving = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, serving, "should_exit", True)
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(DEADLINE_S)
        client.connect(listening.getsockname())
        client.sendall(b"POST /large HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
        assert client.recv(1) == b"H"
        until(lambda: app.counters.requests["/large", 499], "the gateway gives the response up")
        until(lambda: not serving.server_state.connections, "the connection is closed, and the client stays open")
