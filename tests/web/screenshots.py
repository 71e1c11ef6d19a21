"""Take the screenshots of the pages for the documentation: `python -m tests.web.screenshots MODEL_FOLDER OUT`.

The screenshots show a real pool with a real model and a trie worker.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, expect

from lmpool.embedded import EmbeddedServer
from lmpool.producer import SyncProducer
from tests.support.pool import Pool
from tests.web.browser import Watched, chromium
from tests.web.service import WebService
from tests.web.test_routes import bury

TEXT = "The capital of France is Paris, and the best way to see it is from the top of the Eiffel Tower."
LOAD_S = 60


def main(model: str, out: Path) -> None:
    """Start a pool, send prompts, and take the screenshots."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lmp") as name, EmbeddedServer(folder=Path(name, "lmpool")) as server:
        pool = Pool(server.url, "lmpool", Path(name))
        try:
            pool.start("--backend", "hf", "--name", "smollm2", model=model)
            for _ in range(2):
                pool.start("--step-ms", 4, "--vocab-size", 32_000, "--max-batch", 16, model="synthetic")
            pool.start_trie_worker()
            bury(pool, [1, 2, 3], model="synthetic")
            with _load(pool):
                _take(WebService(pool, "--allow-changes"), out)
        finally:
            pool.end()


@contextlib.contextmanager
def _load(pool: Pool) -> Iterator[None]:
    """Keep sending prompts that grow, so that the pages show load."""
    done = threading.Event()

    def request_rows(model: str, count: int, vocab_size: int) -> None:
        with SyncProducer(model, redis=pool.url, prefix=pool.prefix) as producer:
            numbers = itertools.count()
            texts = [[7, number] for number in range(count)]
            while not done.is_set():
                producer.batch_logprobs(texts)
                for text in texts:
                    text.append(next(numbers) % vocab_size)
                    if len(text) > 48:
                        del text[2:]
                done.wait(0.05 * (len(texts[0]) % 11))

    threads = [
        threading.Thread(target=request_rows, args=args) for args in (("smollm2", 4, 49_000), ("synthetic", 48, 32_000))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _take(service: WebService, out: Path) -> None:
    explored = {"model": '["smollm2",""]', "text": TEXT, "at": 8, "temperature": 0.7, "top_p": 0.9}
    with chromium() as browser:
        for scheme in ("light", "dark"):
            watched = Watched(browser, service, viewport={"width": 1280, "height": 860}, color_scheme=scheme)
            page = watched.open()
            expect(page.locator("#state")).to_have_text("live")
            page.wait_for_function("s => (performance.now() > 1000 * s)", arg=LOAD_S if scheme == "light" else 2)
            page.screenshot(path=out / f"web-pool-{scheme}.png")
            _explore(page, service, explored)
            page.locator(".token").nth(16).hover()
            page.screenshot(path=out / f"web-explorer-{scheme}.png")
            watched.close()
        phone = Watched(browser, service, viewport={"width": 400, "height": 800}, device_scale_factor=2)
        page = phone.open()
        expect(page.locator("#state")).to_have_text("live")
        page.screenshot(path=out / "web-phone.png")
        phone.close()


def _explore(page: Page, service: WebService, view: dict[str, object]) -> None:
    page.goto(f"{service.base}/explorer#{urlencode(view)}")
    expect(page.locator(".bytes button").first).to_be_visible()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
