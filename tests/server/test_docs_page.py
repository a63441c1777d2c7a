"""The page about the routes says what the description says, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from quire.server.docs_page import docs_page, operations, type_text
from tests.frontend.fake_client import ClassifyingClient, PoolingClient
from tests.server.helpers import http, make_app, serving
from tests.server.pooling_bodies import POOLING_BODIES


class Page(HTMLParser):
    """The bodies of a page by path, and every address that a browser would load by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.examples: dict[str, str] = {}
        self.loaded: list[str] = []
        self._path = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._inside = tag
        if tag == "form":
            self._path = given["data-path"] or ""
        if tag == "link" or "src" in given:
            self.loaded.append(str(given))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "textarea":
            self.examples[self._path] = data
        if self._inside == "style":
            self.loaded += re.findall(r"@import|url\(", data)


async def test_it_loads_nothing_and_its_examples_are_answered() -> None:
    async with serving() as session:
        answer = await session.get("/docs")
        page = Page(answer.text)
        assert answer.headers["content-type"].startswith("text/html")
        assert page.loaded == []
        assert "://" not in answer.text
        tried = {path: example for path, example in page.examples.items() if "{" not in path}
        assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= set(tried)
        pooled = {path: tried.pop(path) for path in (*POOLING_BODIES, "/api/embed")}
        del tried["/api/embeddings"]  # its form before
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):  # the operator's, who has a key
            del tried[path]
        for path, example in tried.items():
            response = await session.post(path, json=json.loads(example))
            assert response.status_code == 200, (path, response.text)
    for path, example in pooled.items():
        async with http(make_app(ClassifyingClient("a") if path == "/classify" else PoolingClient())) as session:
            response = await session.post(path, json=json.loads(example))
            assert response.status_code == 200, (path, response.text)


async def test_it_stands_behind_a_proxy_and_behind_a_key() -> None:
    app = make_app(api_keys=("secret",))
    async with http(app) as session:
        assert (await session.get("/docs")).status_code == 401
        assert (await session.get("/docs", headers={"authorization": "Bearer secret"})).status_code == 200
    text = docs_page(app.openapi(), "/models/one")
    assert 'href="/models/one/openapi.json"' in text
    assert 'const root = "/models/one";' in text


def test_what_a_description_says_is_text_and_not_markup() -> None:
    route = {"tags": ["<b>"], "description": "<script>alert(1)</script>", "responses": {}}
    text = docs_page({"info": {"title": "T", "version": "1"}, "paths": {"/<x>": {"get": route}}})
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert "/&lt;x&gt;" in text


@pytest.mark.parametrize("root", ["", "/llm"])
async def test_without_a_chat_page_the_servers_address_leads_here(root: str) -> None:
    transport = httpx.ASGITransport(make_app(ui=False), root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as session:
        answer = await session.get("/")
        head = await session.head("/")
    assert (answer.status_code, answer.headers["location"]) == (307, f"{root}/docs")
    assert head.status_code == 200


def test_fields_of_every_form_of_a_body() -> None:
    found = {operation.path: operation for operation in operations(make_app().openapi())}
    text, chat = found["/tokenize"].bodies
    assert (text[0].name, text[0].type, text[0].required) == ("prompt", "string", True)
    assert "messages" in {field.name for field in chat}
    assert found["/health"].bodies == []
    (model_id,) = found["/v1/models/{model_id}"].parameters
    assert model_id.required


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "integer"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/x/A"}}]}, "string or list of object"),
        ({"enum": ["low", "high"]}, '"low" or "high"'),
        ({"const": "text"}, '"text"'),
        ({}, "anything"),
    ],
)
def test_types_in_few_words(schema: dict[str, Any], text: str) -> None:
    assert type_text(schema, {"A": {"type": "object"}}) == text
