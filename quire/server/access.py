"""Who may call each route, from where, and what it reads: the table that keys, origins and body checks go by.

A route that is not here is never open, and tests/server/test_access.py refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from starlette.types import Scope

Key = Literal["key", "probe", "open", "admin"]
Origin = Literal["reads", "json", "preflight", "own"]


@dataclass(frozen=True, slots=True)
class Access:
    """What a route states about itself; nothing has a default, so that a new route has to say it."""

    key: Key
    """`key`: needs the API key; `probe`: only with --protect-health; `open`: never; `admin`: the admin key."""
    origin: Origin
    """What keeps web pages of other origins from using it.

    `reads`: it changes nothing, and browsers hide the answer; `json` and `preflight`: browsers ask the server before
    they send such a content type or method; `own`: it refuses them by their Origin header.
    """
    body: bool
    """Whether it reads JSON, of at most --max-body-bytes; if not, it reads nothing of what is sent."""


_READ = Access("key", "reads", body=False)
_JSON = Access("key", "json", body=True)
_ANY_TYPE = Access("key", "own", body=True)
_ADMIN = Access("admin", "json", body=True)
_PROBE = Access("probe", "reads", body=False)
_PAGE = Access("open", "reads", body=False)

PAGES = ("/", "/console")
WEB_FILES = (
    "api.js",
    "base.css",
    "chat.css",
    "chat.js",
    "console.css",
    "console.js",
    "dom.js",
    "icon.svg",
    "markdown.js",
    "messages.js",
    "panels.js",
    "recording.js",
    "settings.js",
    "store.js",
    "theme.js",
)
"""What a browser loads of the chat page and the console: open, for it holds no data."""

ROUTES: dict[tuple[str, str], Access] = {
    ("POST", "/v1/chat/completions"): _JSON,
    ("POST", "/v1/chat/completions/render"): _JSON,
    ("POST", "/v1/completions"): _JSON,
    ("POST", "/v1/completions/render"): _JSON,
    ("POST", "/v1/embeddings"): _JSON,
    ("POST", "/pooling"): _JSON,
    ("POST", "/classify"): _JSON,
    ("POST", "/score"): _JSON,
    ("POST", "/v1/score"): _JSON,
    ("POST", "/rerank"): _JSON,
    ("POST", "/v1/rerank"): _JSON,
    ("POST", "/v2/rerank"): _JSON,
    ("POST", "/v1/responses"): _JSON,
    ("POST", "/v1/responses/input_tokens"): _JSON,
    ("GET", "/v1/responses/{response_id}"): _READ,
    ("DELETE", "/v1/responses/{response_id}"): Access("key", "preflight", body=False),
    ("POST", "/v1/responses/{response_id}/cancel"): Access("key", "own", body=False),
    ("GET", "/v1/responses/{response_id}/input_items"): _READ,
    ("POST", "/v1/messages"): _JSON,
    ("POST", "/v1/messages/count_tokens"): _JSON,
    ("POST", "/api/chat"): _ANY_TYPE,
    ("POST", "/api/generate"): _ANY_TYPE,
    ("POST", "/api/embed"): _ANY_TYPE,
    ("POST", "/api/embeddings"): _ANY_TYPE,
    ("POST", "/api/show"): _ANY_TYPE,
    ("GET", "/api/tags"): _READ,
    ("GET", "/api/ps"): _READ,
    ("GET", "/api/version"): _READ,
    ("POST", "/invocations"): _JSON,
    ("GET", "/v1/models"): _READ,
    ("GET", "/v1/models/{model_id}"): _READ,
    ("POST", "/v1/load_lora_adapter"): _ADMIN,
    ("POST", "/v1/unload_lora_adapter"): _ADMIN,
    ("POST", "/tokenize"): _JSON,
    ("POST", "/detokenize"): _JSON,
    ("GET", "/tokenizer_info"): _READ,
    ("GET", "/server_info"): _READ,
    ("GET", "/version"): _READ,
    ("GET", "/docs"): _READ,
    ("GET", "/openapi.json"): _READ,
    ("HEAD", "/openapi.json"): _READ,
    ("HEAD", "/"): _PAGE,
    **{("GET", path): _PAGE for path in PAGES},
    **{("GET", f"/web/{name}"): _PAGE for name in WEB_FILES},
    ("GET", "/console/events"): _READ,
    ("GET", "/health"): _PROBE,
    ("GET", "/ready"): _PROBE,
    ("GET", "/ping"): _PROBE,
    ("POST", "/ping"): _PROBE,
    ("GET", "/load"): _PROBE,
    ("GET", "/metrics"): _PROBE,
}

PROBES = frozenset(path for (_, path), access in ROUTES.items() if access.key == "probe")
"""Paths that need no API key unless protect_health is set: probes usually have none."""


def route_path(scope: Scope) -> str:
    """The path as routes name it: without the prefix of a proxy (--root-path)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_open(scope: Scope, protect_health: bool) -> bool:
    """Whether a request may come without a key."""
    access = ROUTES.get((scope["method"], route_path(scope)))
    return access is not None and (access.key == "open" or (access.key == "probe" and not protect_health))


def needs_admin(scope: Scope) -> bool:
    """Whether a request is the operator's: API keys do not do for it."""
    access = ROUTES.get((scope["method"], route_path(scope)))
    return access is not None and access.key == "admin"
