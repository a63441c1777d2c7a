"""The page files: complete, open to all, sent with a strict policy, and gone with --no-ui."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quire.server
from quire.server.access import WEB_FILES
from quire.server.web_pages import HEADERS
from tests.server.helpers import http, make_app, serving

FOLDER = Path(quire.server.__path__[0]) / "web"
PAGES = {"/": "chat.html", "/console": "console.html"}


def test_every_file_is_declared_and_every_declared_file_is_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*WEB_FILES, *PAGES.values()}


async def test_files_are_open_and_under_the_policy_and_revalidated() -> None:
    async with http(make_app(api_keys=("secret",))) as session:
        for path in (*PAGES, *(f"/web/{name}" for name in WEB_FILES)):
            answer = await session.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await session.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await session.get("/web/secrets.txt")).status_code == 401
        assert (await session.get("/web/..%2fapp.py")).status_code == 401
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")


async def test_no_ui_leaves_nothing_of_it() -> None:
    async with serving(ui=False) as session:
        for path in ("/console", "/console/events", *(f"/web/{name}" for name in WEB_FILES)):
            assert (await session.get(path)).status_code == 404
        assert (await session.get("/")).status_code == 307


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_what_we_write_loads_nothing_and_parses_no_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    addresses = [found for found in re.findall(r"https?://[\w.]+", text) if found != "http://www.w3.org"]
    assert addresses == []
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "EventSource",
    ):
        assert sink not in text
    if path.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", text), "inline code, which the policy refuses"
        named = re.findall(r'(?:src|href)="(web/[^"]+)"', text)
        assert {name.removeprefix("web/") for name in named} <= set(WEB_FILES)
    for name in re.findall(r'from "\./([^"]+)"', text):
        assert name in WEB_FILES
