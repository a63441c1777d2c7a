"""The routes of Ollama's API. What would change the models of this machine is left to the command line."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import quire
from quire.server.body import AnyTypeRoute
from quire.server.context import ServerContext
from quire.server.errors import OllamaErrorBody, json_response
from quire.server.ollama.handler import NDJSON, chat, embed, embed_one, generate
from quire.server.ollama.models import model_list, running_models, show_model
from quire.server.ollama.protocol import (
    ChatRequest,
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Line,
    ModelInfo,
    ModelList,
    RunningModels,
    ShowRequest,
    Version,
)
from quire.server.openapi import answers


def ollama_router(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["Ollama"], route_class=AnyTypeRoute)
    lines = answers(Line, Line, error=OllamaErrorBody, stream_type=NDJSON)

    @router.post("/chat", response_class=Response, responses=lines)
    async def chat_route(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as lines of JSON or in one piece."""
        return await chat(context, body, request)

    @router.post("/generate", response_class=Response, responses=lines)
    async def generate_route(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt, as lines of JSON or in one piece."""
        return await generate(context, body, request)

    @router.post("/embed", response_class=Response, responses=answers(Embeddings, error=OllamaErrorBody))
    async def embed_route(body: EmbedRequest, request: Request) -> Response:
        """The vectors of one text or of several."""
        return json_response(await embed(context, body, request))

    @router.post("/embeddings", response_class=Response, responses=answers(Embedding, error=OllamaErrorBody))
    async def embeddings_route(body: EmbeddingsRequest, request: Request) -> Response:
        """The vector of one text; /api/embed takes several."""
        return json_response(await embed_one(context, body, request))

    @router.get("/tags", response_class=Response, responses=answers(ModelList, error=OllamaErrorBody))
    async def tags() -> Response:
        """The model, once for each of its names."""
        return json_response(model_list(context))

    @router.get("/ps", response_class=Response, responses=answers(RunningModels, error=OllamaErrorBody))
    async def ps() -> Response:
        """The same, once the model is loaded."""
        return json_response(running_models(context))

    @router.post("/show", response_class=Response, responses=answers(ModelInfo, error=OllamaErrorBody))
    async def show(body: ShowRequest) -> Response:
        """What is known of the model."""
        return json_response(show_model(context, body))

    @router.get("/version", response_class=Response, responses=answers(Version, error=OllamaErrorBody))
    async def version() -> Response:
        """Quire's version."""
        return json_response(Version(quire.__version__))

    return router
