"""A cross-encoder with a real tokenizer, from texts to scores, beside transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from quire import LLM
from quire.loader.hub import resolve_model
from tests.e2e.test_classifiers import make_classifier

QUERY = "How hot must water be to boil?"
DOCUMENTS = ["Water boils at 100 degrees.", "The cat sleeps.", "naïve Grüße 東京", "word " * 40]


def test_scores_are_those_of_transformers_alone_and_together(tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, "Bert", "SequenceClassification", num_labels=1, vocab_size=30522)
    for file in resolve_model("minilm").path.glob("*token*"):
        shutil.copy(file, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), max_model_len=100, skip_tokenizer_init=False) as llm:
        together = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        for document, output in zip(DOCUMENTS, together, strict=True):
            given = tokenizer(QUERY, document, return_tensors="pt")
            assert output.prompt_token_ids == given.input_ids[0].tolist()
            with torch.inference_mode():
                expected = float(theirs(**given).logits.sigmoid())
            assert output.outputs.score == pytest.approx(expected, abs=1e-5)
            assert llm.score(QUERY, document, use_tqdm=False)[0].outputs == output.outputs
        (cut,) = llm.score(QUERY, "word " * 400, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 100
        assert cut.prompt_token_ids[-1] == tokenizer.sep_token_id
