"""Fixtures of the tests of `lmpool web`: a browser for all tests of a file, and pages in the browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from tests.web.browser import Watched, chromium
from tests.web.service import WebService


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run a browser."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Return a function that opens pages; when the test ends, the fixture checks and closes the pages."""
    watched: list[Watched] = []

    def open_page(service: WebService, **settings: object) -> Watched:
        watched.append(Watched(browser, service, **settings))
        return watched[-1]

    yield open_page
    for page in watched:
        page.close()
