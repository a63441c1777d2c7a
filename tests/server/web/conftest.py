"""A headless Chromium of the machine, driven by playwright; one for all tests of a module."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.needs import lacking
from tests.server.web.pages import Visit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        lacking("there is no chromium; install Debian's package of this name")
    with sync_playwright() as playwright:
        # Tests may run as root, where Chromium's own sandbox cannot.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 820})
    context.set_default_timeout(15_000)
    yield context
    context.close()


@pytest.fixture
def visit(context: BrowserContext) -> Iterator[Visit]:
    """Pages whose every error, request and dialog is noted; no page may have raised an error in the end."""
    visit = Visit(context)
    yield visit
    assert visit.errors == []
    assert visit.strangers == [], "a page asked another server for something"
