"""ColBERT's published layout, and what a folder asks of queries and documents, beside transformers' BERT."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from quire import LLM
from quire.types.errors import ConfigError
from tests.e2e.test_encoders import make_encoder
from tests.e2e.word_tokenizer import text_of, write_tokenizer

QUERY, DOCUMENT, SKIPPED, MASK = 190, 191, [60, 61], 4
METADATA = {"query_token_id": f"w{QUERY}", "doc_token_id": f"w{DOCUMENT}", "dim": 16, "query_maxlen": 12}


def make_colbert(folder: Path, **metadata: Any) -> tuple[torch.nn.Module, Tensor]:
    model = make_encoder(folder, "Bert")
    torch.manual_seed(3)
    projection = torch.randn(16, 64) / 8
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": projection}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    (folder / "artifact.metadata").write_text(json.dumps({**METADATA, **metadata}))
    write_tokenizer(folder, punctuation=dict(zip(SKIPPED, "!?", strict=True)))
    return model, projection


def vectors(model: torch.nn.Module, projection: Tensor, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return normalize(model(torch.tensor([tokens])).last_hidden_state[0] @ projection.T, dim=-1)


@pytest.mark.parametrize("attends", [True, False])
def test_scores(attends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, projection = make_colbert(tmp_path, attend_to_mask_tokens=attends)
    query, documents = [7, 8, 9], [[8, 60, 10, 61], [11, 12]]
    texts = ["w8 ! w10 ?", text_of(documents[1])]
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), max_model_len=150) as llm:
        scores = [output.outputs.score for output in llm.score(text_of(query), texts)]
        (plain,) = llm.encode(text_of(query), pooling_task="token_embed")
    assert ("mask tokens that other tokens do not attend to" in caplog.text) is not attends
    tokens = [0, QUERY, *query, 2]
    of_query = vectors(model, projection, tokens + [MASK] * (12 - len(tokens)) if attends else tokens)
    for words, score in zip(documents, scores, strict=True):
        tokens = [0, DOCUMENT, *words, 2]
        kept = vectors(model, projection, tokens)[[token not in SKIPPED for token in tokens]]
        assert score == pytest.approx(float((of_query @ kept.T).amax(1).sum()), abs=1e-4)
    np.testing.assert_allclose(plain.outputs.data, vectors(model, projection, [0, *query, 2]).numpy(), atol=1e-5)


def test_what_is_not_done_is_named(tmp_path: Path) -> None:
    make_colbert(tmp_path, similarity="l2")
    with pytest.raises(ConfigError, match="similarity 'l2', which Quire does not do; known: 'cosine'"):
        LLM(str(tmp_path), max_model_len=150)
