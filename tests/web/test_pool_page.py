"""The pool page in a browser: live, on a phone, with a thousand workers and hostile names, when servers go and come."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from lmpool.embedded import EmbeddedServer
from lmpool.producer import SyncProducer
from tests.support.pool import Pool, deadline_ms
from tests.web.browser import Watched
from tests.web.service import TOKEN, WebService
from tests.web.test_routes import bury

Watch = Callable[..., Watched]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\u2066"


def is_live(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("live")


def cell(page: Page, table: str, title: str) -> str:
    """What the first row of a table has in a column."""
    titles = page.locator(f"#{table} th").all_inner_texts()
    return page.locator(f"#{table} tbody tr").first.locator("td").nth(titles.index(title)).inner_text()


def test_the_pool_is_shown_live_and_the_token_is_seen_by_no_script(pool: Pool, watch: Watch) -> None:
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
    pool.redis.hset(worker, "changed_files", f"model.safetensors, {HOSTILE}")
    page = watch(WebService(pool)).open()
    is_live(page)
    expect(page.locator("#trouble")).to_contain_text("loaded them (model.safetensors, <script>")


def test_a_wrong_token_opens_nothing(pool: Pool, watch: Watch) -> None:
    watched = watch(WebService(pool))
    answer = watched.page.goto(f"{watched._service.base}/?token=wrong")
    assert answer is not None
    assert answer.status == 401
    expect(watched.page.locator("body")).to_contain_text("the token is wrong")


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


def test_a_page_that_only_shows_has_nothing_to_press(pool: Pool, watch: Watch) -> None:
    pool.start()
    bury(pool, [7])
    page = watch(WebService(pool)).open()
    expect(page.get_by_role("button", name="open")).to_be_enabled()
    expect(page.get_by_role("button", name="retry")).to_be_disabled()
    expect(page.get_by_role("button", name="drop")).to_be_disabled()


def test_servers_that_go_are_missed_and_found_again(own_server: EmbeddedServer, tmp_path: Path, watch: Watch) -> None:
    pool = Pool(own_server.url, "web", tmp_path)
    try:
        pool.start("--lease-s", 1)
        service = WebService(pool)
        page = watch(service).open()
        is_live(page)
        own_server.stop()
        expect(page.locator("#state")).to_have_text("server away")
        expect(page.locator("#trouble")).to_contain_text("no Redis server answers")
        # As the graphs tell the time.
        expect(page.locator("#trouble")).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d\)"))
        own_server.start()
        is_live(page)
        expect(page.locator("#trouble")).to_be_hidden()
        service.process.end()
        expect(page.locator("#state")).to_have_text("away")
        WebService(pool, port=service.port)
        is_live(page)
        expect(page.locator("#workers tbody tr")).to_have_count(1)
    finally:
        pool.end()


def beat(pool: Pool, names: list[str], **told: str) -> None:
    """Have workers live that are no processes: what they write is there."""
    pipeline = pool.redis.pipeline()
    fields: dict[Any, Any] = {
        "model": "syn",
        "state": "ready",
        "lease_s": "60",
        "rows": "5",
        "rows_per_s": "1.5",
        "job_counts": "",
        **told,
    }
    for name in names:
        pipeline.hset(pool.keys.worker(name), mapping=fields)
        pipeline.pexpire(pool.keys.worker(name), 60_000)
        pipeline.zadd(pool.keys.model("syn").workers, {name: deadline_ms()})
    pipeline.execute()


def test_a_thousand_workers_are_listed_and_found_by_name(pool: Pool, watch: Watch) -> None:
    pool.start()
    beat(pool, [f"gpu-{number:04}" for number in range(999)])
    page = watch(WebService(pool)).open()
    expect(page.locator("#workers-count")).to_have_text("1,000")
    expect(page.locator("#workers tbody tr")).to_have_count(100)
    page.get_by_role("button", name="show all 1,000").click()
    expect(page.locator("#workers tbody tr")).to_have_count(1000)
    page.get_by_label("Filter workers").fill("gpu-0777")
    expect(page.locator("#workers tbody tr")).to_have_count(1)
    assert cell(page, "workers", "worker") == "gpu-0777"


def test_hostile_names_are_shown_as_what_they_are_and_break_no_phone(pool: Pool, watch: Watch) -> None:
    # Of a model, of workers, of a state: whoever may write to the server has chosen them.
    pool.start("--name", "<script>alert(0)</script>")
    pool.start()
    beat(pool, [HOSTILE, "ten-kilobytes-" + "x" * 10_000], state=HOSTILE)
    beat(pool, ["numbers"], rows_per_s="nan", rows="1e999", lease_s="inf", tokens="-5", reused="inf", p99_s="x")
    phone = watch(WebService(pool), viewport={"width": 400, "height": 800})
    page = phone.open()
    is_live(page)
    expect(page.locator("#models")).to_contain_text("<script>alert(0)</script>")
    expect(page.locator("#workers")).to_contain_text("<script>alert(1)</script>")
    expect(page.locator("#workers")).to_contain_text("\\u202eevil")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("#workers td").evaluate_all("cells => Math.max(...cells.map(c => c.textContent.length))") < 200


def test_the_page_is_used_by_keyboard_alone(pool: Pool, watch: Watch) -> None:
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
    assert seen == ["Pool", "Explorer", "Filter workers", "open", "retry"]
    page.keyboard.press("Enter")
    expect(page.locator("#dead-count")).to_have_text("none")
    assert TOKEN not in page.content()
