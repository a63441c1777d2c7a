"""ColBERT's published layout, and what a folder asks of queries and documents, beside transformers' BERT."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from quire import LLM
from quire.types.errors import ConfigError, RequestError
from quire.types.sampling import PoolingParams
from tests.e2e.serving import start
from tests.e2e.test_encoders import make_encoder
from tests.e2e.tiny import make_model
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


def make_pylate(folder: Path, name: str = "Bert", **settings: Any) -> tuple[torch.nn.Module, Tensor]:
    model = make_encoder(folder, name)
    as_pylate(folder, settings)
    return model, load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]


def as_pylate(folder: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    (folder / "1_Dense").mkdir()
    sizes = {"in_features": 64, "out_features": 16, "bias": False}
    described = {**sizes, "activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(described))
    save_file({"linear.weight": torch.randn(16, 64) / 8}, folder / "1_Dense" / "model.safetensors")
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": at} for at, kind in kinds.items()]))
    prefixes = {"query_prefix": f"w{QUERY} ", "document_prefix": f"w{DOCUMENT} "}
    fields = {**prefixes, "query_length": 12, "skiplist_words": ["!", "?"], **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(fields))
    write_tokenizer(folder, punctuation=dict(zip(SKIPPED, "!?", strict=True)))


def vectors(model: torch.nn.Module, projection: Tensor, tokens: list[int], attended: int | None = None) -> Tensor:
    mask = torch.tensor([[at < (attended or len(tokens)) for at in range(len(tokens))]]).long()
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]
    return normalize(hidden @ projection.T, dim=-1)


QUERY_WORDS, DOCUMENTS, TEXTS = [7, 8, 9], [[8, 60, 10, 61], [11, 12]], ["w8 ! w10 ?", "w11 w12"]


def expected_scores(
    model: torch.nn.Module, projection: Tensor, *, attends: bool, expands: bool = True, words: list[int] = QUERY_WORDS
) -> list[float]:
    """MaxSim over all vectors of the query, those of mask tokens too, whether these are attended to or not."""
    own = [0, QUERY, *words, 2]
    masks = [MASK] * (12 - len(own)) if expands else []
    of_query = vectors(model, projection, own + masks, None if attends else len(own))
    found = []
    for document in DOCUMENTS:
        tokens = [0, DOCUMENT, *document, 2]
        kept = vectors(model, projection, tokens)[[token not in SKIPPED for token in tokens]]
        found.append(float((of_query @ kept.T).amax(1).sum()))
    return found


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("kind", ["colbert", "pylate", "pylate ModernBert"])
def test_scores(kind: str, attends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also beside a query that needs no mask token, in one batch."""
    if kind == "colbert":
        model, projection = make_colbert(tmp_path, attend_to_mask_tokens=attends)
    else:
        name = kind.partition(" ")[2] or "Bert"
        model, projection = make_pylate(tmp_path, name, attend_to_expansion_tokens=attends)
    long = list(range(20, 30))
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), max_model_len=150) as llm:
        scores = [output.outputs.score for output in llm.score(text_of(QUERY_WORDS), TEXTS)]
        both = llm.score([text_of(QUERY_WORDS), text_of(long)], TEXTS)
        (plain,) = llm.encode(text_of(QUERY_WORDS), pooling_task="token_embed")
    assert not [record for record in caplog.records if record.name.startswith("quire")]
    assert scores == pytest.approx(expected_scores(model, projection, attends=attends), abs=1e-4)
    assert both[0].outputs.score == scores[0]
    alone = expected_scores(model, projection, attends=True, words=long)
    assert both[1].outputs.score == pytest.approx(alone[1], abs=1e-4)
    np.testing.assert_allclose(
        plain.outputs.data, vectors(model, projection, [0, *QUERY_WORDS, 2]).numpy(), atol=1e-5
    )
    others = expected_scores(model, projection, attends=not attends)
    assert scores != pytest.approx(others, abs=1e-2), "or the test says nothing"


def test_vectors_of_mask_tokens(tmp_path: Path) -> None:
    model, projection = make_colbert(tmp_path)
    tokens = [0, QUERY, *QUERY_WORDS, 2] + [MASK] * 6
    params = PoolingParams(task="token_embed", attended_tokens=6)
    with LLM(str(tmp_path), max_model_len=150) as llm:
        (found,) = llm.encode([{"prompt_token_ids": tokens}], pooling_params=params)
    np.testing.assert_allclose(found.outputs.data, vectors(model, projection, tokens, 6).numpy(), atol=1e-5)
    with pytest.raises(RequestError, match="attended_tokens is 0 but must be a positive integer"):
        PoolingParams(attended_tokens=0)


def test_folders_that_expand_no_queries(tmp_path: Path) -> None:
    model, projection = make_pylate(tmp_path, do_query_expansion=False)
    with LLM(str(tmp_path), max_model_len=150) as llm:
        scores = [output.outputs.score for output in llm.score(text_of(QUERY_WORDS), TEXTS)]
    assert scores == pytest.approx(expected_scores(model, projection, attends=True, expands=False), abs=1e-4)


def test_queries_of_decoders_are_not_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path, "llama", num_hidden_layers=1, hidden_size=64)
    as_pylate(tmp_path, {})
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), max_model_len=150) as llm:
        assert len(llm.score(text_of(QUERY_WORDS), TEXTS)) == 2
    assert "fills queries up to 12 tokens with tokens that no token attends to" in caplog.text


def test_scores_and_ranks_over_http(tmp_path: Path) -> None:
    model, projection = make_colbert(tmp_path)
    expected = expected_scores(model, projection, attends=False)
    server = start(str(tmp_path), "--served-model-name", "colbert", "--max-model-len", "150")
    try:
        with closing(httpx.Client(base_url=server.url, timeout=60)) as client:
            body = {"model": "colbert", "text_1": text_of(QUERY_WORDS), "text_2": TEXTS}
            scored = client.post("/score", json=body).raise_for_status().json()["data"]
            body = {"model": "colbert", "query": text_of(QUERY_WORDS), "documents": TEXTS}
            ranked = client.post("/rerank", json=body).raise_for_status().json()["results"]
    finally:
        assert server.stop() == 0
    assert [each["score"] for each in scored] == pytest.approx(expected, abs=1e-4)
    assert [each["index"] for each in ranked] == sorted((0, 1), key=lambda index: -expected[index])
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(expected)), abs=1e-4
    )


def test_what_is_not_done_is_named(tmp_path: Path) -> None:
    make_colbert(tmp_path, similarity="l2")
    with pytest.raises(ConfigError, match="similarity 'l2', which Quire does not do; known: 'cosine'"):
        LLM(str(tmp_path), max_model_len=150)
