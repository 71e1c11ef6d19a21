"""The HTTP routes of `lmpool web` for dead letters, texts, rows and tries, and their errors for bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lmpool.protocol.job import Failure, Job
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.picks import Sampling, sample
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.web.explorer import drawn_from
from tests.support.pool import Pool, V, until
from tests.web.service import WebService

IDS = [3, 1, 4, 1, 5]


@pytest.fixture
def service(pool: Pool) -> WebService:
    """A service with a synthetic model; requests to this service may change dead letters."""
    pool.start()
    return WebService(pool, "--allow-changes")


def bury(pool: Pool, prompt: list[int], reason: str = "given up after 3 deliveries", model: str = "syn") -> str:
    """Add a dead letter as a worker does; return its id."""
    info = ModelInfo.unpack(pool.redis.hget(pool.keys.models(), model))  # type: ignore[arg-type]
    job = Job(np.array(prompt, "<u4").tobytes(), "", info.fingerprint).pack()
    failure = Failure("WorkerError", reason).pack()
    added: Any = pool.redis.xadd(pool.keys.model(model).dead, {"e": failure, "m": job})
    return str(added, "ascii")


def test_a_text_has_scored_tokens_with_the_most_likely_alternatives(service: WebService) -> None:
    answer = service.request("/api/text", {"model": "syn", "ids": IDS, "top": 4}).json
    vocabulary = synthetic_vocabulary(V)
    assert answer["ids"] == IDS
    assert len(answer["tokens"]) == len(IDS)
    assert answer["tokens"][0]["logprob"] is None
    assert answer["tokens"][0]["top"] == []
    for at in range(1, len(IDS) + 1):
        row = synthetic_row(IDS[:at], vocab_size=V)
        most_likely = np.argsort(-row, kind="stable")[:4]
        listed = answer["tokens"][at]["top"] if at < len(IDS) else answer["next"]
        assert [token for token, _, _ in listed] == most_likely.tolist()
        assert [value for _, _, value in listed] == pytest.approx(row[most_likely].tolist(), abs=1e-4)
        assert listed[0][1] == vocabulary[int(most_likely[0])].decode("utf-8", "backslashreplace")
        if at < len(IDS):
            assert answer["tokens"][at]["logprob"] == pytest.approx(float(row[IDS[at]]), abs=1e-4)


def test_a_row_has_probabilities_before_and_after_temperature_and_top_p(service: WebService) -> None:
    body = {"model": "syn", "ids": IDS, "temperature": 0.5, "top_p": 0.8, "top": 50}
    answer = service.request("/api/row", body).json
    row = synthetic_row(IDS, vocab_size=V)
    after = drawn_from(row, 0.5, 0.8)
    for token, _, before, drawn in answer["tokens"]:
        assert before == pytest.approx(math.exp(row[token]))
        assert drawn == pytest.approx(float(after[token]))
    assert answer["kept"] == np.count_nonzero(after) < V
    assert (len(answer["tokens"]), answer["token"]) == (50, None)
    # The response lists the requested token, even if the token is unlikely.
    order = np.argsort(-row, kind="stable").tolist()
    for rank, length in ((1, 50), (V, 51)):
        response = service.request("/api/row", {**body, "token": order[rank - 1]}).json
        assert response["token"] == {"id": order[rank - 1], "rank": rank}
        assert (len(response["tokens"]), response["tokens"][0 if rank == 1 else -1][0]) == (length, order[rank - 1])
    assert answer["entropy"][1] < answer["entropy"][0]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (3.0, 0.5), (0.0, 1.0), (1e-6, 0.3)])
def test_the_shown_probabilities_are_those_that_producers_draw_with(temperature: float, top_p: float) -> None:
    row = synthetic_row([1, 2], vocab_size=64)
    shown = drawn_from(row, temperature, top_p)
    assert shown.sum() == pytest.approx(1)
    count = 4000
    drawn = [sample(row, Sampling(temperature, top_p, seed)) for seed in range(count)]
    shares = np.bincount(drawn, minlength=64) / count
    assert set(drawn) <= set(np.flatnonzero(shown).tolist())
    # Seeds are fixed, so each run draws equal shares.
    assert np.abs(shares - shown).max() < 0.03


@pytest.mark.parametrize(("parts", "top_p"), [((3, 1, 1, 1), 1 / 2), ((3, 4 / 3, 4 / 3, 4 / 3), 3 / 7)])
def test_at_the_limit_of_top_p_exactly_the_drawn_tokens_are_shown(parts: tuple[float, ...], top_p: float) -> None:
    row = np.log(np.array(parts, np.float32) / np.float32(sum(parts)))
    drawn = {sample(row, Sampling(1.0, top_p, seed)) for seed in range(200)}
    assert set(np.flatnonzero(drawn_from(row, 1.0, top_p)).tolist()) == drawn


def test_the_trie_sums_tokens_by_prefix_and_a_missing_trie_worker_is_a_note(pool: Pool, service: WebService) -> None:
    body: dict[str, Any] = {"model": "syn", "ids": IDS}
    without = service.request("/api/trie", body)
    assert without.status == 200, "a missing trie worker is no error"
    assert without.json["note"].startswith("no trie worker is running: start one with `lmpool trie-worker`")
    assert "local=" not in without.json["note"]
    pool.start_trie_worker()
    whole = service.request("/api/trie", body).json
    assert whole["mass"] == pytest.approx(1, abs=1e-4)
    weights, tokens = np.exp(synthetic_row(IDS, vocab_size=V)), synthetic_vocabulary(V).tokens
    for hex_prefix, _, mass in whole["children"][:5]:
        prefix = bytes.fromhex(hex_prefix)
        below = service.request("/api/trie", {**body, "under": hex_prefix}).json
        wanted = sum(float(weights[i]) for i, token in enumerate(tokens) if token.startswith(prefix))
        ends = sum(float(weights[i]) for i, token in enumerate(tokens) if token == prefix)
        assert mass == pytest.approx(wanted, rel=1e-4) == below["mass"]
        assert below["ends"] == pytest.approx(ends, rel=1e-3, abs=1e-6)
    unknown = service.request("/api/trie", {**body, "under": "ff" * 20})
    assert unknown.status == 404


def test_a_dead_letter_is_listed_opened_retried_and_dropped(pool: Pool, service: WebService) -> None:
    first, second = bury(pool, [7, 8]), bury(pool, [9], "red \x1b[31m <script>alert(1)</script>")
    listed = service.request("/api/dead?model=syn").json
    assert [letter["id"] for letter in listed["letters"]] == [second, first]
    assert "\x1b" not in listed["letters"][0]["reason"]
    assert service.request(f"/api/dead/show?model=syn&id={first}").json["ids"] == [7, 8]
    assert service.request("/api/dead/retry", {"model": "syn", "ids": [first]}).json == {"queued": 1, "refused": {}}
    until(lambda: not pool.jobs(), "the prompt is computed")
    assert service.request("/api/dead/drop", {"model": "syn", "ids": [second]}).json == {"dropped": 1}
    assert service.request("/api/dead?model=syn").json == {"count": 0, "letters": []}


def test_without_allow_changes_dead_letters_stay(pool: Pool) -> None:
    pool.start()
    letter, service = bury(pool, [7]), WebService(pool)
    for what in ("retry", "drop"):
        answer = service.request(f"/api/dead/{what}", {"model": "syn", "ids": [letter]})
        assert answer.status == 403
        assert "--allow-changes" in answer.json["error"]
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 1
    assert service.request("/api/settings").json == {"allow_changes": False}


def test_bad_input_is_refused_with_the_reason(pool: Pool, service: WebService) -> None:
    text: dict[str, Any] = {"model": "syn", "ids": [1]}
    letters = {"model": "syn", "ids": ["1-1"]}
    cases: list[tuple[str, Any, int, str]] = [
        ("/api/text", {**text, "model": "other"}, 404, "the model 'other' is not served"),
        ("/api/text", {**text, "model": "trie"}, 400, "the name of trie workers"),
        ("/api/text", {**text, "model": "{}\n" * 900}, 400, "model: "),
        ("/api/text", {**text, "adapter": "poet"}, 404, "no adapter 'poet'"),
        ("/api/text", {**text, "ids": []}, 400, "empty"),
        ("/api/text", {**text, "ids": [V]}, 400, f"token id {V} is out of range"),
        ("/api/text", {**text, "ids": [-1]}, 400, "out of range"),
        ("/api/text", {**text, "ids": [2**70]}, 400, "out of range"),
        ("/api/text", {**text, "ids": [1] * 5000}, 400, "the text has 5000 tokens; this page accepts at most 4096"),
        ("/api/text", {**text, "top": 0}, 400, "Expected `int` >= 1 - at `$.top`"),
        ("/api/text", {**text, "top": 10**9}, 400, "Expected `int` <= 50 - at `$.top`"),
        ("/api/text", {"model": "syn", "text": "hello"}, 400, "has no tokenizer; type token ids such as 1,2,3"),
        ("/api/text", {**text, "more": 1}, 400, "unknown field `more`"),
        ("/api/text", {"model": "syn", "text": "x" * 300_000}, 413, "the request has more than 262144 bytes"),
        ("/api/text", b"[" * 200_000, 400, "invalid request"),
        ("/api/text", b"\xff\xfe", 400, "invalid request"),
        ("/api/text", b"", 400, "invalid request"),
        ("/api/row", {**text, "temperature": -1}, 400, "temperature: -1"),
        ("/api/row", b'{"model":"syn","ids":[1],"temperature":NaN}', 400, "invalid request"),
        ("/api/row", {**text, "top_p": 0}, 400, "top_p: 0"),
        ("/api/row", {**text, "token": V}, 400, f"token: {V} must be from 0 to {V - 1}"),
        ("/api/row", {**text, "token": -1}, 400, "token: -1 must be from 0"),
        ("/api/row", {**text, "ids": [1] * 5000}, 400, "this page accepts at most 4096"),
        ("/api/trie", {**text, "under": "xy"}, 400, "invalid request: Expected `str` matching regex"),
        ("/api/trie", {**text, "under": "00" * 300}, 400, "Expected `str` of length <= 512"),
        ("/api/dead?model=syn%0a", None, 400, "model: "),
        ("/api/dead/show?model=syn&id=1-1", None, 400, "matches no dead letter"),
        ("/api/dead/show?model=syn&id=", None, 400, "matches no dead letter"),
        ("/api/dead/retry", letters, 400, "matches no dead letter"),
        ("/api/dead/retry", {**letters, "model": "other"}, 404, "the model 'other' is not served"),
        ("/api/dead/drop", {**letters, "ids": ["1-1"] * 501}, 400, "Expected `array` of length <= 500"),
        ("/api/dead/drop", {**letters, "ids": []}, 400, "Expected `array` of length >= 1"),
    ]
    for path, body, status, words in cases:
        answer = service.request(path, body)
        assert (answer.status, words in answer.json["error"]) == (status, True), (path, str(body)[:80], answer)
        assert answer.json["error"].isprintable()
    # The service scores a text as a prompt and a continuation; its error must not mention prompt or continuation.
    assert (
        service.request("/api/text", {**text, "ids": [1, V]}).json["error"].startswith(f"token id {V} is out of range")
    )
    assert service.request("/api/text").status == 405
    assert service.request("/api/stream", {}).status == 405
    # After all bad requests, the service still works.
    assert service.request("/api/text", text).status == 200
    assert "Traceback" not in service.process.text


def test_errors_name_an_unreachable_server(pool: Pool) -> None:
    pool.url = "redis://127.0.0.1:1"
    service = WebService(pool)
    until(lambda: service.request("/readyz").status == 503, "the service is not ready")
    for path, body in (("/api/models", None), ("/api/dead?model=syn", None), ("/api/text", {"model": "m", "ids": [1]})):
        answer = service.request(path, body)
        assert answer.status == 503
        assert "no Redis server answers" in answer.json["error"]
        assert answer.json["error"].startswith("`lmpool web` cannot reach its server (")
