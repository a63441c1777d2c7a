"""GET /v1/models: the names under which models are served, in the shape that the client's API has for them."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.anthropic.models import model_info, model_page
from quire.server.context import ServerContext
from quire.server.errors import is_anthropic, json_response
from quire.server.openapi import answers


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    max_model_len: int | None
    owned_by: str = "quire"
    parent: str | None = None  # of an adapter, the model that it is on
    tasks: tuple[str, ...] = ()  # what it is for: generate, embed, ...; empty while there is no engine


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[ModelCard]


def model_card(context: ServerContext, name: str) -> ModelCard:
    parent = None if context.adapters.get(name) is None else context.model_names[0]
    return ModelCard(name, context.created, context.max_model_len(), parent=parent, tasks=context.tasks())


def models_answer(request: Request, *contexts: ServerContext) -> Response:
    """The list of models, for OpenAI's clients or Anthropic's."""
    if is_anthropic(request.scope):
        return json_response(model_page(*contexts))
    return json_response(ModelList([model_card(each, name) for each in contexts for name in each.served_names]))


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", response_class=Response, responses=answers(ModelList))
    async def list_models(request: Request) -> Response:
        """The model, once for each of its names, and its adapters."""
        return models_answer(request, context)

    @router.get("/v1/models/{model_id:path}", response_class=Response, responses=answers(ModelCard))
    async def get_model(model_id: str, request: Request) -> Response:
        """The model of this name."""
        name = context.check_model(model_id)
        found = model_info(context, name) if is_anthropic(request.scope) else model_card(context, name)
        return json_response(found)

    return router
