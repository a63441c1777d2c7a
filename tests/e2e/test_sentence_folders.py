"""Folders of sentence-transformers from text to vector, in the layout of Qwen3-Embedding, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import normalize

from quire import LLM
from quire.types.sampling import PoolingParams
from tests.e2e.tiny import make_model
from tests.e2e.word_tokenizer import text_of, write_tokenizer

END = 2
QUERY = [50, 51, 52]
TEXTS = [[7, 8, 9], [100], list(range(20, 120)), [9, 8, 7, 6, 5]]


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pooled by the last token, which is one that the tokenizer puts behind every text."""
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    write_tokenizer(folder, begins=False)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    write(folder, "modules.json", modules)
    write(folder, "1_Pooling/config.json", {"pooling_mode_lasttoken": True, "include_prompt": True})
    write(
        folder,
        "config_sentence_transformers.json",
        {"prompts": {"query": text_of(QUERY) + " ", "document": ""}, "default_prompt_name": None},
    )
    return folder


@pytest.mark.parametrize("how", [{}, {"prompt_name": "query"}, {"instruction": text_of(QUERY) + " "}])
def test_last_token_with_prompts(folder: Path, how: dict[str, str]) -> None:
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with LLM(str(folder), max_model_len=256) as llm:
        outputs = llm.embed([text_of(words) for words in TEXTS], **how)
        short = llm.embed(text_of(TEXTS[0]), pooling_params=PoolingParams(dimensions=16), **how)[0]
    for words, output in zip(TEXTS, outputs, strict=True):
        tokens = [*(QUERY if how else []), *words, END]
        assert output.prompt_token_ids == tokens
        with torch.inference_mode():
            hidden = theirs(torch.tensor([tokens])).last_hidden_state[0, -1]
        np.testing.assert_allclose(output.outputs.embedding, normalize(hidden, dim=0).numpy(), atol=1e-5)
    first = np.array(outputs[0].outputs.embedding)[:16]
    np.testing.assert_allclose(short.outputs.embedding, first / np.linalg.norm(first), atol=1e-5)
