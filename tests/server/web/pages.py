"""What tests do on the pages: open, write, wait; and engines that answer at a pace that tests decide."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Locator, Page, Request, expect

from quire.types.outputs import EngineOutputs
from quire.types.sampling import SamplingParams
from tests.server.helpers import FakeProvider, LiveServer
from tests.server.scripted import TEXT, ScriptedClient

LIMIT = 15.0


class PacedClient(ScriptedClient):
    """Says its tokens with a pause between steps, so that a page can be looked at meanwhile."""

    def __init__(self, scripts: Any, *, pace: float = 0.0, chunk: int = 20) -> None:
        super().__init__(scripts, chunk=chunk)
        self.pace = pace

    async def get_outputs_async(self) -> EngineOutputs:
        if self.pace and self._running:
            await asyncio.sleep(self.pace)
        return await super().get_outputs_async()


class Saying(FakeProvider):
    """Answers with the scripts, one after the other; keeps what it was asked."""

    def __init__(self, scripts: Any, **options: Any) -> None:
        self.paced = PacedClient(scripts, **options)
        super().__init__(self.paced, TEXT)

    @property
    def prompts(self) -> list[str]:
        return self.paced.prompts

    @property
    def params(self) -> list[SamplingParams]:
        return [request.params for request in self.paced.added if isinstance(request.params, SamplingParams)]


def saying(scripts: Any, **options: Any) -> Saying:
    return Saying(scripts, **options)


class Visit:
    """One browser window, with a note of everything that should not happen."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.strangers: list[str] = []
        self._host = ""
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}") or dialog.dismiss())
        self.page.on("request", self._note)

    def _note(self, request: Request) -> None:
        self.addresses.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https") and parts.netloc != self._host:
            self.strangers.append(request.url)

    def open(self, server: LiveServer | str, path: str = "/") -> Page:
        url = server if isinstance(server, str) else server.url
        self._host = urlsplit(url).netloc
        self.page.goto(url + path)
        if path == "/":
            self.page.locator("body[data-ready]").wait_for()
        return self.page

    def ask(self, text: str) -> None:
        self.page.locator("#text").fill(text)
        self.page.locator("#text").press("Enter")

    def longest(self, tokens: int) -> None:
        """Set the longest answer."""
        self.page.locator("#open-settings").click()
        self.page.get_by_label("Longest answer").fill(str(tokens))
        self.page.locator("#close-settings").click()

    def answered(self) -> Locator:
        """The last answer, once it is complete."""
        last = self.page.locator(".message.assistant").last
        expect(last.get_by_role("button", name="Regenerate")).to_be_visible(timeout=LIMIT * 1000)
        return last


def until(condition: Callable[[], bool]) -> None:
    """Wait for something outside the page."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.01)
