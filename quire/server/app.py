"""Builds the HTTP application from an engine provider, the text side of a model, and settings. Keeps no globals."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

import quire
from quire.config.groups import ServerConfig
from quire.frontend.text_model import TextModel
from quire.loader.describe import UNKNOWN, ModelDescription
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.server.adapter_loading import AdapterLoader, adapters_router
from quire.server.adapters import ServedAdapters
from quire.server.admin import admin_router
from quire.server.admission import Admission
from quire.server.anthropic.router import messages_router
from quire.server.context import EngineProvider, ServerContext
from quire.server.control.keep_alive import KeepAlive, Sleeper
from quire.server.conversation.formats import resolve_formats
from quire.server.docs_page import docs_router, start_router
from quire.server.errors import install_error_handlers
from quire.server.load import REPORT_HEADER, LoadReport, load_router
from quire.server.middleware import REQUEST_ID_HEADER, ApiKeys, BodyLimits, RequestContext, SameSite
from quire.server.models import models_router
from quire.server.ollama.router import ollama_router
from quire.server.openai.chat.router import chat_router
from quire.server.openai.completions.router import completions_router
from quire.server.openai.embeddings.router import embeddings_router
from quire.server.openai.invocations import invocations_router
from quire.server.openai.responses.router import responses_router
from quire.server.pooling.router import pooling_router
from quire.server.tokenize import tokenize_router
from quire.server.tool_servers import ToolServers, make_tool_servers
from quire.server.web_pages import web_router

ROUTERS = (
    chat_router,
    completions_router,
    embeddings_router,
    pooling_router,
    responses_router,
    messages_router,
    ollama_router,
    invocations_router,
    models_router,
    tokenize_router,
    load_router,
    admin_router,
)


def build_app(
    provider: EngineProvider,
    text: TextModel,
    settings: ServerConfig,
    *,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    observer: Observer = NULL_OBSERVER,
    extra_routers: Sequence[APIRouter] = (),
    tool_servers: ToolServers | None = None,
    adapters: ServedAdapters | None = None,
    description: ModelDescription = UNKNOWN,
    sleeper: Sleeper | None = None,
) -> FastAPI:
    """`observer` is called for every HTTP request; `extra_routers` hold routes that need more than a ServerContext.

    Whoever gives `tool_servers` closes them. `sleeper` puts the engine to sleep, with --keep-alive.
    """
    app = build_model_app(
        provider,
        text,
        settings,
        model_names=model_names,
        observer=observer,
        extra_routers=extra_routers,
        tool_servers=tool_servers,
        adapters=adapters,
        description=description,
        sleeper=sleeper,
    )
    protect(app, settings, api_keys, admin_keys, observer)
    return app


def build_model_app(
    provider: EngineProvider,
    text: TextModel,
    settings: ServerConfig,
    *,
    model_names: Sequence[str],
    observer: Observer = NULL_OBSERVER,
    extra_routers: Sequence[APIRouter] = (),
    tool_servers: ToolServers | None = None,
    adapters: ServedAdapters | None = None,
    description: ModelDescription = UNKNOWN,
    sleeper: Sleeper | None = None,
    taken_names: Container[str] = (),
) -> FastAPI:
    """All routes of one model. Whoever serves it puts `protect` around it, once for all models.

    `taken_names` are those of other models, which no adapter may get.
    """
    text.isolate_templates()
    formats = resolve_formats(text, settings)
    servers = tool_servers or make_tool_servers(ServerConfig())
    admission = Admission(settings.max_queue)
    context = ServerContext(
        provider,
        text,
        settings,
        tuple(model_names),
        admission,
        formats,
        servers,
        description,
        adapters=adapters or ServedAdapters(),
        keep_alive=KeepAlive(admission, sleeper) if sleeper is not None and settings.keep_alive else None,
        observer=observer,
    )
    app = FastAPI(
        title="Quire",
        version=quire.__version__,
        description="Language models over an OpenAI-compatible interface.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    app.state.on_ready = context.on_ready
    app.state.adapter_loader = AdapterLoader(
        context.adapters, provider, settings.lora_root, context.model_names, taken_names
    )
    app.include_router(adapters_router(app.state.adapter_loader))
    for make_router in ROUTERS:
        app.include_router(make_router(context))
    for router in extra_routers:
        app.include_router(router)
    app.include_router(docs_router(app))
    app.include_router(web_router() if settings.ui else start_router())
    install_error_handlers(app)
    app.add_middleware(LoadReport, provider=provider)
    return app


def protect(
    app: FastAPI,
    settings: ServerConfig,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    observer: Observer = NULL_OBSERVER,
) -> None:
    """Keys, limits and ids around all routes; the last one added is the outermost."""
    app.add_middleware(BodyLimits, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, keys=api_keys, protect_health=settings.protect_health, admin_keys=admin_keys)
    app.add_middleware(
        SameSite,
        hosts=None if api_keys else (settings.host, *settings.allowed_hosts),
        origins=settings.allowed_origins,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, REPORT_HEADER],
        )
    app.add_middleware(RequestContext, observer=observer)
