"""DeepSeek-V2 and V3, and what is built like them: latent attention, experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.config import ConfigReader, DecoderConfig, IndexConfig
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.dots1 import SHARED_EXPERTS, grouped_experts
from quire.models.latent import latent_weights, read_latent
from quire.types.errors import ModelError

LATENT_EXPERTS = latent_weights(SHARED_EXPERTS)
_ONES = dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
_SPARSE = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}


class DeepseekV2(DecoderLM):
    """DeepSeek-V2 and V2-Lite: latent attention; experts chosen by softmax scores, beside shared ones."""

    weight_map = LATENT_EXPERTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        read.one_of("scoring_func", "softmax")
        method = read.one_of("topk_method", "greedy", "group_limited_greedy")
        experts = (flags := grouped_experts(config))["experts"]
        groups = {} if method == "group_limited_greedy" else {"num_groups": 1, "top_groups": 1}
        # transformers scales the weights whether or not the config asks for renormalized ones.
        routing = replace(experts.routing, score="softmax", group_score="max", renormalize=False, **groups)
        flags["experts"] = replace(experts, routing=routing, choice_bias=False)
        return read_latent(config, interleaved_rope=True, **flags)


class DeepseekV3(DecoderLM):
    """DeepSeek-V3 and R1, Kimi-K2: latent attention; experts in groups, chosen by sigmoid scores and a bias."""

    weight_map = LATENT_EXPERTS
    has_draft_layer = True
    defaults: ClassVar[dict[str, Any]] = {
        **{"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        **{"first_k_dense_replace": 3, "n_shared_experts": 1, "rope_interleave": True},
    }

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, cls.defaults)
        read.one_of("scoring_func", "sigmoid")
        index = _index(read) if "index_topk" in cls.defaults else None
        return read_latent(config, index=index, interleaved_rope=read["rope_interleave"], **grouped_experts(read))


class Glm4MoeLite(DeepseekV3):
    """GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3 with other defaults."""

    defaults: ClassVar[dict[str, Any]] = {**DeepseekV3.defaults, **_ONES, "routed_scaling_factor": 1.8}


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2: V3 whose queries attend to the keys that a sparse indexer chooses."""

    defaults: ClassVar[dict[str, Any]] = {**DeepseekV3.defaults, **_SPARSE}


def _index(read: ConfigReader) -> IndexConfig:
    read.one_of("rope_interleave", True)
    types = _indexer_types(read)
    if len(types) != read["num_hidden_layers"] or types[:1] == ["shared"] or set(types) - {"full", "shared"}:
        raise ModelError(
            f"the indexers of the {read['num_hidden_layers']} layers are {types} (indexer_types or"
            " index_topk_pattern in the model config); name 'full' or 'shared' for each, the first one 'full'"
        )
    shared = frozenset(layer for layer, kind in enumerate(types) if kind == "shared")
    sizes = (read["index_n_heads"], read["index_head_dim"], read["index_topk"])
    return IndexConfig(*sizes, read.flag("indexer_rope_interleave"), shared)


def _indexer_types(read: ConfigReader) -> list[str]:
    """Of each layer: "full" chooses keys, "shared" takes the choice of the layer before."""
    if (types := read.get("indexer_types")) is not None:
        return list(types)
    if (pattern := read.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, first = max(1, read.get("index_topk_freq", 1)), read.get("index_skip_topk_offset", 2)
    layers = range(read["num_hidden_layers"])
    return ["shared" if max(layer - first + 1, 0) % every else "full" for layer in layers]


class GlmMoeDsa(DeepseekV32):
    """GLM-5: DeepSeek-V3.2 whose index is rotated in pairs side by side; layers may share one indexer's choice."""

    defaults: ClassVar[dict[str, Any]] = {**DeepseekV32.defaults, "indexer_rope_interleave": True}


class MiniCPM3(DecoderLM):
    """MiniCPM3: latent attention under dense MLPs; embeddings, residual branches and logits are scaled."""

    weight_map = latent_weights(PRE_NORM_WEIGHTS)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256})
        value_dim = read.get("v_head_dim") or read["hidden_size"] // read["num_attention_heads"]
        return read_latent(
            config,
            defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "v_head_dim": value_dim},
            embedding_scale=float(read["scale_emb"]),
            residual_multiplier=read["scale_depth"] / read["num_hidden_layers"] ** 0.5,
            logit_divisor=read["hidden_size"] / read["dim_model_base"],
        )
