"""BGE-M3's three results of one text, by the formulas of FlagEmbedding."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, normalize

from quire import LLM
from quire.frontend.sparse import by_token
from quire.types.errors import RequestError, WrongTaskError
from tests.e2e.test_encoders import make_encoder
from tests.e2e.word_tokenizer import text_of, write_tokenizer

WORDS = [7, 9, 7, 60, 61, 62, 9, 9, 8]
MODULES = {"Transformer": "", "Pooling": "Pooling", "Normalize": ""}


def make_m3(folder: Path) -> torch.nn.Module:
    model = make_encoder(folder, "XLMRoberta", pad_token_id=1)
    write_tokenizer(folder)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return model


def test_dense_sparse_and_multi_vector(tmp_path: Path) -> None:
    theirs = make_m3(tmp_path)
    torch.manual_seed(2)
    heads = {
        name: {"weight": torch.randn(size, 64) / 8, "bias": torch.randn(size) / 8}
        for name, size in (("sparse_linear", 1), ("colbert_linear", 64))
    }
    tokens = [0, *WORDS, 2]
    with torch.inference_mode():
        hidden = theirs(torch.tensor([tokens])).last_hidden_state[0]
    # Some words and one of the special tokens have a weight.
    heads["sparse_linear"]["bias"] = -linear(hidden[1:-1], heads["sparse_linear"]["weight"]).median()[None]
    for name, tensors in heads.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    weights = linear(hidden, **heads["sparse_linear"]).relu()[:, 0].tolist()
    with LLM(str(tmp_path), max_model_len=150) as llm:
        dense, vectors, sparse = (
            llm.encode(text_of(WORDS), pooling_task=task)[0] for task in ("embed", "token_embed", "sparse")
        )
        with pytest.raises(RequestError, match="tokens are such that have no vector"):
            llm.encode({"prompt_token_ids": [0]}, pooling_task="token_embed")
        left_out = llm.get_tokenizer().unweighted
    assert dense.prompt_token_ids == tokens
    np.testing.assert_allclose(dense.outputs.data, normalize(hidden[0], dim=0).numpy(), atol=1e-5)
    expected = normalize(linear(hidden[1:], **heads["colbert_linear"]), dim=-1)
    np.testing.assert_allclose(vectors.outputs.data, expected.numpy(), atol=1e-5)
    best: dict[str, float] = {}
    for token, weight in zip(WORDS, weights[1:-1], strict=True):
        if weight > 0:
            best[str(token)] = max(weight, best.get(str(token), 0.0))
    assert 0 < len(best) < len(set(WORDS)), "some words have a weight and some have none"
    assert weights[0] > 0 or weights[-1] > 0, "or nothing shows that special tokens are left out"
    assert by_token(sparse.outputs.data, tokens, left_out) == pytest.approx(best, abs=1e-5)


def test_pickled_heads_are_named_and_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_m3(tmp_path)
    (tmp_path / "sparse_linear.pt").write_bytes(b"a pickle")
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), max_model_len=150) as llm:
        assert "sparse_linear.pt is a pickle, which could run code: it is not read" in caplog.text
        with pytest.raises(WrongTaskError):
            llm.encode("w7", pooling_task="sparse")
