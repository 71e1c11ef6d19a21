"""The pool page in a browser: live data, 1,000 workers, hostile names, small screens, and restarts of servers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, expect

from lmpool.embedded import EmbeddedServer
from lmpool.producer import SyncProducer
from tests.support.pool import Pool, deadline_ms, until
from tests.web.browser import Watched
from tests.web.service import TOKEN, WebService
from tests.web.test_routes import bury

Watch = Callable[..., Watched]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\u2066"


def is_live(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("live")


def cell(page: Page, table: str, title: str) -> str:
    """Return the text of a column in the first row of a table."""
    titles = page.locator(f"#{table} th").all_inner_texts()
    return page.locator(f"#{table} tbody tr").first.locator("td").nth(titles.index(title)).inner_text()


def test_the_pool_is_shown_live_and_scripts_cannot_read_the_cookie(pool: Pool, watch: Watch) -> None:
    pool.start()
    service = WebService(pool)
    watched = watch(service)
    page = watched.open()
    is_live(page)
    assert page.url == f"{service.base}/"
    (cookie,) = watched.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    expect(page.locator("#models tbody tr")).to_have_count(1)
    assert cell(page, "models", "model") == "syn"
    assert cell(page, "workers", "state") == "ready"
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
        producer.batch_logprobs([[i] for i in range(20)])
    rows = page.locator("#workers tbody td").nth(page.locator("#workers th").all_inner_texts().index("rows"))
    expect(rows).to_have_text("20")
    expect(page.locator("#tiles")).to_contain_text("1 ready")
    expect(page.locator("#tiles")).to_contain_text(re.compile(r"1 model(?!s)"))
    expect(page.locator(".charts canvas")).to_have_count(4)
    pool.workers[0].signal(signal.SIGKILL)
    pool.redis.delete(pool.keys.models(), pool.keys.model("syn").workers)
    expect(page.get_by_text("No model is served.")).to_be_visible()


def test_changed_files_of_a_worker_are_shown_above_the_tables(pool: Pool, watch: Watch) -> None:
    pool.start()
    (worker,) = pool.names("worker:*")
    page = watch(WebService(pool)).open()
    is_live(page)

    def is_shown() -> bool:
        # Write the value at each check, because each heartbeat of the worker overwrites it.
        pool.redis.hset(worker, "changed_files", f"model.safetensors, {HOSTILE}")
        return "loaded them (model.safetensors, <script>" in page.locator("#trouble").inner_text()

    until(is_shown, "the page names the files that have changed")


def test_the_devices_of_a_worker_with_several_are_shown(pool: Pool, watch: Watch) -> None:
    pool.start("--lease-s", 60)
    (worker,) = pool.names("worker:*")
    pool.redis.hset(worker, mapping={"ranks": 2, "devices": "cuda:0 cuda:1"})
    page = watch(WebService(pool)).open()
    devices = page.locator("#workers tbody td").nth(page.locator("#workers th").all_inner_texts().index("devices"))
    expect(devices).to_have_text("cuda:0 cuda:1")
    expect(devices).to_have_attribute("title", "2 ranks: cuda:0 cuda:1")


def test_a_page_requests_the_token_and_refuses_a_wrong_one(pool: Pool, watch: Watch) -> None:
    service = WebService(pool)
    watched = watch(service)
    page = watched.page
    page.goto(f"{service.base}/?token={TOKEN}")
    expect(page.get_by_role("alert").last).to_contain_text("the token in this address is not valid")
    assert page.url == f"{service.base}/"
    page.keyboard.press("Escape")
    page.get_by_label("Token", exact=True).fill("wrong again")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").last).to_contain_text("the token is wrong")
    watched.sign_in()
    is_live(page)
    page.get_by_role("button", name="Sign out all browsers").click()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    expect(page.locator("#state")).not_to_have_text("live")


def test_a_dead_letter_is_opened_retried_and_another_dropped(pool: Pool, watch: Watch) -> None:
    pool.start()
    bury(pool, [7, 8, 9], HOSTILE)
    page = watch(WebService(pool, "--allow-changes")).open()
    letters = page.locator("#letters tbody tr")
    expect(letters).to_have_count(1)
    letters.get_by_role("button", name="open").click()
    expect(page.get_by_role("dialog")).to_contain_text("7, 8, 9")
    expect(page.get_by_role("dialog")).to_contain_text("<script>alert(1)</script>")
    page.keyboard.press("Escape")
    letters.get_by_role("button", name="retry").click()
    expect(page.locator("#dead-count")).to_have_text("none")
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 0
    bury(pool, [1])
    letters.get_by_role("button", name="drop").click()
    expect(letters).to_have_count(0)
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 0


def test_a_read_only_page_has_no_buttons_for_changes(pool: Pool, watch: Watch) -> None:
    pool.start()
    bury(pool, [7])
    page = watch(WebService(pool)).open()
    expect(page.get_by_role("button", name="open")).to_be_enabled()
    expect(page.get_by_role("button", name="retry")).to_be_disabled()
    expect(page.get_by_role("button", name="drop")).to_be_disabled()


def test_the_page_recovers_after_the_server_or_the_service_was_stopped(
    own_server: EmbeddedServer, tmp_path: Path, watch: Watch
) -> None:
    pool = Pool(own_server.url, "web", tmp_path)
    try:
        pool.start("--lease-s", 1)
        service = WebService(pool)
        watched = watch(service)
        page = watched.open()
        is_live(page)
        other_tab = watched.context.new_page()
        other_tab.goto(service.base)
        is_live(other_tab)
        own_server.stop()
        expect(page.locator("#state")).to_have_text("server unreachable")
        expect(page.locator("#trouble")).to_contain_text("no Redis server answers")
        # The message shows the time in the format of the graphs.
        expect(page.locator("#trouble")).to_contain_text(re.compile(r"state at \d\d:\d\d:\d\d\)"))
        own_server.start()
        is_live(page)
        expect(page.locator("#trouble")).to_be_hidden()
        service.process.end()
        expect(page.locator("#state")).to_have_text("disconnected")
        # A new service accepts no session of the service that has ended.
        WebService(pool, port=service.port)
        expect(other_tab.locator("#sign-in")).to_be_visible()
        watched.sign_in()
        is_live(page)
        is_live(other_tab)
        expect(page.locator("#workers tbody tr")).to_have_count(1)
    finally:
        pool.end()


def beat(pool: Pool, names: list[str], **others: str) -> None:
    """Write heartbeats of workers that have no process."""
    pipeline = pool.redis.pipeline()
    fields: dict[Any, Any] = {
        "model": "syn",
        "state": "ready",
        "lease_s": "600",
        "rows": "5",
        "rows_per_s": "1.5",
        "job_counts": "",
        **others,
    }
    for name in names:
        pipeline.hset(pool.keys.worker(name), mapping=fields)
        pipeline.pexpire(pool.keys.worker(name), 600_000)  # They count as silent after half of this time.
        pipeline.zadd(pool.keys.model("syn").workers, {name: deadline_ms(600)})
    pipeline.execute()


def test_a_thousand_workers_are_shown_in_pages_and_found_by_name(pool: Pool, watch: Watch) -> None:
    pool.start()
    beat(pool, [f"gpu-{number:04}" for number in range(999)])
    pool.redis.hset(pool.keys.worker("gpu-0500"), "failures", "7")
    pool.redis.hset(pool.keys.worker("gpu-0600"), "state", "draining")
    page = watch(WebService(pool)).open()
    expect(page.locator("#workers-count")).to_have_text("1,000")
    expect(page.locator("#tiles")).to_contain_text("999 ready")
    rows = page.locator("#workers tbody tr")
    expect(rows).to_have_count(100)
    assert rows.locator("td:first-child").all_inner_texts()[:2] == ["gpu-0500", "gpu-0600"], "outliers come first"
    outliers = page.locator("#outliers tbody tr")
    expect(outliers).to_have_count(2)
    assert [row.locator("td").last.inner_text() for row in outliers.all()] == ["gpu-0500 (7 failed)", "gpu-0600"]
    assert cell(page, "models", "not ready") == "1 draining"
    seen: list[str] = []
    for begin in range(1, 1001, 100):
        expect(page.locator("#range")).to_contain_text(f"{begin} to {begin + 99:,} of 1,000")
        seen += rows.locator("td:first-child").all_inner_texts()
        page.get_by_role("button", name="next").click(force=True)
    assert len(set(seen)) == 1000
    expect(page.get_by_role("button", name="next")).to_be_disabled()
    page.get_by_role("button", name="previous").click()
    expect(page.locator("#range")).to_contain_text("801 to 900")
    page.get_by_label("Filter workers").fill("gpu-0777")
    expect(rows).to_have_count(1)
    expect(page.locator("#workers-count")).to_have_text("1 of 1,000")
    assert cell(page, "workers", "worker") == "gpu-0777"


def test_a_page_of_workers_appears_although_its_response_takes_longer_than_frames(pool: Pool, watch: Watch) -> None:
    pool.start()
    beat(pool, ["gpu-1", "gpu-2"])
    page = watch(WebService(pool)).open()
    rows = page.locator("#workers tbody tr")
    expect(rows).to_have_count(3)
    held: list[Route] = []
    page.route("**/api/workers?filter=gpu-1*", lambda route: held.append(route))
    page.get_by_label("Filter workers").fill("gpu-1")
    for count in (4, 5):  # Each expected text needs another frame.
        beat(pool, [f"new-{count}"])
        expect(page.locator("#tiles")).to_contain_text(f"{count} ready")
    assert len(held) == 1, "frames request no page while a request is in flight"
    held[0].continue_()
    expect(rows).to_have_text([re.compile("gpu-1")])
    until(lambda: page.title() and len(held) == 2, "the next frame requests the page again")
    page.get_by_label("Filter workers").fill("gpu-2")
    expect(rows).to_have_text([re.compile("gpu-2")])


def test_a_silent_worker_is_marked_and_events_are_listed(pool: Pool, watch: Watch) -> None:
    pool.start()
    beat(pool, ["speaks", "was-killed"])
    page = watch(WebService(pool)).open()
    killed = page.locator("#workers tbody tr", has_text="was-killed")
    expect(killed).to_have_count(1)
    expect(page.locator("#no-events")).to_be_visible()
    titles = page.locator("#workers th").all_inner_texts()
    state = killed.locator("td").nth(titles.index("state"))
    expect(state).to_have_text("ready")
    # Let the worker's key expire in 200 s: with a lease of 600 s, its last heartbeat was 400 s ago.
    pool.redis.pexpire(pool.keys.worker("was-killed"), 200_000)
    expect(state).to_have_text("silent")
    expect(killed.locator("td").nth(titles.index("rows/s"))).to_have_text("–")
    expect(page.locator("#tiles")).to_contain_text("2 ready, 1 silent")
    # The rate of the model excludes the silent worker.
    assert cell(page, "models", "rows/s") == "1.5"
    pool.redis.hset(pool.keys.worker("speaks"), "claimed", "3")
    beat(pool, ["new"])
    events = page.locator("#events tbody tr")
    expect(events).to_have_count(2)
    pool.redis.delete(pool.keys.worker("new"))
    expect(events).to_have_count(3)
    listed = [f"{row.locator('td').nth(1).inner_text()} {row.locator('td').last.inner_text()}" for row in events.all()]
    assert sorted(listed) == ["new joined", "new left", "speaks took over 3 prompts"]
    assert listed[0] == "new left", "the newest event is first"


def test_column_titles_are_explained(pool: Pool, watch: Watch) -> None:
    page = watch(WebService(pool), viewport={"width": 400, "height": 800}).open()
    is_live(page)
    for table in ("models", "workers"):
        page.locator(f"#{table}-legend summary").click()
        explained = set(page.locator(f"#{table}-legend dt").all_inner_texts())
        titles = set(page.locator(f"#{table} th").all_inner_texts())
        assert titles - explained <= {"model", "worker", "backend", "adapters"}, titles
        assert page.locator(f"#{table}-legend dd", has_not_text=re.compile("..........")).count() == 0


def test_lines_have_gaps_where_samples_are_missing_and_p99_is_dashed(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open()
    swatches = page.locator("#chart-latency .u-legend .u-series:not(:first-child) .u-marker")
    expect(swatches).to_have_count(2)
    styles = swatches.evaluate_all("all => all.map((swatch) => getComputedStyle(swatch).borderTopStyle)")
    assert styles == ["solid", "dashed"]
    charts = f"import('{page.url}static/charts.js')"
    gaps = "async (columns) => (await CHARTS).withGaps(columns)".replace("CHARTS", charts)
    assert page.evaluate(gaps, [[1, 2, 3, 63, 64], [1, 2, 3, 4, 5]]) == [[1, 2, 3, 33, 63, 64], [1, 2, 3, None, 4, 5]]
    rare = [[10, 30, 50, 70], [1, 2, 3, 4]]
    assert page.evaluate(gaps, rare) == [[10, 20, 30, 50, 70], [1, None, 2, 3, 4]], (
        "a pause as long as the one before is not a gap"
    )
    # A page that loads a new history keeps its own older samples, and fills gaps with null.
    load = """async (histories) => {
      const [first, second] = JSON.parse(histories);
      const charts = new (await CHARTS).Charts(first);
      charts.load(second);
      return [charts.at, charts.memory, [...charts.models].map(([name, of]) => [name, of.queued])];
    }""".replace("CHARTS", charts)
    series = ["queued"]
    before = {"at": [1, 2, 3], "memory": [1, 1, 1], "series": series, "models": {"a": [[1, 2, 3]], "b": [[4, 5, 6]]}}
    after = {"at": [3, 9], "memory": [2, 2], "series": series, "models": {"a": [[7, 8]], "__proto__": [[0, 0]]}}
    assert page.evaluate(load, json.dumps([before, after])) == [
        [1, 2, 3, 9],
        [1, 1, 2, 2],
        [["a", [1, 2, 7, 8]], ["b", [4, 5, None, None]], ["__proto__", [None, None, 0, 0]]],
    ]


def test_hostile_names_are_shown_as_text_and_fit_a_phone(pool: Pool, watch: Watch) -> None:
    # Any program with write access to Redis can choose the names of models, workers and states.
    pool.start("--name", "<script>alert(0)</script>")
    for name in ("__proto__", "constructor", "</title><b>x"):
        pool.start("--name", name)
    pool.redis.hset(pool.keys.model("constructor").adapters, HOSTILE, b"junk")
    pool.start()
    beat(pool, [HOSTILE, "ten-kilobytes-" + "x" * 10_000], state=HOSTILE)
    beat(pool, ["numbers"], rows_per_s="nan", rows="1e999", lease_s="inf", tokens="-5", reused="inf", p99_s="x")
    phone = watch(WebService(pool), viewport={"width": 400, "height": 800})
    page = phone.open()
    is_live(page)
    expect(page.locator("#models")).to_contain_text("<script>alert(0)</script>")
    expect(page.locator("#workers")).to_contain_text("<script>alert(1)</script>")
    expect(page.locator("#workers")).to_contain_text("\\u202eevil")
    expect(page.locator("#models tbody tr")).to_have_count(5)
    expect(page.locator("#models")).to_contain_text("__proto__")
    assert page.evaluate("[({}).name, ({}).rows_per_s, ({}).polluted]") == [None, None, None]
    assert page.locator("main script, main img, main b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("#workers td").evaluate_all("cells => Math.max(...cells.map(c => c.textContent.length))") < 200


def test_the_keyboard_reaches_everything(pool: Pool, watch: Watch) -> None:
    pool.start()
    bury(pool, [7, 8])
    page = watch(WebService(pool, "--allow-changes")).open()
    expect(page.get_by_role("button", name="retry")).to_be_visible()
    focused = "document.activeElement.textContent || document.activeElement.getAttribute('aria-label')"
    seen: list[str] = []
    while not seen or seen[-1] != "retry":
        page.keyboard.press("Tab")
        seen.append(page.evaluate(focused))
        assert len(seen) < 20, seen
    words = "What the columns mean"
    texts = [text.partition(words)[1] or text for text in seen]
    assert texts == ["Pool", "Explorer", words, "Filter workers", words, "open", "retry"]
    page.keyboard.press("Enter")
    expect(page.locator("#dead-count")).to_have_text("none")
    assert TOKEN not in page.content()
