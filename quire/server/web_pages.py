"""The chat page at / and the console at /console: files that we wrote, sent as they are.

The files hold no data and are open to all; what they show, the browser asks for with the API key. They are sent with
a policy that lets a browser load nothing but them, and run no script that is not one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.access import PAGES, WEB_FILES

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_NAMES = {"/": "chat.html", "/console": "console.html"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def web_router() -> APIRouter:
    router = APIRouter()
    for path in PAGES:
        router.add_api_route(path, _sender(_NAMES[path]), include_in_schema=False, response_class=Response)
    for name in WEB_FILES:
        router.add_api_route(f"/web/{name}", _sender(name), include_in_schema=False, response_class=Response)
    return router


def _sender(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        content, tag = web_file(name)
        headers = HEADERS | {"etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return Response(content, headers=headers | {"content-type": kind})

    return send


@cache
def web_file(name: str) -> tuple[bytes, str]:
    """The content of a file, and its entity tag."""
    content = files("quire.server").joinpath("web", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
