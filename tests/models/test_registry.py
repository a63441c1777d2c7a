from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.base import BuildContext
from quire.models.decoder import DecoderLM
from quire.models.registry import ARCHITECTURES, describe, model_class
from quire.types.errors import ModelError, UnknownArchitectureError
from tests.e2e.test_encoders import ENCODERS
from tests.models.architectures import own_keys
from tests.models.zoo import ARCHITECTURES as TINY
from tests.models.zoo import EXPERT_KEYS, LATENTS, MIXTURES, RECURRENT, SIZES, STATE_KEYS


def config_of(architecture: str, **keys: Any) -> dict[str, Any]:
    distilled = {"dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 4}  # DistilBERT's names of sizes
    return {**SIZES, **distilled, "architectures": [architecture], "head_dim": 16, **keys}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_line_resolves_builds_on_meta_and_is_described_without_building(architecture: str) -> None:
    config = config_of(architecture, sliding_window=8, **EXPERT_KEYS, **STATE_KEYS) | own_keys(architecture)
    with torch.device("meta"):
        model = model_class(config).from_config(config, BuildContext(dtype=torch.bfloat16, max_model_len=64))
    description = describe(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    wide = ("choice_bias", "sinks.weight", ".A_log", ".dt_bias", ".D")  # what is never rounded
    rounded = {parameter.dtype for name, parameter in model.named_parameters() if not name.endswith(wide)}
    assert rounded == {torch.bfloat16}
    assert list(description.layers) == [layer.keeps for layer in model.cached_layers()]
    mixers = model.config.mixers if isinstance(model, DecoderLM) else ("attention",) * 4
    attending = [index for index, mixer in enumerate(mixers) if "attention" in mixer or "latent" in mixer]
    if "latent_pair" in mixers:  # each half of a layer attends
        attending = sorted(attending * 2)
    assert [layer.layer_index for layer in model.attention_layers()] == attending
    assert (description.vocab_size, description.hidden_size, description.num_layers) == (256, 64, 4)


def test_encoders_are_those_that_are_compared_with_transformers() -> None:
    pooling = {name for name in ARCHITECTURES if "generates" not in ARCHITECTURES.get(name).capabilities}
    named = {f"{name}{kind}" for name in (*ENCODERS, "New") for kind in ("Model", "ForMaskedLM")}
    assert pooling == {*named, "HF_ColBERT"}


def test_the_zoo_has_every_architecture() -> None:
    def stem(name: str) -> str:
        return (
            name.lower().removesuffix("forcausallm").removesuffix("model").removesuffix("config").removesuffix("text")
        )

    generating = [name for name in ARCHITECTURES if "generates" in ARCHITECTURES.get(name).capabilities]
    known = (*TINY, *MIXTURES, *LATENTS, *RECURRENT)
    assert {stem(name) for name in generating} == {stem(tiny.config) for tiny in known}


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"unknown architecture 'SnakeForCausalLM'.*LlamaForCausalLM"):
        model_class({"architectures": ["SnakeForCausalLM"]})


def test_a_config_without_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match='no "architectures"'):
        model_class({"hidden_size": 64})


def test_a_missing_key_is_named() -> None:
    config = config_of("LlamaForCausalLM")
    del config["intermediate_size"]
    with pytest.raises(ModelError, match="no 'intermediate_size'"):
        describe(config)


def test_context_length_and_the_callers_choice() -> None:
    scaled = config_of("Qwen2ForCausalLM", rope_scaling={"type": "yarn", "factor": 4.0})
    assert describe(scaled).max_position_embeddings == 256


W = 8


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("LlamaForCausalLM", {}, [None] * 4),
        ("MistralForCausalLM", {}, [W] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("Phi3ForCausalLM", {}, [W] * 4),
        ("Qwen2ForCausalLM", {}, [None] * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, W]),
        ("Gemma2ForCausalLM", {}, [W, None, W, None]),
        ("Gemma3ForCausalLM", {}, [W] * 4),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}, [W, None, W, None]),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, [None, W, W, W]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]}, [None, W, None, W]),
    ],
)
def test_sliding_layers(architecture: str, keys: dict[str, Any], windows: list[int | None]) -> None:
    description = describe(config_of(architecture, **{"sliding_window": W, **keys}))
    assert [layer.window for layer in description.layers] == windows


def test_unknown_layer_types_are_refused() -> None:
    types = ["sliding_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match="'chunked_attention'"):
        describe(config_of("Gemma3ForCausalLM", sliding_window=8, layer_types=types))


def test_an_encoder_gemma3_is_refused() -> None:
    both = describe(config_of("Gemma3ForCausalLM", sliding_window=8, use_bidirectional_attention=True))
    assert both.is_bidirectional
