"""The fields that say how a conversation becomes a prompt, which every endpoint that takes conversations has."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from quire.config.groups import ServerConfig
from quire.server.conversation.request import TemplateOptions
from quire.types.errors import RequestError


class TemplateFields(BaseModel):
    chat_template: str | None = Field(None, description="Refused unless --allow-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: list[dict[str, Any]] | None = None


def template_options(settings: ServerConfig, body: TemplateFields) -> TemplateOptions:
    """Refuses a template where requests may not bring one."""
    if body.chat_template is not None and not settings.allow_request_chat_template:
        raise RequestError(
            "chat_template in a request is not allowed here; the server can allow it (--allow-request-chat-template)",
            "chat_template",
        )
    return TemplateOptions(
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs or {},
        documents=body.documents,
    )
