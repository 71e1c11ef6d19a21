"""The pool page's data: all pages share one survey of the pool, slow pages skip frames, and the last hour is kept."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lmpool.aio import end_tasks
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.web.app import WebSettings, web_service
from lmpool.web.feed import HOUR, MAX_STREAMS, SERIES, Events, Feed, Sample
from tests.support.pool import DEADLINE_S, Pool, deadline_ms, until, until_async
from tests.web.service import TOKEN, Stream, WebService


def test_all_pages_share_surveys_and_their_number_is_limited(pool: Pool) -> None:
    pool.start()
    service = WebService(pool)
    streams = [Stream(service) for _ in range(100)]
    frames = [[stream.frame() for _ in range(2)] for stream in streams]
    numbers = [frame["number"] for pair in frames for frame in pair]
    # Frames with equal numbers must be equal on all pages.
    by_number = {frame["number"]: json.dumps(frame, sort_keys=True) for pair in frames for frame in pair}
    assert all(by_number[frame["number"]] == json.dumps(frame, sort_keys=True) for pair in frames for frame in pair)
    assert len(set(numbers)) < len(streams)
    assert {frame["models"][0]["name"] for pair in frames for frame in pair} == {"syn"}
    streams += [Stream(service) for _ in range(MAX_STREAMS - len(streams))]
    assert {stream.status for stream in streams} == {200}
    extra = Stream(service)
    assert extra.status == 503
    for stream in [*streams, extra]:
        stream.close()
    # After streams have closed, the service accepts another stream.
    until(lambda: _is_accepted(service), "another page may watch")


def test_pages_show_only_the_folder_and_name_of_a_socket(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "web", tmp_path)
    try:
        frame = Stream(WebService(pool)).frame()
    finally:
        pool.end()
    path = Path(urlsplit(own_server.url).path)
    assert frame["server"] == f"unix://…/{path.parent.name}/{path.name}"
    assert str(path.parents[1]) not in json.dumps(frame)


def _is_accepted(service: WebService) -> bool:
    stream = Stream(service)
    stream.close()
    return stream.status == 200


async def test_a_slow_page_gets_the_newest_frame_next(pool: Pool) -> None:
    await asyncio.to_thread(pool.start)
    app, _, feed = web_service(WebSettings(pool.url, pool.prefix, token=TOKEN, interval_s=0.001))
    reads, received = asyncio.Event(), []

    async def send(message: MutableMapping[str, Any]) -> None:
        if body := message.get("body"):
            received.append(json.loads(body.removeprefix(b"data: "))["number"])
            await reads.wait()

    surveying = asyncio.create_task(feed.run())
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope: Any = {"type": "http", "method": "GET", "path": "/api/stream", "query_string": b"", "headers": headers}
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1"}
    page = asyncio.ensure_future(app(scope, _nothing_more, send))
    try:
        await until_async(lambda: _is(len(received) == 1), "the page has a frame that it does not read")
        first = received[0]
        await until_async(lambda: _is(feed.surveys > first + 30), "the service surveys the pool again")
        newest = feed.surveys
        reads.set()
        await until_async(lambda: _is(len(received) > 1), "the page gets another frame")
        assert received[1] >= newest, "the frames between are skipped"
    finally:
        await feed.end()
        await end_tasks([surveying])
        await asyncio.wait([page], timeout=DEADLINE_S)


async def _nothing_more() -> MutableMapping[str, Any]:
    """Wait for ever, as ASGI's `receive` does while the client's connection stays open."""
    await asyncio.Event().wait()
    raise AssertionError


async def _is(condition: bool) -> bool:
    return condition


async def test_the_number_of_samples_is_limited_and_an_outage_leaves_empty_ones(
    own_server: EmbeddedServer,
) -> None:
    feed = Feed(Server(own_server.url), Keys("feed"), 0.0, samples=8)
    surveying = asyncio.create_task(feed.run())
    try:
        await until_async(lambda: _is(feed.surveys > 2), "the feed surveys the pool")
        own_server.stop()
        await until_async(lambda: _is(bool(feed.trouble)), "the feed reports the outage")
        own_server.start()
        await until_async(lambda: _is(not feed.trouble), "the feed recovers")
        assert None in json.loads(gzip.decompress(await feed.history()))["memory"]
        await until_async(lambda: _is(feed.surveys > 12), "more surveys than samples have run")
    finally:
        await end_tasks([surveying])
    history = json.loads(gzip.decompress(await feed.history()))
    assert len(history["at"]) == len(history["memory"]) == 8
    assert history["at"] == sorted(history["at"])


async def test_the_hour_is_encoded_once_per_survey(own_server: EmbeddedServer) -> None:
    feed = Feed(Server(own_server.url), Keys("feed"), interval_s=3600.0)
    surveying = asyncio.create_task(feed.run())
    try:
        await until_async(lambda: _is(feed.surveys == 1), "the first survey has run")
        first, *others = await asyncio.gather(*[feed.history() for _ in range(5)])
        assert {id(history) for history in [*others, await feed.history()]} == {id(first)}
        # A new page triggers a survey at once.
        await anext(feed.frames())
        assert feed.surveys == 2
        assert [
            len(json.loads(gzip.decompress(await feed.history()))["at"]),
            len(json.loads(gzip.decompress(first))["at"]),
        ] == [2, 1]
    finally:
        await end_tasks([surveying])


async def test_encoding_a_full_hour_does_not_block_the_event_loop() -> None:
    feed, nothing = Feed(Server("redis://127.0.0.1:1"), Keys("feed")), (None,) * len(SERIES)
    names = [f"model-{number}" for number in range(64)]
    values = {name: tuple(random.random() for _ in SERIES) for name in names}
    feed._samples.extend(Sample(at, 10**9, values if at % 7 else dict.fromkeys(names, nothing)) for at in range(HOUR))
    turns, encoding = 0, asyncio.ensure_future(feed.history())
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    history = json.loads(gzip.decompress(encoding.result()))
    assert [len(history["models"]), len(history["at"]), len(history["memory"])] == [64, HOUR, HOUR]
    assert history["models"]["model-3"][1][:8] == [None, *[values["model-3"][1]] * 6, None]


def test_history_is_gzipped_if_the_client_accepts_it(pool: Pool) -> None:
    pool.start()
    service = WebService(pool)
    Stream(service).frame()
    for accepted, is_gzipped in {
        "gzip, deflate, br": True,
        "br;q=1.0, GZIP; q=0.5": True,
        "": False,
        "identity": False,
    }.items():
        answer = service.request("/api/history", Accept_Encoding=accepted)
        assert answer.headers["vary"] == "Accept-Encoding"
        assert answer.headers.get("content-encoding") == ("gzip" if is_gzipped else None), accepted
        assert int(answer.headers["content-length"]) == len(answer.body)
        history = json.loads(gzip.decompress(answer.body) if is_gzipped else answer.body)
        assert history["models"]["syn"]
        assert len(history["at"]) == len(history["memory"])


def survey(at: float, **workers: dict[str, Any]) -> tuple[float, Any]:
    """The time and the data of a survey of one model with the given workers."""
    common = {"state": "ready", "silent_s": 1.0, "lease_s": 10.0, "claimed": 0}
    return at, [{"name": "m", "workers": [{"id": name, **common, **fields} for name, fields in workers.items()]}]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (survey(0), survey(1), []),
        (survey(0, a={}), survey(1, a={}), []),
        (survey(0), survey(1, a={}), ["a joined"]),
        (survey(0), survey(1, a={"state": "loading"}), []),
        (survey(0, a={"state": "loading"}), survey(1, a={}), ["a joined"]),
        (survey(0, a={}), survey(1), ["a left"]),
        (survey(0, a={"state": "draining"}), survey(60), ["a left"]),
        (survey(0, a={"state": "silent", "silent_s": 9.5}), survey(1), ["a died"]),
        (survey(0, a={"state": "silent", "silent_s": 5.0}), survey(1), ["a left"]),
        (survey(0, a={}), survey(60), ["a is gone"]),
        (survey(0, a={}, b={"claimed": 2}), survey(1, a={"claimed": 1}, b={"claimed": 5}),
         ["a took over 1 prompt", "b took over 3 prompts"]),
        (survey(0, a={"claimed": "junk"}), survey(1, a={"claimed": None}), []),
        (survey(0, a={"claimed": 1}, b={}), survey(1, a={"claimed": "nan"}, b={"claimed": "inf"}), []),
    ],
)  # fmt: skip
def test_events_describe_changes_of_workers(
    before: tuple[float, Any], after: tuple[float, Any], expected: list[str]
) -> None:
    events = Events()
    events.add_survey(*before)
    assert list(events.newest) == [], "the first survey produces no events"
    events.add_survey(*after)
    assert [f"{event['worker']} {event['what']}" for event in events.newest] == expected


def test_a_worker_that_changes_its_weights_is_no_new_worker() -> None:
    events, (at, (syn,)) = Events(), survey(0, a={}, b={})
    name, (first, second) = syn["name"], syn["workers"]
    events.add_survey(at, [syn])
    events.add_survey(1, [{"name": f"{name}@0", "workers": [first]}, {"name": f"{name}@1", "workers": [second]}])
    assert list(events.newest) == []


async def test_trie_workers_are_shown_without_a_vocabulary(pool: Pool) -> None:
    for name, key in (("syn", pool.keys.models()), ("trie", pool.keys.trie_models())):
        info = ModelInfo(name, backend="x", vocab_size=1, max_prompt_tokens=8, revision="r", dtype="float32")
        pool.redis.hset(key, name, info.pack())
    async with web_app(pool) as (feed, _):
        frame = json.loads((await anext(feed.frames())).removeprefix(b"data: "))
    assert {model["name"]: model["vocab_size"] for model in frame["models"]} == {"syn": 1, "trie": None}


def add_junk(pool: Pool, name: bytes) -> None:
    """Add a malformed entry to the adapters of the model "junk" in Redis."""
    pool.redis.hset(pool.keys.model("junk").adapters, mapping={"": info_of("junk").fingerprint, name: b"junk"})


def info_of(name: str) -> ModelInfo:
    return ModelInfo(name, backend="synthetic", vocab_size=8, max_prompt_tokens=8, revision="r", dtype="float32")


JUNK: dict[str, Callable[[Pool], Any]] = {
    "nothing": lambda pool: None,
    "an adapter": lambda pool: add_junk(pool, b"x"),
    "an adapter's name": lambda pool: add_junk(pool, b"\xff\n"),
    "adapters": lambda pool: pool.redis.set(pool.keys.model("junk").adapters, "junk"),
    "too many adapters": lambda pool: pool.redis.hset(
        pool.keys.model("junk").adapters, mapping={str(number): b"x" for number in range(5000)}
    ),
    "workers": lambda pool: pool.redis.set(pool.keys.model("junk").workers, "junk"),
    "lanes": lambda pool: pool.redis.set(pool.keys.model("junk").lanes, "junk"),
    "jobs": lambda pool: pool.redis.set(pool.keys.model("junk").jobs, "junk"),
    "jobs in a hash": lambda pool: pool.redis.hset(pool.keys.model("junk").jobs, "x", "junk"),
    "dead letters": lambda pool: pool.redis.set(pool.keys.model("junk").dead, "junk"),
    "backlog": lambda pool: pool.redis.set(pool.keys.model("junk").backlog, "junk"),
    "loading": lambda pool: pool.redis.hset(pool.keys.loading(), b"\xff", b"\xff"),
    "a heartbeat": lambda pool: pool.redis.hset(pool.keys.worker("w"), mapping={"model": "junk", "job_counts": "%"}),
    "no heartbeat": lambda pool: pool.redis.set(pool.keys.worker("w"), "junk"),
}


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_of_one_model_hides_no_other_model(pool: Pool, junk: str) -> None:
    for name in ("syn", "junk"):
        pool.redis.hset(pool.keys.models(), name, info_of(name).pack())
    if junk != "workers":
        pool.redis.zadd(pool.keys.model("junk").workers, {"w": deadline_ms()})
    JUNK[junk](pool)
    async with web_app(pool) as (feed, fetch):
        frame = json.loads((await anext(feed.frames())).removeprefix(b"data: "))
        assert (await fetch("/readyz"), feed.trouble) == ("ok\n", "")
        assert [model["name"] for model in frame["models"]] == ["junk", "syn"]
        served = json.loads(await fetch("/api/models"))["models"]
    assert [model["name"] for model in served] == ["junk", "syn"]
    troubled = {model["name"]: bool(model["trouble"]) for model in frame["models"]}
    assert troubled == {"junk": any(word in junk for word in ("adapter", "offer", "jobs", "dead")), "syn": False}
    is_unreadable = {model["name"]: bool(model["trouble"]) for model in served}
    assert is_unreadable == {"junk": "adapter" in junk or "offer" in junk, "syn": False}


@asynccontextmanager
async def web_app(pool: Pool) -> AsyncIterator[tuple[Feed, Callable[[str], Awaitable[str]]]]:
    """Run the service without a socket; return its feed, and a function that requests a path."""
    app, _, feed = web_service(WebSettings(pool.url, pool.prefix, token=TOKEN, interval_s=0.001))
    surveying = asyncio.create_task(feed.run())

    async def fetch(path: str) -> str:
        body: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            body.append(message.get("body", b""))

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope: Any = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
        await app(scope, _nothing_more, send)
        return b"".join(body).decode()

    try:
        yield feed, fetch
    finally:
        await end_tasks([surveying])
