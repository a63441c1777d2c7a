"""LoRA adapters of a model that embeds: the vectors of merged weights, the same bits alone and in a mixed batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel

from quire import LLM, LoRARequest
from tests.e2e.tiny import SIZES
from tests.e2e.tiny_tokenizer import write_tokenizer

PROMPTS = [{"prompt_token_ids": [5, 9, 33, 7, 21, 4, 60] * count} for count in (5, 1, 11)]
SETTINGS: dict[str, Any] = {"runner": "pooling", "dtype": "float32", "lora_dtype": "float32"}
ADAPTED = {"llama": ["q_proj", "o_proj", "down_proj"], "bert": ["query", "value", "attention.output.dense"]}


def make_folders(folder: Path, kind: str) -> list[LoRARequest]:
    """A base model, and two adapters with the merged model beside each."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "type_vocab_size": 2}
    AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder / "base")
    write_tokenizer(folder / "base")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED[kind], init_lora_weights=False)
        adapted = get_peft_model(AutoModel.from_pretrained(folder / "base"), config)
        adapted.save_pretrained(folder / name)
        adapted.merge_and_unload().save_pretrained(folder / name / "merged")
    return [LoRARequest(name, lora_path=str(folder / name)) for name in ("first", "second")]


def vectors(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[float]]:
    """Of each prompt with each adapter, all in one call."""
    prompts = [prompt for prompt in PROMPTS for _ in adapters]
    asked = [adapter for _ in PROMPTS for adapter in adapters]
    return [one.outputs.embedding for one in llm.embed(prompts, lora_request=asked, use_tqdm=False)]


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_vectors_with_adapters(tmp_path: Path, kind: str) -> None:
    first, second = make_folders(tmp_path, kind)
    choices = [None, first, second]
    with LLM(str(tmp_path / "base"), enable_lora=True, **SETTINGS) as llm:
        together = vectors(llm, choices)
        alone = [vectors(llm, [choice]) for choice in choices]
    assert together == [alone[choice][prompt] for prompt in range(len(PROMPTS)) for choice in range(3)]
    for index, choice in enumerate(choices):
        folder = tmp_path / "base" if choice is None else Path(choice.lora_path) / "merged"
        with LLM(str(folder), tokenizer=str(tmp_path / "base"), **SETTINGS) as merged:
            expected = vectors(merged, [None])
        if choice is None:
            assert alone[0] == expected, "rows without an adapter have the bits of an engine without"
        else:
            np.testing.assert_allclose(alone[index], expected, atol=1e-4)
            assert not np.allclose(alone[index], alone[0], atol=1e-2)
