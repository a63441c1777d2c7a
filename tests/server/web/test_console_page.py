"""The console in a real browser, over an engine that preempts and compiles a grammar; and both pages under axe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.console.engines import WatchedEngine
from tests.server.helpers import LiveServer, live_server
from tests.server.npm import needed_folder
from tests.server.web.pages import LIMIT, Visit, saying, until

AXE = "axe-core@4.14.0"


def ask(url: str, prompt: str, max_tokens: int, **more: object) -> threading.Thread:
    """Send a request beside the test, and read its answer."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
    headers = {"authorization": "Bearer secret"}

    def send() -> None:
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> WatchedEngine:
    return WatchedEngine(tmp_path_factory.mktemp("console"), api_keys=("secret",))


@pytest.fixture(scope="module")
def server(engine: WatchedEngine) -> Iterator[LiveServer]:
    with live_server(provider=engine, app=engine.app()) as server:
        yield server
    engine.engine.shutdown()


def give_key(page: Page) -> None:
    dialog = page.locator("#key-dialog")
    dialog.get_by_label("Key").fill("secret")
    dialog.get_by_role("button", name="Use this key").click()
    page.locator("body[data-frames]").wait_for()


def test_a_run_with_preemption_and_a_grammar(visit: Visit, engine: WatchedEngine, server: LiveServer) -> None:
    page = visit.open(server, "/console")
    give_key(page)
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#no-requests")).to_be_visible()
    threads = [ask(server.url, "The same beginning of all prompts, " + "x" * i, 100) for i in range(7)]
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    threads.append(ask(server.url, "With a grammar", 20, structured_outputs={"json": schema}, ignore_eos=False))
    rows = page.locator("#requests tbody tr")
    expect(rows.filter(has_text="parked")).to_contain_text("waits for its grammar")
    expect(rows.filter(has_text="decode").first).to_be_visible()
    expect(rows.filter(has_text="all 4 rows are taken").or_(rows.filter(has_text="KV blocks")).first).to_be_visible()
    engine.may_compile.set()
    expect(rows.filter(has_text="preempted \N{MULTIPLICATION SIGN}").first).to_be_visible(timeout=LIMIT * 2000)
    rows.first.get_by_role("button").dispatch_event("click")  # rows move while requests come and go
    dialog = page.locator("#request")
    expect(dialog.locator("#request-events")).to_contain_text("started with")
    assert dialog.locator("#request-line rect").count() >= 1
    page.keyboard.press("Escape")
    for thread in threads:
        thread.join()
    expect(page.locator("#no-requests")).to_be_visible()
    expect(page.locator("#ended tbody tr")).to_have_count(8)
    expect(page.locator("#hits")).to_contain_text("Missed")
    expect(page.locator("#tree svg")).to_be_visible()
    expect(page.locator("#memory")).to_contain_text("KV blocks")
    expect(page.locator("#step-note")).to_contain_text("tokens planned")
    assert "prompts, x" not in page.content(), "the console shows a prompt"
    check_scrubbing(page)
    page.close()
    until(lambda: engine.feed.num_readers == 0)


def check_scrubbing(page: Page) -> None:
    """Back to a moment at which requests ran, and to the present."""
    busy = "[...document.querySelectorAll('#requests tbody tr')].length"
    last = int(page.locator("#scrub").get_attribute("max") or 0)
    assert last > 5
    for place in range(0, last, max(1, last // 8)):
        page.locator("#scrub").fill(str(place))
        if page.evaluate(busy):
            break
    assert page.evaluate(busy), "the recording has no moment with requests"
    expect(page.locator("#moment")).to_contain_text("before the end")
    page.get_by_role("button", name="Live").click()
    expect(page.locator("#no-requests")).to_be_visible()


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> str:
    folder = needed_folder(pytestconfig, AXE)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


RUN_AXE = """async () => (await axe.run()).violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => one.id + one.nodes.map((node) => ` | ${node.html.slice(0, 160)} ${node.failureSummary}`))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_issue(
    browser: Browser, axe: str, server: LiveServer, scheme: str, tmp_path: Path
) -> None:
    answer = "<think>a</think>**b** `c`\n\n| d |\n|---|\n| e |\n\n```python\nif True:  # f\n    g = 'h' + 1\n```\n"
    # axe is no file of the page, so its policy would not let it run.
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    visit = Visit(context)
    with live_server(provider=saying(answer), reasoning_parser="deepseek_r1") as chat:
        page = visit.open(chat)
        page.evaluate(axe)
        assert page.evaluate(RUN_AXE) == [], "the welcome"
        visit.ask("Hello")
        visit.answered().locator("summary").click()
        page.locator("#open-settings").click()
        assert page.evaluate(RUN_AXE) == [], "a conversation and the settings"
        page.set_viewport_size({"width": 390, "height": 800})
        page.locator("#close-settings").click()
        assert page.evaluate(RUN_AXE) == [], "a phone"
    page = visit.open(server, "/console")
    give_key(page)
    page.evaluate(axe)
    assert page.evaluate(RUN_AXE) == [], "the console"
    context.close()
