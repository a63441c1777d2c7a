"""Translates calls of a pooling model into engine requests, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.frontend.tokenizer import Tokenizer
from quire.types.errors import EngineError, RequestError, WrongTaskError
from quire.types.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire.types.pooling import PoolerConfig, able_tasks
from quire.types.sampling import Activation, PoolingKind, PoolingParams, PoolingTask, SamplingParams

if TYPE_CHECKING:
    from quire.frontend.input_processor import Prompt

T = TypeVar("T")
_OF_TOKENS = ("token_embed", "token_classify")


def values_of(output: RequestOutput) -> NDArray[np.float32]:
    """The vector [size] of a prompt, or those of its tokens [num_tokens, size]."""
    if output.pooled is None:
        raise EngineError(f"request {output.request_id!r} ended without a vector")
    return np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)


def as_embedding(output: RequestOutput) -> PoolingRequestOutput[EmbeddingOutput]:
    return _shaped(output, lambda values: EmbeddingOutput(values.tolist()))


def as_classification(output: RequestOutput) -> PoolingRequestOutput[ClassificationOutput]:
    return _shaped(output, lambda values: ClassificationOutput(values.tolist()))


def as_pooling(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    return _shaped(output, PoolingOutput)


def with_outputs(output: PoolingRequestOutput[PoolingOutput], outputs: T) -> PoolingRequestOutput[T]:
    """The same result in another shape."""
    return PoolingRequestOutput(output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens)


def _shaped(output: RequestOutput, shape: Callable[[NDArray[np.float32]], T]) -> PoolingRequestOutput[T]:
    cached = output.num_cached_tokens or 0
    return PoolingRequestOutput(output.request_id, shape(values_of(output)), output.prompt_token_ids, cached)


def for_task(params: PoolingParams | None, task: PoolingTask, call: str) -> PoolingParams:
    """The parameters of a call that is for one task."""
    if params is None:
        return PoolingParams(task=task)
    if isinstance(params, PoolingParams) and params.task != task:
        if params.task is not None:
            raise RequestError(f"task is {params.task!r} but {call}() is for {task!r}; use encode()", "task")
        return msgspec.structs.replace(params, task=task)
    return params


def for_reward(params: PoolingParams, pooler: PoolerConfig | None) -> PoolingParams:
    """The parameters of a call for rewards, which are what a classifier says of a prompt or of its tokens."""
    able = able_tasks(pooler)
    task = next((task for task in ("classify", "token_classify") if task in able), None)
    if task is None:
        raise WrongTaskError("classify", able)
    return for_task(params, cast("PoolingTask", task), "reward")


def scored(
    first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput], score: float
) -> PoolingRequestOutput[ScoringOutput]:
    """The score of a pair, with the tokens of both texts."""
    tokens = (
        first.prompt_token_ids
        if first is second or first.request_id == second.request_id
        else [
            *first.prompt_token_ids,
            *second.prompt_token_ids,
        ]
    )
    return PoolingRequestOutput(first.request_id, ScoringOutput(score), tokens, first.num_cached_tokens)


def with_task(params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
    """Parameters for a task that is given beside them; it must not contradict theirs."""
    if params is None:
        return PoolingParams(task=task)
    if task is None or not isinstance(params, PoolingParams) or params.task == task:
        return params
    if params.task is not None:
        raise RequestError(f"pooling_task is {task!r} but pooling_params.task is {params.task!r}; give one", "task")
    return msgspec.structs.replace(params, task=task)


def filled(params: PoolingParams, pooler: PoolerConfig, tokenizer: Tokenizer | None) -> PoolingParams:
    """The parameters as the engine gets them: with all that the model says of their task."""
    task = params.task or pooler.tasks[0]
    if task not in pooler.tasks:
        raise WrongTaskError(task, able_tasks(pooler))
    embeds = task in ("embed", "token_embed")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, embeds, pooler)
    pooling: PoolingKind = pooler.kind
    if task == "sparse" and pooling != "max":
        pooling = "all"
    if task in _OF_TOKENS:
        pooling = "all" if params.step_tag_id is None else "step"
    elif params.step_tag_id is not None:
        raise RequestError(
            f"step_tag_id is {params.step_tag_id} but the task is {task!r}, which has one result for the whole"
            f" prompt; use one of {', '.join(_OF_TOKENS)}",
            "step_tag_id",
        )
    activation: Activation | None = None
    use_activation = params.use_activation
    if embeds:
        use_activation = pooler.normalize if use_activation is None else use_activation
    else:
        activation = _activation(task, pooler, use_activation)
        use_activation = None
    head = "classify" if task in ("classify", "token_classify") else task
    return msgspec.structs.replace(
        params,
        task=task,
        pooling=pooling,
        head=head if head in pooler.heads else None,
        activation=activation,
        use_activation=use_activation,
        label_token_ids=_label_ids(pooler, tokenizer) if task == "classify" else (),
        skip_token_ids=_skipped(pooler, tokenizer) if task == "token_embed" else (),
        truncate_prompt_tokens=None,
    )


def _check_dimensions(size: int, embeds: bool, pooler: PoolerConfig) -> None:
    if not embeds:
        raise RequestError(f"dimensions is {size} but only embeddings are cut; leave it out", "dimensions")
    if size > pooler.size:
        raise RequestError(
            f"dimensions is {size} but vectors of this model have {pooler.size}; give at most that", "dimensions"
        )
    if pooler.dimensions is not None and size not in (*pooler.dimensions, pooler.size):
        known = ", ".join(map(str, sorted({*pooler.dimensions, pooler.size})))
        raise RequestError(
            f"dimensions is {size}, which the model's config does not have; it gives {known}", "dimensions"
        )


def _activation(task: PoolingTask, pooler: PoolerConfig, use_activation: bool | None) -> Activation:
    if task == "sparse":
        return "none" if use_activation is False else "log1p_relu" if pooler.kind == "max" else "relu"
    if use_activation is None:
        return pooler.activation
    if not use_activation:
        return "none"
    if pooler.activation != "none":
        return pooler.activation
    return "sigmoid" if len(pooler.labels) == 1 else "softmax"


def _skipped(pooler: PoolerConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    return tuple(tokenizer.ends[0]) if pooler.skips_first and tokenizer is not None else ()


def _label_ids(pooler: PoolerConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids of the tokens that are the classes."""
    if not pooler.label_tokens:
        return ()
    if tokenizer is None:
        raise RequestError(
            "classes of this model are tokens, which needs a tokenizer; leave --skip-tokenizer-init out"
        )
    ids = [tokenizer.backend.token_to_id(token) for token in pooler.label_tokens]
    missing = [token for token, found in zip(pooler.label_tokens, ids, strict=True) if found is None]
    if missing:
        raise RequestError(
            f"the tokenizer has no token {missing[0]!r}, which is a class of this model; name others in"
            " classifier_from_token of its config.json"
        )
    return tuple(found for found in ids if found is not None)


def prefix_of(pooler: PoolerConfig, name: str | None, instruction: str | None) -> str:
    """What goes before a text."""
    if instruction is not None:
        if name is not None:
            raise RequestError("instruction and prompt_name both say what goes before texts; give one", "instruction")
        return instruction
    name = pooler.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in pooler.prompts:
        known = ", ".join(pooler.prompts) or "none"
        raise RequestError(f"prompt_name is {name!r}, which this model does not have; it has {known}", "prompt_name")
    return pooler.prompts[name]


def with_prefix(prompt: Prompt, prefix: str) -> Prompt:
    """A text with this before it; other prompts as they are."""
    if isinstance(prompt, str):
        return prefix + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": prefix + prompt["prompt"]}
    return prompt


def as_shown(params: PoolingParams) -> SamplingParams:
    """What pools is, towards the caller, a request whose only output is its last."""
    return SamplingParams(
        detokenize=False,
        output_kind="final_only",
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side="right",
    )
