"""GET /v1/models as Anthropic's clients read it."""

from __future__ import annotations

from datetime import UTC, datetime

from quire.server.anthropic.protocol import ModelInfo, ModelPage
from quire.server.context import ServerContext


def model_info(context: ServerContext, name: str) -> ModelInfo:
    created = datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
    longest = context.max_model_len()
    return ModelInfo(name, name, created, longest, longest)


def model_page(*contexts: ServerContext) -> ModelPage:
    models = [model_info(context, name) for context in contexts for name in context.served_names]
    return ModelPage(models, models[0].id, models[-1].id)
