"""From what the engine pooled to what callers get, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.types.errors import EngineError, RequestError
from quire.types.outputs import EmbeddingOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.types.sampling import PoolingParams, PoolingTask

T = TypeVar("T")


def values_of(output: RequestOutput) -> NDArray[np.float32]:
    """The vector [size] of a prompt, or those of its tokens [num_tokens, size]."""
    if output.pooled is None:
        raise EngineError(f"request {output.request_id!r} ended without a vector")
    return np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)


def as_embedding(output: RequestOutput) -> PoolingRequestOutput[EmbeddingOutput]:
    return _shaped(output, lambda values: EmbeddingOutput(values.tolist()))


def as_pooling(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    return _shaped(output, PoolingOutput)


def _shaped(output: RequestOutput, shape: Callable[[NDArray[np.float32]], T]) -> PoolingRequestOutput[T]:
    cached = output.num_cached_tokens or 0
    return PoolingRequestOutput(output.request_id, shape(values_of(output)), output.prompt_token_ids, cached)


def for_embedding(params: PoolingParams | None) -> PoolingParams:
    """The parameters of a call that gives one vector for each prompt."""
    if params is None:
        return PoolingParams()
    if isinstance(params, PoolingParams) and params.task != "embed":
        raise RequestError(f"task is {params.task!r} but embed() gives one vector a prompt; use encode()", "task")
    return params


def with_task(params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
    """Parameters for a task that is given beside them; it must not contradict theirs."""
    if params is None:
        return PoolingParams(task=task or "embed")
    if task is not None and isinstance(params, PoolingParams) and params.task != task:
        raise RequestError(f"pooling_task is {task!r} but pooling_params.task is {params.task!r}; give one", "task")
    return params
