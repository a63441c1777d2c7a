"""The chat page in a real browser: it talks, stops, branches, asks for keys, survives its server and its model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from quire.server.access import WEB_FILES
from quire.server.web_pages import web_file
from tests.frontend.fake_client import PoolingClient
from tests.server.helpers import FakeProvider, live_server
from tests.server.web.pages import Visit, saying, until

ANSWER = """<think>
A table is *clear*.
</think>It keeps **keys** and `values`.

| part | cost |
|---|---:|
| work | 1 |

```python
def step(token):
    return token + 1  # one
```

1. first
2. second
   - inner

See [the paper](https://example.com/a_(b)) or https://example.com/c.
"""


def test_an_answer_is_streamed_rendered_counted_and_kept(visit: Visit) -> None:
    with live_server(provider=saying(ANSWER, pace=0.01), reasoning_parser="deepseek_r1") as server:
        page = visit.open(server)
        visit.ask("How does it work?")
        expect(page.locator("#stop")).to_be_visible()
        answer = visit.answered()
        expect(answer.locator("strong")).to_have_text("keys")
        expect(answer.locator("td").nth(1)).to_have_text("1")
        expect(answer.locator("figure.code code")).to_contain_text("return token + 1")
        expect(answer.locator("ol > li")).to_have_count(2)
        expect(answer.locator("ol ul li")).to_have_text("inner")
        expect(answer.get_by_role("link", name="the paper")).to_have_attribute("href", "https://example.com/a_(b)")
        expect(answer.locator(".figures")).to_contain_text("tok/s")
        thinking = answer.locator("details.thinking")
        expect(thinking).not_to_have_attribute("open", "")
        expect(thinking.locator(".prose")).to_be_hidden()
        thinking.locator("summary").click()
        expect(thinking.locator("em")).to_have_text("clear")
        page.reload()
        expect(page.locator(".message.user .said")).to_have_text("How does it work?")
        expect(page.locator(".message.assistant td").nth(1)).to_have_text("1")
        expect(page.locator("#conversations .open")).to_have_text("How does it work?")
    assert visit.page.title() == "How does it work? \N{EN DASH} Quire"


def test_escape_stops_an_answer_and_the_engine(visit: Visit) -> None:
    provider = saying("word " * 4000, pace=0.01, chunk=5)
    with live_server(provider=provider, max_body_bytes=1 << 20) as server:
        page = visit.open(server)
        visit.longest(100000)
        visit.ask("Go on and on")
        expect(page.locator(".message.assistant .prose").last).to_contain_text("word word")
        page.keyboard.press("Escape")
        answer = visit.answered()
        expect(answer.locator(".problem")).to_have_text("Stopped.")
        until(lambda: bool(provider.client.aborted))
        page.reload()
        expect(page.locator(".message.assistant .prose").last).to_contain_text("word word")


def test_branches_of_answers_and_of_edits(visit: Visit) -> None:
    provider = saying(["first answer", "second answer", "to the edit"])
    with live_server(provider=provider) as server:
        page = visit.open(server)
        visit.ask("original")
        expect(visit.answered().locator(".prose").last).to_have_text("first answer")
        visit.answered().get_by_role("button", name="Regenerate").click()
        expect(page.locator(".message.assistant .prose").last).to_have_text("second answer")
        expect(visit.answered().locator(".branches")).to_contain_text("2 / 2")
        page.get_by_role("button", name="Previous branch").click()
        expect(page.locator(".message.assistant .prose").last).to_have_text("first answer")
        page.keyboard.press("Alt+ArrowUp")
        page.get_by_label("Edit the message").fill("edited")
        page.get_by_label("Edit the message").press("Enter")
        expect(page.locator(".message.assistant .prose").last).to_have_text("to the edit")
        visit.answered()
        page.reload()
        expect(page.locator(".message.user .said")).to_have_text("edited")
        page.locator(".message.user").get_by_role("button", name="Previous branch").click()
        expect(page.locator(".message.user .said")).to_have_text("original")
        expect(page.locator(".message.assistant .prose").last).to_have_text("second answer")
    assert [prompt.count("[user]") for prompt in provider.prompts] == [1, 1, 1]


def test_tool_calls_are_shown_and_take_results(visit: Visit) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    provider = saying([call, "It is sunny."])
    with live_server(provider=provider, tool_call_parser="hermes") as server:
        page = visit.open(server)
        page.locator("#open-settings").click()
        page.get_by_label("Tools").fill(json.dumps(tools))
        page.locator("#close-settings").click()
        visit.ask("Weather?")
        shown = page.get_by_role("region", name="Call of weather")
        expect(shown.locator("pre")).to_contain_text('"city": "Rome"')
        page.get_by_label("Result of weather").fill("21 degrees")
        page.get_by_role("button", name="Give result").click()
        expect(page.locator(".message.assistant .prose").last).to_have_text("It is sunny.")
        expect(page.locator(".message.tool pre")).to_have_text("21 degrees")
    asked = provider.prompts[1]
    assert "CALL weather" in asked
    assert "[tool]21 degrees" in asked


def test_files_and_settings_reach_the_model(visit: Visit) -> None:
    provider = saying("ok")
    with live_server(provider=provider) as server:
        page = visit.open(server)
        page.locator("#open-settings").click()
        page.get_by_label("System prompt of all chats").fill("Be brief.")
        page.get_by_label("Temperature").fill("9")
        page.get_by_label("Temperature").press("Tab")
        expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_label("Seed").fill("7")
        page.locator("#close-settings").click()
        page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"file content"})
        expect(page.locator("#files li")).to_contain_text("a.txt")
        visit.ask("Read it")
        visit.answered()
        expect(page.locator(".chips li")).to_have_text("a.txt")
        for name, kind, problem in (
            ("b.bin", "text/plain", "b.bin is not a text file"),
            ("c.png", "image/png", "c.png is an image or a recording, and this model reads text only"),
        ):
            page.locator("#file").set_input_files({"name": name, "mimeType": kind, "buffer": b"a\0b"})
            expect(page.locator("#problem")).to_contain_text(problem)
            expect(page.locator("#files li")).to_have_count(0)
    (params,) = provider.params
    assert (params.temperature, params.seed) == (0.25, 7)
    prompt = provider.prompts[0]
    assert prompt.startswith("[system]Be brief.")
    assert "file content" in prompt


def test_a_chat_may_have_a_system_prompt_of_its_own(visit: Visit) -> None:
    provider = saying("ok")
    with live_server(provider=provider) as server:
        page = visit.open(server)
        page.keyboard.press("Alt+Comma")
        page.get_by_label("System prompt of all chats").fill("For all.")
        page.get_by_label("System prompt of this chat").fill("For one.")
        page.keyboard.press("Escape")
        visit.ask("first")
        visit.answered()
        page.keyboard.press("Alt+n")
        expect(page.locator("#chat-system")).to_have_value("")
        visit.ask("second")
        visit.answered()
        page.reload()
        page.locator("#conversations .open").filter(has_text="first").click()
        expect(page.locator("#chat-system")).to_have_value("For one.")
    assert [prompt.split("\n")[0] for prompt in provider.prompts] == ["[system]For one.", "[system]For all."]


def test_a_model_that_makes_embeddings_invites_nobody_to_chat(visit: Visit) -> None:
    with live_server(provider=FakeProvider(PoolingClient())) as server:
        page = visit.open(server)
        expect(page.locator(".welcome")).to_contain_text("does not chat")
        expect(page.locator(".welcome")).to_contain_text("is for: embed")
        expect(page.locator("#composer")).to_be_hidden()


def test_the_end_stays_in_sight_when_the_message_box_grows(visit: Visit) -> None:
    with live_server(provider=saying("line\n\n" * 40)) as server:
        page = visit.open(server)
        visit.longest(4000)
        visit.ask("Go")
        answer = visit.answered()
        page.locator("#text").fill("one\ntwo\nthree\nfour\nfive\nsix")
        expect(answer.locator(".figures")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.querySelector('#thread').scrollHeight > innerHeight")


def test_what_ended_an_answer_is_said(visit: Visit) -> None:
    with live_server(provider=saying(["one two three four", "", "word\n\n" * 60])) as server:
        page = visit.open(server)
        visit.longest(3)
        visit.ask("cut me off")
        expect(visit.answered().locator(".figures")).to_contain_text("cut off at the length limit")
        visit.ask("say nothing")
        expect(visit.answered().locator(".problem")).to_have_text("The model said nothing.")
        visit.longest(4000)
        visit.ask("go on")
        visit.answered()
        expect(page.locator("#to-end")).to_be_hidden()
        page.locator("#thread").evaluate("(one) => (one.scrollTop = 0)")
        page.get_by_role("button", name="Go to the end").click()
        expect(page.locator("#to-end")).to_be_hidden()
        page.reload()
        expect(page.locator(".figures").first).to_contain_text("cut off at the length limit")


def test_a_server_that_is_not_ready_says_what_it_does(visit: Visit) -> None:
    provider = saying("hello")
    provider.status, provider.unavailable = "starting", "loading weights 40 %"
    with live_server(provider=provider) as server:
        page = visit.open(server)
        expect(page.locator("#status")).to_contain_text("Server starting: loading weights 40 %")
        visit.ask("too early")
        expect(visit.answered().locator(".problem")).to_contain_text("loading weights")
        provider.status, provider.unavailable = "ready", None
        expect(page.locator("#status")).to_be_empty()
        visit.answered().get_by_role("button", name="Regenerate").click()
        expect(page.locator(".message.assistant .prose").last).to_have_text("hello")


def test_the_key_is_asked_for_and_stays_in_headers(visit: Visit) -> None:
    with live_server(provider=saying("hello"), api_keys=("right-key",)) as server:
        page = visit.open(server)
        dialog = page.locator("#key-dialog")
        for key, problem in (("wrong-key", "did not accept"), ("right-key", None)):
            dialog.get_by_label("Key").fill(key)
            dialog.get_by_label("Key").press("Enter")
            if problem:
                expect(dialog.locator(".problem")).to_contain_text(problem)
        expect(page.locator("#model option").first).to_have_text("fake-model")
        visit.ask("hi")
        expect(visit.answered().locator(".prose").last).to_have_text("hello")
        page.reload()
        expect(page.locator("#model option").first).to_have_text("fake-model")
        assert page.evaluate("JSON.stringify(localStorage)").count("right-key") == 0
    assert not [address for address in visit.addresses if "key" in address and "/web/" not in address]


PAYLOADS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'></svg>",
    "<iframe src='javascript:parent.hit = 1'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "![x](http://evil.example/pixel.png)",
    '[x](https://example.com" onclick="window.hit=1)',
    '<https://example.com/" onmouseover="window.hit=1>',
    "```html\n<script>window.hit = 1</script>\n```",
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | c |",
    "`<script>window.hit = 1</script>`",
    "<a href='//evil.example'>x</a> <form action='//evil.example'><button>b</button></form>",
    "<style>@import url(//evil.example/x.css)</style><link rel=stylesheet href=//evil.example/x.css>",
    "<base href='//evil.example/'>",
    "> - > 1. <b onclick=window.hit=1>**[a](vbscript:x)**</b>",
    '\u202e<!--<img src="--><img src=x onerror=window.hit=1>',
]

ALLOWED = (
    "a article b blockquote br button code del details div em figcaption figure h2 h3 h4 h5 h6 hr i input li ol p pre"
    " section span strong summary table tbody td textarea th thead tr ul"
)


def test_what_a_model_writes_is_text(visit: Visit) -> None:
    """The model is hostile here: it writes scripts into its answer, its thinking and its calls."""
    said = "\n\n".join(PAYLOADS)
    call = json.dumps({"name": "<img src=x onerror=window.hit=1>", "arguments": {"a": PAYLOADS[0]}})
    script = f"<think>{said}</think>{said}\n<tool_call>\n{call}\n</tool_call>"
    settings: dict[str, Any] = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    with live_server(provider=saying([script, said], chunk=7), **settings) as server:
        page = visit.open(server)
        visit.longest(20000)
        visit.ask("<script>window.hit = 1</script>")
        answer = visit.answered()
        for _ in range(2):
            answer.locator("summary").click()
            for link in answer.locator("a").all():
                assert re.match(r"https?://", link.get_attribute("href") or "")  # an image is a link, and not loaded
            known = set(ALLOWED.split())
            inside = "[...document.querySelectorAll('#thread *')]"
            tags = set(page.evaluate(f"{inside}.map((one) => one.localName)"))
            assert tags <= known, tags - known
            names = set(page.evaluate(f"{inside}.flatMap((one) => one.getAttributeNames())"))
            assert not [name for name in names if name.startswith("on") or name in ("src", "action", "srcdoc")]
            page.reload()
            answer = page.locator(".message.assistant").last
            expect(answer.locator("summary")).to_be_visible()
        assert page.evaluate("window.hit") is None


def test_a_server_that_dies_and_comes_back(visit: Visit) -> None:
    with live_server(provider=saying("word " * 4000, pace=0.02, chunk=5)) as server:
        page = visit.open(server)
        port = server.port
        visit.longest(20000)
        visit.ask("Long")
        expect(page.locator(".message.assistant .prose").last).to_contain_text("word word")
    answer = visit.answered()
    expect(answer.locator(".problem")).not_to_be_empty()
    expect(answer.locator(".prose").last).to_contain_text("word word")
    visit.ask("Anyone there?")
    expect(page.locator("#status")).to_contain_text("Server away")
    with live_server(provider=saying("back again"), port=port):
        expect(page.locator("#status")).to_be_empty()
        visit.answered().get_by_role("button", name="Regenerate").click()
        expect(page.locator(".message.assistant .prose").last).to_have_text("back again")


def test_export_and_import(visit: Visit, browser: Browser, tmp_path: Path) -> None:
    with live_server(provider=saying(["one", "two"])) as server:
        page = visit.open(server)
        visit.ask("Question")
        visit.answered().get_by_role("button", name="Regenerate").click()
        expect(visit.answered().locator(".branches")).to_contain_text("2 / 2")
        with page.expect_download() as download:
            page.locator("#export").click()
        file = tmp_path / "chats.json"
        download.value.save_as(file)
        other = browser.new_context()
        second = Visit(other)
        second.open(server)
        second.page.locator("#import-file").set_input_files(file)
        expect(second.page.locator(".message.assistant .prose").last).to_have_text("two")
        expect(second.page.locator(".branches")).to_contain_text("2 / 2")
        broken = json.loads(file.read_text())
        for message in broken["conversations"][0]["messages"].values():
            message["parent"] = "nobody"
        file.write_text(json.dumps(broken))
        second.page.locator("#import-file").set_input_files(file)
        expect(second.page.locator("#problem")).to_contain_text("has no parent")
        assert second.errors == []
        other.close()


SPLITS = """async ([texts, seed]) => {
  const { MarkdownView } = await import("./web/markdown.js");
  let state = seed;
  const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
  for (const text of texts) {
    const whole = document.createElement("div");
    new MarkdownView(whole).update(text);
    for (let round = 0; round < 6; round += 1) {
      const grown = document.createElement("div");
      const view = new MarkdownView(grown);
      for (let end = 0; end < text.length; end += 1 + Math.floor(random() * 9)) view.update(text.slice(0, end));
      view.update(text);
      if (grown.innerHTML !== whole.innerHTML) return [text, grown.innerHTML, whole.innerHTML];
    }
  }
  return null;
}"""


def test_a_growing_text_ends_as_the_whole_text(visit: Visit) -> None:
    texts = [
        ANSWER,
        "\n\n".join(PAYLOADS),
        "# a\nb\n- c\n\n  d\n- e\n\nf\n> g\nh\n\n---\n1) i\n```\nopen",
        "*a **b*\n| x\n|-\n",
    ]
    with live_server(provider=saying("")) as server:
        page = visit.open(server)
        assert page.evaluate(SPLITS, [texts, 12345]) is None
        quick = """async () => {
          const { MarkdownView } = await import("./web/markdown.js");
          const begin = performance.now();
          const hostile = ["[".repeat(20000), "*a ".repeat(8000), "> ".repeat(2000), "`".repeat(9999)];
          for (const text of [...hostile, "_(".repeat(9000)])
            new MarkdownView(document.createElement("div")).update(text);
          return performance.now() - begin;
        }"""
        assert page.evaluate(quick) < 8000, "a hostile text keeps the page busy"


def test_the_pages_are_small_and_paint_soon(visit: Visit) -> None:
    names = ("chat.html", "console.html", *WEB_FILES)
    assert sum(len(web_file(name)[0]) for name in names) < 300_000
    with live_server(provider=saying("")) as server:
        page = visit.open(server)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
        assert 0 < paint < 3000, "0.3 s on a quiet machine"


@pytest.mark.parametrize("width", [390, 1200])
def test_a_phone_and_a_desk(visit: Visit, width: int) -> None:
    with live_server(provider=saying(ANSWER)) as server:
        visit.page.set_viewport_size({"width": width, "height": 800})
        page = visit.open(server)
        visit.ask("Hello")
        visit.answered()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width < 760:
            expect(page.locator("#new-chat")).not_to_be_in_viewport()
            page.get_by_role("button", name="Conversations").click()
        expect(page.locator("#new-chat")).to_be_in_viewport()
        page.locator("#new-chat").click()
        expect(page.locator(".welcome")).to_be_visible()
