"""What a request becomes before a model sees it: the token ids of its prompts, and its parameters."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.openai.generation import Generation, raise_named
from quire.types.errors import RequestError
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
    """Each prompt of a request as the engine would get it. Nothing is generated; what would be refused is."""
    rendered = []
    for prompt in generation.prompts:
        try:
            request = await context.provider.engine.prepare(
                prompt, generation.params, add_special_tokens=generation.add_special_tokens
            )
        except RequestError as error:
            raise_named(error, generation)
        rendered.append(
            Rendered(
                generation.response_id, generation.model, request.prompt_token_ids, request.prompt, generation.params
            )
        )
    return rendered
