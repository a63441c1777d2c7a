"""The routes that there are, and what every one of them has in common."""

from __future__ import annotations

import subprocess
import sys

from quire.server.access import PAGES, ROUTES, WEB_FILES
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import make_app, serving

# Pages and what they are made of, and routers that are not part of this app: metrics, and the console's events.
FILES = {f"/web/{name}" for name in WEB_FILES}
HIDDEN = {*PAGES, *FILES, "/docs", "/openapi.json", "/metrics", "/console/events"}
SHOWN = {(method, path) for method, path in ROUTES if path not in HIDDEN and (method, path) != ("POST", "/ping")}


async def test_every_route_is_in_the_openapi_page() -> None:
    async with serving() as session:
        page = await session.get("/docs")
        schema = (await session.get("/openapi.json")).json()
    found = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert found == SHOWN
    assert all(f'data-method="{method}" data-path="{path}"' in page.text for method, path in SHOWN)
    body = schema["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in body["responses"]
    assert set(body["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "cached_tokens" in str(body["responses"]["200"])


async def test_unknown_routes_and_methods_have_the_error_shape() -> None:
    async with serving() as session:
        missing = await session.get("/v1/nothing")
        wrong = await session.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for response in (missing, wrong):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "POST" in wrong.headers["allow"]


async def test_two_servers_in_one_process_do_not_know_each_other() -> None:
    first, second = FakeClient("a"), FakeClient("b")
    async with serving(first) as one, serving(second) as two:
        answers = [await session.post("/v1/completions", json={"prompt": "x"}) for session in (one, two)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["a", "b"]


def test_cors_is_off_unless_origins_are_given() -> None:
    names = [m.cls.__name__ for m in make_app().user_middleware]
    assert "CORSMiddleware" not in names


async def test_cors_for_given_origins() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with serving(api_keys=("k",), allowed_origins=("https://a.example",)) as session:
        allowed = await session.options("/v1/completions", headers=headers)
        other = await session.options("/v1/completions", headers={**headers, "origin": "https://b.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers


def test_the_api_process_never_imports_torch() -> None:
    code = "import sys, quire.server.launch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
