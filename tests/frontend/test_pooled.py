"""LLM.embed and encode, and the same of AsyncEngine, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.frontend import input_processor
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.llm import LLM
from quire.frontend.pooled import filled
from quire.types.errors import BatchError, RequestError
from quire.types.outputs import EngineOutputs
from quire.types.sampling import PoolingParams
from tests.frontend.fake_client import MAX_MODEL_LEN, ClassifyingClient, FakeClient, PoolingClient, text_model


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


def test_vectors_are_cut_to_sizes_that_the_model_was_trained_for() -> None:
    trained = llm(dimensions=(2,))
    assert len(trained.embed("Hi", pooling_params=PoolingParams(dimensions=2))[0].outputs.embedding) == 2
    trained.embed("Hi", pooling_params=PoolingParams(dimensions=3))
    with pytest.raises(RequestError, match=r"dimensions is 1, which the .* does not have; it gives 2, 3"):
        trained.embed("Hi", pooling_params=PoolingParams(dimensions=1))
    with pytest.raises(RequestError, match="it gives 3"):
        llm(dimensions=()).embed("Hi", pooling_params=PoolingParams(dimensions=2))


def test_equal_parameters_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of calls one after the other, each of which makes its own."""
    calls: list[PoolingParams] = []

    def count(params: PoolingParams, *others: Any) -> PoolingParams:
        calls.append(params)
        return filled(params, *others)

    monkeypatch.setattr(input_processor, "filled", count)
    model = llm()
    for size in (None, None, 2, 2, None):
        model.embed(["a", "b"], pooling_params=None if size is None else PoolingParams(dimensions=size))
    assert [params.dimensions for params in calls] == [None, 2, None]


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


def test_steps_begin_before_all_prompts_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    client = PoolingClient()
    client.info = msgspec.structs.replace(client.info, max_num_batched_tokens=10)
    waiting: list[int] = []
    step = client.get_outputs

    def get_outputs() -> EngineOutputs:
        waiting.append(sum(len(request.token_ids) for request in client.added) - sum(waiting))
        return step()

    monkeypatch.setattr(client, "get_outputs", get_outputs)
    lengths = [1 + index % 7 for index in range(100)]
    outputs = llm(client).embed([{"prompt_token_ids": [3] * length} for length in lengths])
    assert [output.outputs.embedding[0] for output in outputs] == lengths
    assert len(waiting) > 5
    assert all(40 <= count < 47 for count in waiting[:-1]), "tokens of four steps"


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


def test_classify_gives_probabilities() -> None:
    first, second = llm(ClassifyingClient("no", "yes")).classify(["xx", "ab"])
    assert (first.outputs.probs, first.outputs.num_classes) == ([0.0, 1.0], 2)
    assert second.outputs.probs == [1.0, 0.0]


def test_score_compares_one_text_with_all_or_each_with_its_own() -> None:
    scores = llm(ClassifyingClient("fits")).score("ab", ["xx", "cd"])
    assert [output.outputs.score for output in scores] == [0.5, 0.0]
    scores = llm(ClassifyingClient("fits")).score(["xx", "ab"], ["xx", "cd"])
    assert [output.outputs.score for output in scores] == [1.0, 0.0]
    with pytest.raises(RequestError, match="2 queries for 1 documents"):
        llm(ClassifyingClient("fits")).score(["a", "b"], "c")
    with pytest.raises(RequestError, match="makes classes and no scores"):
        llm(ClassifyingClient("a", "b")).score("a", "b")


def test_max_sim_of_a_batch_is_that_of_each_pair() -> None:
    late = llm(kind="all", tasks=("token_embed",), score="late")
    together = [output.outputs.score for output in late.score("ab", ["ab", "b", "xyz"])]
    assert together == [late.score("ab", text)[0].outputs.score for text in ("ab", "b", "xyz")]


def test_rewards_have_no_activation_unless_it_is_asked_for() -> None:
    client = ClassifyingClient("reward")
    (output,) = llm(client).reward("xa")
    assert output.outputs.data.tolist() == [0.5]
    llm(client).reward("x", pooling_params=PoolingParams(use_activation=True))
    assert [request.params.activation for request in client.added] == ["none", "sigmoid"]
    with pytest.raises(RequestError, match="makes embeddings and no classes"):
        llm().reward("a")


def test_a_template_puts_a_pair_into_one_text_and_cuts_the_document_alone() -> None:
    client = ClassifyingClient("fits", score_template="<{query}|{document}>")
    text = "{query} is no place"
    llm(client).score("a", text)
    llm(client).score("a", "x" * 9999, truncate_prompt_tokens=-1)
    assert bytes(client.added[0].token_ids) == b"<a|{query} is no place>"
    assert bytes(client.added[1].token_ids) == b"<a|" + b"x" * (MAX_MODEL_LEN - 4) + b">"


async def test_async_classes_scores_and_rewards() -> None:
    engine = AsyncEngine(ClassifyingClient("fits"), text_model())
    assert (await engine.classify("x")).outputs.probs == [1.0]
    assert [output.outputs.score for output in await engine.score("ab", ["xx", "cd"])] == [0.5, 0.0]
    assert (await engine.reward("xa")).outputs.data.tolist() == [0.5]
    with pytest.raises(RequestError, match="a text of a pair is empty"):
        await engine.score("ab", ["xx", ""])
    assert engine.num_requests == 0
    engine.shutdown()


async def test_async_engine() -> None:
    engine = AsyncEngine(PoolingClient(), text_model())
    assert (await engine.embed("Hi")).outputs.embedding == [2.0, 72.0, 105.0]
    assert (await engine.encode([7, 8], PoolingParams(task="token_embed"))).outputs.data.shape == (2, 3)
    assert engine.num_requests == 0
    engine.shutdown()
