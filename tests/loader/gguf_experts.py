"""Writes tiny random mixtures of experts as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.loader import gguf_tiny
from tests.loader.gguf_tiny import TinyModel

_MIXTURE = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED = {
    **{**_MIXTURE, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
}
_LATENT = {
    **{"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}
# As in DeepSeek's own configs, where both are equal; files have one number for them.
_YARN = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        **{"mscale": 0.707, "mscale_all_dim": 0.707},
    }
}
_SPARSE = ("deepseek32", "glm-dsa")
_LATENTS = ("deepseek2", *_SPARSE)
_INDEX = {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 12}
_EQUAL_HEADS = {"num_key_value_heads": 4}  # all that llama.cpp takes
EXPERT_MODELS: dict[str, TinyModel] = {
    "mixtral": TinyModel("llama", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3moe": TinyModel("qwen3moe", "qwen3_moe", {**_MIXTURE, "num_experts": 8, "norm_topk_prob": True}),
    "qwen2moe": TinyModel(
        "qwen2moe", "qwen2_moe", {**_MIXTURE, "num_experts": 8, "shared_expert_intermediate_size": 64}
    ),
    "olmoe": TinyModel("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3, **_EQUAL_HEADS}),
    "granitemoe": TinyModel(
        "granitemoe", "granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 3, **gguf_tiny._GRANITE}
    ),
    "gpt-oss": TinyModel(
        "gpt-oss", "gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 8}
    ),
    "minimax-m2": TinyModel(
        "minimax-m2",
        "minimax_m2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "dots1": TinyModel("dots1", "dots1", {**_ROUTED, **_EQUAL_HEADS}),
    "glm4moe": TinyModel("glm4moe", "glm4_moe", {**_ROUTED, "use_qk_norm": True}),
    "deepseek-v3": TinyModel("deepseek2", "deepseek_v3", {**_ROUTED, **_LATENT}),
    "deepseek-v3-yarn": TinyModel(
        "deepseek2", "deepseek_v3", {**_ROUTED, **_LATENT, **_YARN, "n_group": 4, "topk_group": 2}
    ),
    "glm4-moe-lite": TinyModel("deepseek2", "glm4_moe_lite", {**_ROUTED, **_LATENT}),
    "deepseek-v2-yarn": TinyModel(
        "deepseek2", "deepseek_v2", {**_ROUTED, **_LATENT, **_YARN, "norm_topk_prob": False}
    ),
    "deepseek-v2": TinyModel("deepseek2", "deepseek_v2", {**_ROUTED, **_LATENT, "norm_topk_prob": False}),
    "deepseek-v2-groups": TinyModel(
        "deepseek2",
        "deepseek_v2",
        {
            **{**_ROUTED, **_LATENT, "norm_topk_prob": False},
            **{"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        },
    ),
    "deepseek-v2-lite": TinyModel(
        "deepseek2", "deepseek_v2", {**_ROUTED, **_LATENT, "q_lora_rank": None, "norm_topk_prob": False}
    ),
    # Fewer keys are chosen than the longest prompt has, by so many heads that hardly any scores are equal.
    "deepseek32": TinyModel("deepseek32", "deepseek_v32", {**_ROUTED, **_LATENT, **_INDEX}),
    "glm-dsa": TinyModel(
        "glm-dsa",
        "glm_moe_dsa",
        {
            **{**_ROUTED, **_LATENT, **_INDEX},
            **{"indexer_types": ["full"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        },
    ),
    "glm-dsa-shared": TinyModel(
        "glm-dsa",
        "glm_moe_dsa",
        {
            **{**_ROUTED, **_LATENT, **_INDEX},
            **{"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"]},
        },
    ),
    "phimoe": TinyModel("phimoe", "phimoe", {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True}),
    "ernie4_5-moe": TinyModel(
        "ernie4_5-moe",
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "tie_word_embeddings": False},
    ),
    "hunyuan-moe": TinyModel("hunyuan-moe", "hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}),
    "llama4": TinyModel(
        "llama4",
        "llama4_text",
        {
            **{
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "intermediate_size": 32,
                "intermediate_size_mlp": 96,
            },
            **{"num_hidden_layers": 4, "head_dim": 16, "interleave_moe_layer_step": 2, "moe_layers": [1, 3]},
        },
    ),
    # Wide enough for blocks of 256 values.
    "qwen3moe-wide": TinyModel(
        "qwen3moe",
        "qwen3_moe",
        {**_MIXTURE, "num_experts": 8, "norm_topk_prob": True, "hidden_size": 256, "moe_intermediate_size": 256},
    ),
}
_COLUMNS = ("gpt-oss", "llama4")  # [experts, in, out] in transformers
_NAMES = {  # of what is not a tensor that gguf-py knows by transformers' name of today
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.wg.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
}


def make_model(name: str) -> PreTrainedModel:
    spec = EXPERT_MODELS[name]
    sizes = {
        **{"vocab_size": gguf_tiny.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": gguf_tiny.CONTEXT},
        **{"bos_token_id": gguf_tiny.BOS, "eos_token_id": gguf_tiny.EOS, "pad_token_id": gguf_tiny.PAD},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if name == "gpt-oss":
        sizes["rope_parameters"] = gguf_tiny._YARN
    config = AutoConfig.for_model(spec.model_type, **{**sizes, **spec.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "norm" in key and key.endswith("weight"):
                value.uniform_(0.5, 1.5, generator=generator)
            elif value.dim() == 1 or key.endswith(("proj_bias", "correction_bias")):
                value.normal_(0, 0.3, generator=generator)
            else:
                width = value.shape[-2] if name in _COLUMNS and value.dim() == 3 else value.shape[-1]
                value.normal_(0, 0.3 if "embed" in key else 1.5 / math.sqrt(width), generator=generator)
    return model


def write_expert_gguf(name: str, path: Path, quant: str | None = None) -> PreTrainedModel:
    """Write a model of EXPERT_MODELS; `quant` is applied to matrices but routers. Returns the HF model."""
    spec, model = EXPERT_MODELS[name], make_model(name)
    config = model.config
    writer = gguf.GGUFWriter(path, spec.arch)
    common = copy.copy(config)
    if spec.arch in _LATENTS:
        common.num_key_value_heads = 1  # the absorbed form
    if spec.arch == "llama4":
        common.intermediate_size = config.intermediate_size_mlp
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    gguf_tiny._write_common(writer, common)
    gguf_tiny._write_rope(writer, config, spec)
    _write_experts(writer, config, spec)
    gguf_tiny.write_tokenizer(writer)
    for gguf_name, tensor in _tensors(spec, model):
        plain = "ffn_gate_inp" in gguf_name or tensor.dim() < 2 or gguf_name.endswith("bias")
        _add(writer, gguf_name, tensor, None if plain else quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quant: str | None) -> None:
    if quant is not None and tensor.dim() == 3 and quant.endswith(("_K", "FP4")):
        make = gguf_tiny.k_blocks if quant.endswith("_K") else gguf_tiny.finite_blocks
        blocks = make(quant, tensor.shape[0] * tensor.shape[1], tensor.shape[2])
        kind = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, blocks.reshape(*tensor.shape[:2], -1), raw_dtype=kind)
    else:
        gguf_tiny._add_tensor(writer, name, tensor, quant)


def _tensors(spec: TinyModel, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    named = "glm-dsa" if spec.arch in _SPARSE else spec.arch  # gguf-py does not know all that llama.cpp reads
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == named)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    like_llama = TinyModel("llama" if spec.arch in ("llama", "granitemoe") else spec.arch, spec.model_type)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block, _, inner = key.removeprefix("model.layers.").partition(".")
        if ".experts." in key:
            yield from ((f"blk.{block}.{name}", part) for name, part in _expert_tensors(spec, inner, tensor))
        elif inner == "self_attn.kv_b_proj.weight":
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            yield f"blk.{block}.attn_k_b.weight", keys.transpose(1, 2).contiguous()
            yield f"blk.{block}.attn_v_b.weight", values.contiguous()
        elif inner in _NAMES:
            yield f"blk.{block}.{_NAMES[inner]}", tensor.squeeze()
        else:
            found = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert found is not None, key
            converted = gguf_tiny._converted(like_llama, config, key, tensor)
            yield found, converted.squeeze()


def _expert_tensors(spec: TinyModel, inner: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = "bias" if inner.endswith("_bias") else "weight"
    if spec.arch in _COLUMNS and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if "down_proj" in inner:
        yield f"ffn_down_exps.{kind}", tensor.contiguous()
    elif spec.arch == "gpt-oss":
        yield f"ffn_gate_exps.{kind}", tensor[:, ::2].contiguous()
        yield f"ffn_up_exps.{kind}", tensor[:, 1::2].contiguous()
    else:
        gate, up = tensor.chunk(2, dim=1)
        yield f"ffn_gate_exps.{kind}", gate.contiguous()
        yield f"ffn_up_exps.{kind}", up.contiguous()


def _write_experts(writer: gguf.GGUFWriter, config: Any, spec: TinyModel) -> None:
    keys = config.to_dict()
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(keys[key] for key in counts if key in keys))
    used = ("num_experts_per_tok", "moe_topk", "moe_k")
    writer.add_expert_used_count(next(keys[key] for key in used if key in keys))
    width = keys.get("moe_intermediate_size") or config.intermediate_size
    if spec.arch != "llama":
        writer.add_expert_feed_forward_length(width)
    if "shared_expert_intermediate_size" in keys:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if spec.arch == "granitemoe":
        gguf_tiny._granite(writer, config)
    if spec.arch == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if spec.arch in ("dots1", "glm4moe", *_LATENTS):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if config.n_group > 1:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    if spec.arch == "hunyuan-moe":
        writer.add_expert_shared_feed_forward_length(width)
        writer.add_expert_shared_count(1)
    if spec.arch == "phimoe":
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        writer.add_layer_norm_eps(config.rms_norm_eps)
    if spec.arch == "ernie4_5-moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(width * config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if spec.arch in ("dots1", "glm4moe", "minimax-m2", *_SPARSE) or spec.model_type in (
        "deepseek_v3",
        "glm4_moe_lite",
    ):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if spec.arch in _LATENTS:
        _write_latent(writer, config, spec)
    if spec.arch in _SPARSE:
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)


def _write_latent(writer: gguf.GGUFWriter, config: Any, spec: TinyModel) -> None:
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if spec.model_type == "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
