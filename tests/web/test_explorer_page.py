"""The explorer page in a browser: tokens of a text, branches, history, links, and the comparison of models."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from playwright.sync_api import Locator, Page, Route, expect

from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, V, until
from tests.web.browser import Watched
from tests.web.service import WebService

Watch = Callable[..., Watched]
IDS = [3, 1, 4]


def explore(page: Page, ids: list[int]) -> None:
    page.get_by_label("token ids").check()
    page.get_by_label("Text").fill(", ".join(map(str, ids)))
    page.get_by_role("button", name="Explore").click()
    expect(tokens(page)).to_have_count(len(ids) + 1)


def tokens(page: Page, pane: int = 0) -> Locator:
    return page.locator(".pane").nth(pane).locator(".token")


def most_likely(ids: list[int]) -> int:
    return int(synthetic_row(ids, vocab_size=V).argmax())


def test_branches_can_be_left_again_and_a_link_reproduces_the_view(pool: Pool, watch: Watch) -> None:
    pool.start()
    service = WebService(pool)
    watched = watch(service)
    page = watched.open("/explorer")
    explore(page, IDS)
    tokens(page).nth(2).hover()
    menu = page.get_by_role("menu")
    expect(menu.get_by_role("menuitem")).to_have_count(10)
    menu.get_by_role("menuitem").first.click()
    branched = [*IDS[:2], most_likely(IDS[:2])]
    expect(page.get_by_label("Text")).to_have_value(", ".join(map(str, branched)))
    tokens(page).nth(3).hover()
    menu.get_by_role("menuitem").first.click()
    expect(tokens(page)).to_have_count(5)
    page.get_by_role("button", name="← Back").click()
    expect(tokens(page)).to_have_count(4)
    expect(page.get_by_label("Text")).to_have_value(", ".join(map(str, branched)))
    page.go_back()
    expect(page.get_by_label("Text")).to_have_value(", ".join(map(str, IDS)))
    # The page's address contains the settings, and a page that is opened with this address restores them.
    tokens(page).nth(1).click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top-p").fill("0.5")
    kept = page.locator(".row p")
    expect(page).to_have_url(
        f"{service.base}/explorer#model=%5B%22syn%22%2C%22%22%5D&ids=3%2C1%2C4&at=1&temperature=0.5&top_p=0.5"
    )
    expect(kept).not_to_contain_text(f"{V} of {V}")
    shown = kept.inner_text()
    other = watch(service)
    other.page.goto(page.url)
    other.sign_in()
    expect(other.page.locator(".row p")).to_have_text(shown)
    expect(other.page.get_by_label("Temperature")).to_have_value("0.5")
    expect(other.page.locator(".token.chosen")).to_have_count(1)


def test_surprising_tokens_are_shaded_and_the_keyboard_reaches_everything(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer")
    row = synthetic_row([5], vocab_size=V)
    ids = [5, int(row.argmax()), int(row.argmin())]
    page.get_by_label("token ids").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.type(", ".join(map(str, [5, ids[2]])))
    page.keyboard.press("Control+Enter")
    expect(tokens(page)).to_have_count(3)
    expect(tokens(page).nth(1)).not_to_have_class("token s0")
    page.locator(".token.next").focus()
    page.keyboard.press("ArrowLeft")
    expect(tokens(page).nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(tokens(page).nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Text")).to_have_value(f"5, {ids[1]}")
    expect(page.locator(".token.next")).to_be_focused()
    page.get_by_role("button", name="← Back").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Text")).to_have_value(f"5, {ids[2]}")


def test_two_models_are_compared_on_a_phone_too(pool: Pool, watch: Watch) -> None:
    pool.start(model="one")
    pool.start("--seed", 7, model="two")
    page = watch(WebService(pool), viewport={"width": 400, "height": 800}).open("/explorer")
    page.get_by_label("Model").select_option(label="one")
    page.get_by_label("Compare with").select_option(label="one")
    explore(page, IDS)
    expect(tokens(page, 1)).to_have_count(len(IDS) + 1)
    # The model "two" shows a notice: it has no tokenizer.
    page.get_by_label("Compare with").select_option(label="two")
    page.get_by_role("button", name="Explore").click()
    expect(page.locator(".pane").nth(1).locator(".notice")).not_to_be_empty()
    expect(tokens(page)).to_have_count(len(IDS) + 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_bytes_lead_to_longer_prefixes_and_a_missing_trie_worker_is_named(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer")
    explore(page, IDS)
    failed: list[str] = []
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    tokens(page).nth(2).click()
    expect(page.locator(".trie")).to_contain_text("lmpool trie-worker")
    expect(page.locator(".row tbody tr")).not_to_have_count(0)
    assert failed == []
    pool.start_trie_worker()
    tokens(page).nth(1).click()
    first = page.locator(".bytes button").first
    first.click()
    expect(page.get_by_role("button", name="↑ one byte less")).to_be_enabled()
    assert "under=" in page.url
    page.get_by_role("button", name="↑ one byte less").click()
    expect(page.get_by_role("button", name="↑ one byte less")).to_be_disabled()


def test_a_late_response_does_not_replace_the_details_of_the_token_that_was_chosen_last(
    pool: Pool, watch: Watch
) -> None:
    pool.start()
    pool.start_trie_worker()
    page = watch(WebService(pool)).open("/explorer")
    explore(page, IDS)
    held: list[Route] = []
    requests = re.compile("/api/(row|trie)$")
    page.route(requests, lambda route: held.append(route) if len(held) < 2 else route.continue_())
    tokens(page).nth(1).click()
    until(lambda: page.title() and len(held) == 2, "the requests for the first token are held")
    tokens(page).nth(2).click()
    for part in (".row tbody tr", ".bytes button"):
        expect(page.locator(part).first).to_be_visible()
    shown = page.locator(".details").inner_text()
    late: list[Callable[[], None]] = [held[0].continue_, partial(held[1].fulfill, status=503, json={"error": "late"})]
    for route, respond in zip(held, late, strict=True):
        with page.expect_response(route.request.url) as response:
            respond()
        response.value.finished()
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
    assert page.locator(".details").inner_text() == shown


def test_errors_are_shown_and_the_page_still_works(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer#model=nonsense&ids=1,2&temperature=x&under=zz&at=99")
    expect(tokens(page)).to_have_count(3)
    page.goto(page.url.partition("#")[0] + "#" + "model=%5B%22other%22%2C%22%22%5D&ids=1")
    page.reload()
    expect(page.locator(".notice").first).to_contain_text("the model 'other' is not served")
    page.get_by_label("token ids").check()
    page.get_by_label("Text").fill("hello")
    page.get_by_role("button", name="Explore").click()
    expect(page.locator("#trouble")).to_contain_text("not token ids")
    page.get_by_label("token ids").uncheck()
    page.get_by_label("Text").fill("")
    page.get_by_role("button", name="Explore").click()
    expect(page.locator("#trouble")).to_have_text("Type a text.")
    explore(page, IDS)
    expect(page.locator("#trouble")).to_be_hidden()


def test_settings_out_of_range_are_reported_and_not_sent(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer")
    explore(page, IDS)
    tokens(page).nth(1).click()
    expect(page.locator(".row tbody tr")).not_to_have_count(0)
    # An open menu would cover the table.
    expect(page.get_by_role("menu")).to_be_hidden()
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    trouble = page.locator("#trouble")
    for label, value, part in (("Temperature", "-1", "from 0 to 100"), ("Top-p", "7", "from 0.01 to 1")):
        page.get_by_label(label).fill(value)
        expect(trouble).to_have_text(f"{label}: type a number {part}.")
        page.get_by_role("button", name="Explore").click()
        expect(trouble).to_have_text(f"{label}: type a number {part}.")
        page.get_by_label(label).fill("1")
        expect(trouble).to_be_hidden()
    assert [body for body in bodies if '"temperature":-1' in body or '"top_p":7' in body] == []


def test_settings_are_kept_however_they_are_confirmed(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer")
    explore(page, IDS)
    for label, value, part in (("Temperature", "0.5", "temperature=0.5"), ("Top-p", "0.7", "top_p=0.7")):
        # Press Enter at once, before the page applies typed text after a pause.
        page.get_by_label(label).press("ControlOrMeta+a")
        page.keyboard.type(value)
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(re.escape(part)))
        expect(page.get_by_label(label)).to_have_value(value)
    page.get_by_label("Temperature").press("ControlOrMeta+a")
    page.keyboard.type("0.25")
    page.get_by_label("Compare with").select_option(label="syn")
    expect(tokens(page, 1)).to_have_count(len(IDS) + 1)
    expect(page.get_by_label("Temperature")).to_have_value("0.25")
    expect(page.get_by_label("Top-p")).to_have_value("0.7")
    assert "temperature=0.25&top_p=0.7" in page.url


def test_touch_opens_the_list_and_branches(pool: Pool, watch: Watch) -> None:
    pool.start()
    phone = watch(WebService(pool), viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page = phone.open("/explorer")
    explore(page, IDS)
    menu = page.get_by_role("menu")
    tokens(page).nth(2).tap()
    expect(menu).to_be_visible()
    expect(page.locator(".row tbody tr")).not_to_have_count(0)
    expect(menu).to_be_visible()
    tokens(page).nth(2).tap()
    expect(menu).to_be_hidden()
    tokens(page).nth(2).tap()
    menu.get_by_role("menuitem").first.tap()
    branched = [*IDS[:2], most_likely(IDS[:2])]
    expect(page.get_by_label("Text")).to_have_value(", ".join(map(str, branched)))
    expect(tokens(page)).to_have_count(len(branched) + 1)


def test_the_row_contains_an_unlikely_token_of_the_text(pool: Pool, watch: Watch) -> None:
    pool.start()
    page = watch(WebService(pool)).open("/explorer")
    least = int(synthetic_row(IDS, vocab_size=V).argmin())
    explore(page, [*IDS, least])
    tokens(page).nth(3).press("Enter")
    expect(page.locator(".row tbody tr")).to_have_count(21)
    expect(page.locator(".row tr.here")).to_contain_text(f"here, rank {V}")
    tokens(page).nth(4).click()
    expect(page.locator(".row tbody tr")).to_have_count(20)
    expect(page.locator(".row tr.here")).to_have_count(0)


def test_a_text_is_explored_with_a_real_model(pool: Pool, smollm2_folder: Path, watch: Watch) -> None:
    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    page = watch(WebService(pool)).open("/explorer#text=The+capital+of+France+is+<b>Paris%0A\u202e")
    expect(page.locator(".token").nth(1)).to_have_text(" capital")
    texts = page.locator(".token").all_inner_texts()
    assert "".join(texts).startswith("The capital of France is <b>Paris⏎")
    assert page.locator(".tokens b").count() == 0
    # The page shows four lines, and no box of a token is higher than a line.
    page.get_by_label("Text").fill("One line\n\nof three\nlines")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".token", has_text="three")).to_be_visible()
    tops = page.locator(".token:not(.next)").evaluate_all("all => all.map((t) => t.getClientRects()[0].top)")
    assert len(set(tops)) == 4, tops
    lines = page.locator(".token").evaluate_all(
        "all => Math.max(...all.flatMap((t) => [...t.getClientRects()].map((rect) => rect.height)))"
    )
    assert lines < 40
    page.get_by_label("Text").fill("The capital of France is")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".token")).to_have_count(6)
    page.locator(".token.next").hover()
    page.get_by_role("menuitem").first.click()
    expect(page.get_by_label("Text")).to_have_value("The capital of France is Paris")
