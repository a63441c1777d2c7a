"""What a request becomes before a model sees it: the token ids of its prompts, and its parameters."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.errors import addressed
from quire.server.generation.request import Generation
from quire.server.generation.run import request_fields
from quire.types.sampling import SamplingParams


class Rendered(msgspec.Struct):
    """One prompt, in the shape of vLLM's render endpoints."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    """The text, unless the request gave token ids."""
    sampling_params: SamplingParams


async def render(context: ServerContext, generation: Generation) -> list[Rendered]:
    """Each prompt as the engine would get it, with the same checks; nothing is generated."""
    rendered = []
    params, response_id = generation.params, generation.ids.response
    with addressed(request_fields(generation)):
        for prompt in generation.prompts:
            request = await context.provider.engine.prepare(
                prompt, params, add_special_tokens=generation.add_special_tokens
            )
            rendered.append(Rendered(response_id, generation.model, request.prompt_token_ids, request.prompt, params))
    return rendered
