"""LLM.embed and encode, and the same of AsyncEngine, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.frontend.async_engine import AsyncEngine
from quire.frontend.llm import LLM
from quire.types.errors import BatchError, RequestError
from quire.types.sampling import PoolingParams
from tests.frontend.fake_client import MAX_MODEL_LEN, FakeClient, PoolingClient, text_model


def llm(client: FakeClient | None = None, **pooler: Any) -> LLM:
    return LLM.from_client(client or PoolingClient(**pooler), text_model())


def test_embed_gives_lists_in_the_order_of_the_prompts() -> None:
    first, second = llm().embed(["Hi", {"prompt_token_ids": [7, 8, 9]}])
    assert (first.outputs.embedding, first.prompt_token_ids) == ([2.0, 72.0, 105.0], [72, 105])
    assert (second.outputs.embedding, second.outputs.hidden_size) == ([3.0, 7.0, 9.0], 3)
    assert (second.finished, second.num_cached_tokens) == (True, 0)


def test_encode_gives_arrays_of_a_prompt_or_of_its_tokens() -> None:
    (vector,) = llm().encode("Hi", PoolingParams(dimensions=2))
    assert vector.outputs.data.tolist() == [2.0, 72.0]
    (matrix,) = llm().encode("Hi", pooling_task="token_embed")
    assert (matrix.outputs.data.shape, matrix.outputs.data.dtype) == ((2, 3), np.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_engine_is_told_how_the_model_pools(normalize: bool) -> None:
    client = PoolingClient(normalize=normalize)
    llm(client).embed(["a", "b"], pooling_params=[PoolingParams(), PoolingParams(use_activation=not normalize)])
    sent = [request.params for request in client.added]
    assert sent == [
        PoolingParams(task="embed", pooling="mean", use_activation=normalize),
        PoolingParams(task="embed", pooling="mean", use_activation=not normalize),
    ]


def test_truncation_keeps_the_beginning() -> None:
    (output,) = llm().embed("abcdef", pooling_params=PoolingParams(truncate_prompt_tokens=2))
    assert bytes(output.prompt_token_ids) == b"ab"


def test_a_bad_prompt_fails_alone() -> None:
    with pytest.raises(BatchError) as caught:
        llm().embed(["a", "x" * (MAX_MODEL_LEN + 1), "c"])
    assert list(caught.value.errors) == [1]


def test_what_is_not_for_this_call_is_refused() -> None:
    with pytest.raises(RequestError, match="use encode"):
        llm().embed("a", pooling_params=PoolingParams(task="token_embed"))
    with pytest.raises(RequestError, match="give one"):
        llm().encode("a", PoolingParams(task="embed"), pooling_task="token_embed")
    with pytest.raises(RequestError, match="makes embeddings and no text"):
        llm().generate("a")
    with pytest.raises(RequestError, match="generates text and no embeddings"):
        llm(FakeClient("x")).embed("a")
    with pytest.raises(RequestError, match="task is 'score' but must be one of embed, token_embed, classify"):
        PoolingParams(task="score")  # type: ignore[arg-type]


async def test_async_engine() -> None:
    engine = AsyncEngine(PoolingClient(), text_model())
    assert (await engine.embed("Hi")).outputs.embedding == [2.0, 72.0, 105.0]
    assert (await engine.encode([7, 8], PoolingParams(task="token_embed"))).outputs.data.shape == (2, 3)
    assert engine.num_requests == 0
    engine.shutdown()
