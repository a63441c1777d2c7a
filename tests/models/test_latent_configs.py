"""Configs of latent attention that are damaged or of another model than is supported are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.registry import model_class
from quire.types.errors import ModelError
from tests.models.zoo import LATENTS, SIZES


def decoder_config(name: str, **changes: Any) -> DecoderConfig:
    tiny = next(tiny for tiny in LATENTS if tiny.name == name)
    kind = getattr(transformers, tiny.config)
    config = {**kind(**{**SIZES, **tiny.keys}).to_dict(), **changes}
    config["architectures"] = [tiny.config.removesuffix("Config") + "ForCausalLM"]
    found = model_class(config)
    assert issubclass(found, DecoderLM)
    return found.decoder_config(config)


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa"])
def test_an_index_narrower_than_its_rotation_is_refused(name: str) -> None:
    """Kernels rotate as many features of an index key as of a query: behind its end was other memory."""
    assert decoder_config(name, index_head_dim=12).latent is not None
    with pytest.raises(ModelError, match="index_head_dim is 11, but 12 features are rotated; correct it"):
        decoder_config(name, index_head_dim=11)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v2", "scoring_func", "sigmoid"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v32", "scoring_func", "softmax"),
        ("deepseek-v32", "rope_interleave", False),
        ("glm4-moe-lite", "scoring_func", "softmax"),
        ("longcat-flash", "zero_expert_type", "copy"),
        ("longcat-flash", "mla_scale_q_lora", False),
        ("longcat-flash", "mla_scale_kv_lora", False),
    ],
)
def test_what_would_compute_other_numbers_is_refused(name: str, key: str, value: object) -> None:
    decoder_config(name)
    with pytest.raises(ModelError, match=f"{key} is {value!r} in the model config; supported: "):
        decoder_config(name, **{key: value})


def test_experts_in_every_second_layer() -> None:
    """As in DeepSeek's own code: of the layers behind the dense ones those that the frequency divides."""
    kinds = {"dense": "gated", "sparse": "experts"}
    found = decoder_config("deepseek-v3", moe_layer_freq=2, mlp_layer_types=None, first_k_dense_replace=1)
    assert found.mlps == tuple(kinds[kind] for kind in ("dense", "dense", "sparse", "dense"))
    found = decoder_config("deepseek-v2", moe_layer_freq=3, mlp_layer_types=None, first_k_dense_replace=0)
    assert found.mlps == tuple(kinds[kind] for kind in ("sparse", "dense", "dense", "sparse"))


def test_types_of_layers_that_are_too_few_are_refused() -> None:
    with pytest.raises(ModelError, match="mlp_layer_types must name one of dense, sparse for each of"):
        decoder_config("deepseek-v3", mlp_layer_types=["dense"])


@pytest.mark.parametrize(("name", "usual"), [("deepseek-v32", False), ("glm-moe-dsa", True)])
@pytest.mark.parametrize("said", [None, False, True])
def test_how_an_index_rotates(name: str, usual: bool, said: bool | None) -> None:
    """GLM-5 names it in its config."""
    latent = decoder_config(name, indexer_rope_interleave=said).latent
    assert latent is not None
    assert latent.index is not None
    assert latent.index.interleaved_rope == (usual if said is None else said)
