"""What all routes share that have prompts pooled: inputs as a list, the work on all of them, and the usage."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from quire.frontend.async_engine import AsyncEngine
from quire.frontend.input_processor import Prompt
from quire.frontend.scoring import LateText, TextPair
from quire.server.context import ServerContext
from quire.server.errors import addressed
from quire.server.generation.fields import SmallInt, Texts, TokenIdLists, TokenIds
from quire.server.generation.request import origin_of
from quire.server.sse import while_connected
from quire.types.errors import RequestError
from quire.types.outputs import PoolingOutput, PoolingRequestOutput
from quire.types.request import AdapterRef
from quire.types.sampling import PoolingParams

Inputs = str | TokenIds | Texts | TokenIdLists
Output = PoolingRequestOutput[PoolingOutput]


class PoolingFields(BaseModel):
    """What all requests have that are pooled."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    truncate_prompt_tokens: SmallInt | None = Field(
        None, description="Keep only this many tokens of each input; -1 keeps as many as the model takes."
    )
    use_activation: bool | None = Field(
        None, description="Scale vectors to length 1, make probabilities of logits; as the model has it if unset."
    )
    activation: bool | None = Field(None, description="Another name of use_activation.")
    priority: SmallInt | None = None

    @property
    def wants_activation(self) -> bool | None:
        if self.activation is not None and self.use_activation not in (None, self.activation):
            raise RequestError("activation and use_activation contradict each other; give one", "activation")
        return self.use_activation if self.activation is None else self.activation


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> PoolingUsage:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(count, count)


def inputs_of(given: Inputs) -> list[Prompt]:
    """The inputs as a list: a text or a list of integers is one input."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("input is an empty list; give a text or token ids", "input")
    if isinstance(given[0], int):
        return [given]
    return cast("list[Prompt]", given)


async def pool_all(
    context: ServerContext,
    request: Request,
    prompts: Sequence[Prompt | TextPair | LateText],
    params: PoolingParams,
    *,
    model: str,
    priority: int | None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    names: Mapping[str, str | None],
) -> list[Output]:
    """The outputs of all prompts, in their order. As many are with the engine at a time as it runs at once.

    `model`: the served name that the request means, which may be an adapter's. `names`: what the request calls the
    parts that the engine names.
    """
    adapter = context.adapters.get(model)
    work = _pool_all(context, request, prompts, params, adapter, priority or 0, prompt_name, instruction, names)
    return await while_connected(request.receive, work)


async def _pool_all(
    context: ServerContext,
    request: Request,
    prompts: Sequence[Prompt | TextPair | LateText],
    params: PoolingParams,
    adapter: AdapterRef | None,
    priority: int,
    prompt_name: str | None,
    instruction: str | None,
    names: Mapping[str, str | None],
) -> list[Output]:
    engine, origin = context.provider.engine, origin_of(request)
    outputs: list[Output | None] = [None] * len(prompts)
    left = iter(range(len(prompts)))

    async def work(engine: AsyncEngine) -> None:
        for index in left:
            outputs[index] = await engine.encode(
                prompts[index],
                params,
                prompt_name=prompt_name,
                instruction=instruction,
                priority=priority,
                trace_headers=origin.trace_headers,
                arrival_time=origin.arrival_time,
                adapter=adapter,
            )

    num_workers = min(len(prompts), engine.info.max_num_seqs)
    with context.admission.enter(num_workers, engine.info.max_num_seqs, "input"), addressed(names):
        tasks = [asyncio.create_task(work(engine)) for _ in range(num_workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [output for output in outputs if output is not None]


def as_base64(values: NDArray[np.float32]) -> str:
    """Float32 values, little-endian."""
    return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
