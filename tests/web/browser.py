"""Runs Debian's Chromium with Playwright, and checks pages for errors, dialogs and requests to other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Dialog, Page, expect, sync_playwright

from tests.support.pool import DEADLINE_S
from tests.web.service import WebService

CHROMIUM = os.environ.get("LMPOOL_TEST_BROWSER", "/usr/bin/chromium")
"""Path of the Chromium browser, which `make test` installs."""

# Disable the sandbox: it needs user namespaces, which containers lack, and tests open only their own pages.
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser. While the browser runs, this thread cannot run an event loop of its own."""
    expect.set_options(timeout=1000 * DEADLINE_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of a service; records dialogs, errors and requests to other hosts.

    Args:
        browser: the browser that opens the page.
        service: the service whose page is opened.
        settings: options of the browser's new context.

    Attributes:
        page: the page, which is empty at first.
        context: the browser context of the page.
    """

    def __init__(self, browser: Browser, service: WebService, **settings: Any) -> None:
        self.context: BrowserContext = browser.new_context(**settings)
        self.context.set_default_timeout(1000 * DEADLINE_S)
        self.page: Page = self.context.new_page()
        self._service = service
        self._wrong: list[str] = []
        self.page.on("pageerror", lambda error: self._wrong.append(f"error: {error}"))
        self.page.on("dialog", self._refuse)
        self.page.on("console", self._note)
        self.page.on("request", self._check)

    def _refuse(self, dialog: Dialog) -> None:
        self._wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, message: Any) -> None:
        # Ignore other console messages, such as failed requests: only violations of the page's policy are errors.
        if "Content Security Policy" in message.text:
            self._wrong.append(message.text)

    def _check(self, request: Any) -> None:
        if urlsplit(request.url).netloc != f"127.0.0.1:{self._service.port}":
            self._wrong.append(f"request: {request.url}")

    def open(self, path: str = "/") -> Page:
        """Open a page and sign in."""
        self.page.goto(self._service.base + path)
        self.sign_in()
        return self.page

    def sign_in(self) -> None:
        """Sign in: type the token into the dialog."""
        self.page.get_by_label("Token", exact=True).fill(self._service.token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.locator("#sign-in")).to_have_count(0)

    def close(self) -> None:
        """Close the page, and fail if the page showed a dialog, raised an error or sent a request to another host."""
        self.context.close()
        assert self._wrong == []
