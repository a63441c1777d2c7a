"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.frontend.tokenizer import LONG_TEXT, Tokenizer
from quire.server.body import JsonRoute
from quire.server.context import ServerContext
from quire.server.conversation.prepare import render_conversation
from quire.server.errors import json_response
from quire.server.generation.field_table import NO_EFFECT_ON_PROMPTS, check_extra_fields
from quire.server.generation.fields import TokenIds
from quire.server.openai.chat.messages import template_conversation
from quire.server.openai.chat.protocol import ConversationFields
from quire.server.openapi import answers
from quire.types.errors import RequestError


class TokenizeText(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"prompt": "Once upon a time"}]})

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own; on.")
    return_token_strs: bool | None = None


class TokenizeChat(ConversationFields):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    tokens: TokenIds
    model: str | None = None


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    prompt: str


def tokenize_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Tokens"], route_class=JsonRoute)

    @router.post("/tokenize", response_class=Response, responses=answers(Tokens))
    async def tokenize(body: TokenizeText | TokenizeChat) -> Response:
        """The token ids of a text, or of the prompt that a conversation becomes."""
        context.check_model(body.model)
        check_extra_fields(body.model_extra or {}, context, "/tokenize", NO_EFFECT_ON_PROMPTS)
        tokenizer = context.tokenizer()
        if isinstance(body, TokenizeText):
            text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        else:
            text = await render_conversation(context, template_conversation(context, body))
            add_special_tokens = bool(body.add_special_tokens)
        field = "prompt" if isinstance(body, TokenizeText) else "messages"
        ids = await context.encode(text, add_special_tokens, field)
        answer = Tokens(len(ids), context.max_model_len(), ids)
        if body.return_token_strs:
            answer.token_strs = [tokenizer.convert_id_to_token(token) or "" for token in ids]
        return json_response(answer)

    @router.post("/detokenize", response_class=Response, responses=answers(Text))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens spelled out."""
        context.check_model(body.model)
        check_extra_fields(body.model_extra or {}, context, "/detokenize", NO_EFFECT_ON_PROMPTS)
        decode = partial(_decode, context.tokenizer(), body.tokens)
        text = await asyncio.to_thread(decode) if len(body.tokens) > LONG_TEXT else decode()
        return json_response(Text(text))

    @router.get("/tokenizer_info", response_class=Response, responses=answers(dict[str, Any]))
    async def tokenizer_info() -> Response:
        """What the tokenizer is: its kind, its size, its special tokens by name, and the chat template."""
        tokenizer, template = context.tokenizer(), context.text.own_template(with_tools=False)
        info = {
            "tokenizer_class": type(tokenizer.backend.model).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.max_model_len(),
            "eos_token_ids": tokenizer.eos_token_ids,
            **tokenizer.special_tokens,
            "chat_template": None if template is None else template.source,
        }
        return json_response(info)

    return router


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    for token_id in set(token_ids):
        if tokenizer.convert_id_to_token(token_id) is None:
            raise RequestError(
                f"tokens[{token_ids.index(token_id)}] is {token_id}, which is no token of this model; its vocabulary"
                f" has {tokenizer.vocab_size}",
                "tokens",
            )
    return tokenizer.decode(token_ids, skip_special_tokens=False)
