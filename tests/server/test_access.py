"""Every route of the app states whether it needs the key, its rule for origins and what it reads, and keeps to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from quire.metrics.prometheus import PrometheusObserver
from quire.server.access import PROBES, ROUTES
from quire.server.app import build_app
from quire.server.body import AnyTypeRoute, JsonRoute
from quire.server.console.feed import ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.server.console.router import console_router
from quire.server.metrics_route import make_metrics_router
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, FakeProvider, ServerConfig, http
from tests.server.pooling_bodies import POOLING_BODIES

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/chat/completions/render": {"messages": CHAT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/completions/render": {"prompt": "Hi"},
    **POOLING_BODIES,
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {"model": MODEL, "max_tokens": 5, "messages": CHAT},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT},
    "/api/chat": {"messages": CHAT},
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {"model": MODEL},
    "/invocations": {"messages": CHAT},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [65]},
}
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")
ANY_TYPE = {path for (_, path), access in ROUTES.items() if access.origin == "own" and access.body}
KEYS = ("first-key", "schlüssel")
ADMIN_KEY = "operators-key"
ADMIN = {path for (_, path), access in ROUTES.items() if access.key == "admin"}
LIMIT = 4096


def bearer(path: str) -> dict[str, str]:
    """The header that opens a route."""
    return {"authorization": f"Bearer {ADMIN_KEY if path in ADMIN else 'first-key'}"}


def complete_app(protect_health: bool = False) -> FastAPI:
    """With every router that `quire serve` has."""
    provider = FakeProvider(FakeClient("x"))
    return build_app(
        provider,
        provider.text,
        ServerConfig(protect_health=protect_health, max_body_bytes=LIMIT),
        model_names=(MODEL,),
        api_keys=KEYS,
        admin_keys=(ADMIN_KEY,),
        extra_routers=[
            make_metrics_router(PrometheusObserver(MODEL)),
            console_router(ConsoleFeed(provider, ConsoleMonitor(), (MODEL,), is_ending=lambda: True)),
        ],
    )


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        router = getattr(route, "original_router", None)  # newer versions of FastAPI keep routers in one piece
        if isinstance(router, APIRouter):
            yield from routes_of(router.routes)
        else:
            assert isinstance(route, Route), f"{route} is neither a route nor a router: teach this test about it"
            yield route


def declared(routes: Iterable[Route]) -> dict[tuple[str, str], Route]:
    return {(method, route.path_format): route for route in routes for method in route.methods or ()}


def test_every_route_states_its_access() -> None:
    found = declared(routes_of(complete_app().routes))
    assert found.keys() - ROUTES.keys() == set(), "state key, origin rule and body of these in quire/server/access.py"
    assert ROUTES.keys() - found.keys() == set(), "quire/server/access.py names routes that are gone"


async def test_an_undeclared_route_is_found_and_asks_for_the_key() -> None:
    app = complete_app()

    @app.get("/new")
    async def new() -> None: ...

    assert declared(routes_of(app.routes)).keys() - ROUTES.keys() == {("GET", "/new")}
    async with http(app) as session:
        assert (await session.get("/new")).status_code == 401


def test_what_reads_a_body_is_declared_to_and_checks_it() -> None:
    for key, route in declared(routes_of(complete_app().routes)).items():
        has_body = isinstance(route, APIRoute) and route.body_field is not None
        assert has_body == ROUTES[key].body, key
        assert not has_body or isinstance(route, JsonRoute), f"{key} reads bodies that nobody bounds"
        assert isinstance(route, AnyTypeRoute) <= (not has_body or key[1] in ANY_TYPE), f"{key} has no origin rule"
    assert {path for (_, path), access in ROUTES.items() if access.body} == BODIES.keys()


def test_every_route_has_an_origin_rule_that_its_method_and_body_can_keep() -> None:
    for (method, path), access in ROUTES.items():
        assert (access.origin == "json" or path in ANY_TYPE) == access.body, path
        if access.origin == "reads":
            assert method in ("GET", "HEAD") or path in PROBES, f"{method} {path} may change something"
        if access.origin == "preflight":
            assert method in ("DELETE", "PATCH", "PUT"), f"browsers send {method} without asking"


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({"origin": "http://quire"}, False),
        ({"origin": "http://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": "http://[bad"}, True),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, True),
        ({"origin": "http://evil.example", "content-type": "application/json"}, True),
    ],
)
async def test_pages_of_other_origins_are_refused_where_the_route_says_so(
    app: FastAPI, headers: dict[str, str], is_refused: bool
) -> None:
    own = [(method, path) for (method, path), access in ROUTES.items() if access.origin == "own"]
    assert own
    async with http(app, headers={"authorization": "Bearer first-key"} | headers) as session:
        for method, path in own:
            assert ((await session.request(method, path)).status_code == 403) == is_refused


async def test_no_answer_is_shown_to_other_origins_and_none_may_ask(app: FastAPI) -> None:
    async with http(app, headers={"authorization": "Bearer first-key", "origin": "http://evil.example"}) as session:
        for method, path in ROUTES:
            for answer in (
                await session.request(method, path, json=BODIES.get(path)),
                await session.options(path, headers={"access-control-request-method": method}),
            ):
                assert not [name for name in answer.headers if name.startswith("access-control-")], path


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return complete_app()


async def check_keys(session: httpx.AsyncClient, method: str, path: str, is_open: bool) -> None:
    good = 404 if "{response_id}" in path else 200
    if path in POOLING_BODIES or path in EMBEDDINGS:
        good = 400  # the fake engine generates
    if path in ADMIN:
        good = 404 if "unload" in path else 400  # there is no --lora-root, and no adapter
    for header, matches in [
        (None, False),
        (b"Bearer wrong", False),
        (b"Bearer ", False),
        (b"Bearer first-ke", False),
        (b"Bearer first-keyy", False),
        (b"Basic first-key", False),
        (b"first-key", False),
        (b"Bearer first-key", True),
        (b"bearer  first-key ", True),
    ]:
        if header is not None and path in ADMIN:
            header = header.replace(b"first-key", ADMIN_KEY.encode())
        headers = {} if header is None else {b"authorization": header}
        url = path.replace("{model_id}", MODEL)
        response = await session.request(method, url, json=BODIES.get(path), headers=headers)
        assert response.status_code == (good if matches or is_open else 401), (method, path, header)
        if response.status_code == 401:
            assert response.headers["www-authenticate"] == "Bearer"
        if response.status_code == 401 and method != "HEAD":
            error = response.json()["error"]
            if path in ADMIN:
                assert "admin key is missing or wrong" in error["message"]
            if path.startswith("/api/"):
                assert "API key is missing or wrong" in error
                continue
            is_anthropic = path.startswith("/v1/messages")
            named = ("type", "authentication_error") if is_anthropic else ("code", "invalid_api_key")
            assert named in error.items()


@pytest.mark.parametrize("protect_health", [False, True])
async def test_keys_on_every_route(protect_health: bool) -> None:
    async with http(complete_app(protect_health)) as session:
        for (method, path), access in ROUTES.items():
            is_open = access.key == "open" or (access.key == "probe" and not protect_health)
            await check_keys(session, method, path, is_open)


async def test_the_operators_routes_take_no_api_key_and_are_shut_without_an_admin_key() -> None:
    provider = FakeProvider(FakeClient("x"))
    open_app = build_app(provider, provider.text, ServerConfig(), model_names=(MODEL,))
    for path in sorted(ADMIN):
        async with http(complete_app(), headers={"authorization": "Bearer first-key"}) as session:
            assert (await session.post(path, json=BODIES[path])).status_code == 401
        async with http(open_app) as session:
            assert (await session.post(path, json=BODIES[path])).status_code == 403


async def test_other_methods_of_open_paths_are_not_open() -> None:
    async with http(complete_app()) as session:
        for path in sorted(PROBES):
            assert (await session.delete(path)).status_code == 401


@pytest.mark.parametrize("path", sorted(BODIES.keys() - ANY_TYPE))
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_every_body_must_be_json(app: FastAPI, path: str, kind: str | None) -> None:
    """A web page can send these to any server without the server's consent."""
    headers = bearer(path) | ({} if kind is None else {"content-type": kind})
    async with http(app) as session:
        response = await session.post(path, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_every_body_is_bounded(app: FastAPI, path: str) -> None:
    async with http(app, headers=bearer(path)) as session:
        response = await session.post(path, json=BODIES[path] | {"padding": "x" * LIMIT})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nothing", 404), ("/ping", 200), ("/v1/responses/resp_none/cancel", 404), ("/v1/models", 405)],
)
@pytest.mark.parametrize("headers", [{}, {"content-type": "multipart/form-data; boundary=x"}])
async def test_what_reads_no_body_does_not_ask_for_json(path: str, status: int, headers: dict[str, str]) -> None:
    async with http(complete_app(), headers={"authorization": "Bearer first-key"}) as session:
        assert (await session.post(path, headers=headers)).status_code == status


async def test_an_api_below_a_proxys_prefix_keeps_its_errors() -> None:
    provider = FakeProvider(FakeClient("x"))
    settings = ServerConfig(root_path="/llm")
    built = build_app(provider, provider.text, settings, model_names=(MODEL,), api_keys=KEYS)
    transport = httpx.ASGITransport(built, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as session:
        assert (await session.get("/llm/health")).status_code == 200
        denied = await session.post("/llm/v1/messages", json=BODIES["/v1/messages"])
    assert denied.json()["error"]["type"] == "authentication_error"
