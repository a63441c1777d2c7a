"""Takes the pictures of the chat page and the console that the docs show, light and dark.

Usage: python tools/screenshots.py [--only chat|console]
Needs chromium (Debian's package) and playwright (the extra `test`), and the model `smollm2` for the console.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

from tests.server.helpers import live_server  # noqa: E402
from tests.server.web.pages import saying  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SCHEMES = ("light", "dark")
QUESTION = "Why is decoding slower than prefill?"
ANSWER = """<think>
Prefill is one large matmul over all prompt tokens, decode is one token at a time. Say what each waits for.
</think>**Prefill** computes all prompt tokens in one pass, so each weight that is read serves many tokens. \
**Decode** computes one token per request and step, and reads the same weights for it.

| phase | tokens per step | waits for |
|---|---:|---|
| prefill | hundreds | arithmetic |
| decode | one per request | memory |

Batching helps, because requests share what is read:

```python
def step(rows):
    hidden = embed(rows.last_tokens)  # one token per row
    for layer in layers:
        hidden = layer(hidden, rows.kv)  # weights are read once for all rows
    return sample(hidden @ head)
```
"""
TOPICS = ("the tides", "baking bread", "comets", "violins", "glaciers", "bees", "bridges")
ROLES = ("You are a patient teacher who explains with everyday examples. ", "You write careful steps for beginners. ")


def chat(browser: Browser) -> None:
    with live_server(provider=saying(ANSWER, pace=0.02, chunk=4), reasoning_parser="deepseek_r1") as server:
        for scheme in SCHEMES:
            page = browser.new_context(color_scheme=scheme, viewport={"width": 1180, "height": 860}).new_page()
            page.goto(server.url)
            page.locator("body[data-ready]").wait_for()
            page.locator("#model").evaluate("(one) => one.replaceChildren(new Option('smollm2'))")
            page.locator("#text").fill(QUESTION)
            page.locator("#text").press("Enter")
            expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=60_000)
            save(page, f"chat-{scheme}")
            page.close()


def console(browser: Browser) -> None:
    with serving() as url:
        stop = threading.Event()
        load = threading.Thread(target=lambda: asyncio.run(keep_busy(url, stop)))
        load.start()
        try:
            page = browser.new_context(viewport={"width": 1440, "height": 1060}).new_page()
            page.goto(f"{url}/console")
            page.locator("body[data-frames]").wait_for()
            for _ in range(120):
                waited = page.locator("#requests tbody").inner_text()
                if "KV blocks" in waited and int(page.locator("body").get_attribute("data-frames") or 0) > 70:
                    break
                page.wait_for_timeout(500)
            page.locator("#pause").click()
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(700)  # the canvases are drawn anew
                save(page, f"console-{scheme}")
        finally:
            stop.set()
            load.join()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """`quire serve` with few blocks, so that requests wait for them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = f"--port {port} --kv-cache-memory 44MiB --max-num-seqs 7 --max-model-len 1024 --no-spare-engine"
    command = [sys.executable, "-m", "quire", "serve", *flags.split()]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def keep_busy(url: str, stop: threading.Event) -> None:
    async def worker(client: httpx.AsyncClient, number: int) -> None:
        while True:
            role = ROLES[number % 2] * 12
            question = f"Tell me about {TOPICS[number % 7]} " + "in detail, with examples " * (number * 7 % 40)
            messages = [{"role": "system", "content": role}, {"role": "user", "content": question}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": 80 + number * 37 % 200, "ignore_eos": True}
            if number % 6 == 0:
                body["structured_outputs"] = {"regex": "([a-z]+ ){60,200}"}
            await client.post(f"{url}/v1/chat/completions", json=body)
            number += 14

    async with httpx.AsyncClient(timeout=600) as client:
        tasks = [asyncio.create_task(worker(client, number)) for number in range(14)]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def save(page: Page, name: str) -> None:
    """As WebP, which Chromium itself can write: a tenth of a PNG."""
    session = page.context.new_cdp_session(page)
    data = session.send("Page.captureScreenshot", {"format": "webp", "quality": 82})["data"]
    path = IMAGES / f"{name}.webp"
    path.write_bytes(base64.b64decode(data))
    print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size // 1024} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures that the docs show.")
    parser.add_argument("--only", choices=["chat", "console"])
    only = parser.parse_args().only
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium; install Debian's package of this name")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for take in (chat, console):
            if only in (None, take.__name__):
                take(browser)
        browser.close()


if __name__ == "__main__":
    main()
