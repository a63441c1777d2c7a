"""Configs of recurrent and hybrid models from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.loader.config_schema import MAX_EXPERTS
from quire.loader.gguf_keys import GgufKeys, experts, experts_alone, granite
from quire.loader.gguf_latent import deepseek_experts, latent_sizes, needs_sigmoid


def _mixers(keys: GgufKeys, config: dict[str, Any], recurrent: str) -> list[str]:
    """Layers without heads of keys are recurrent."""
    listed = keys.get("attention.head_count_kv")
    count = config["num_hidden_layers"]
    heads = listed if isinstance(listed, list) else [listed] * count
    if len(heads) != count:
        raise keys.wrong("attention.head_count_kv", heads, f"of {count} layers")
    return ["full_attention" if each else recurrent for each in heads]


def _has(keys: GgufKeys, layer: int, tensor: str) -> bool:
    return f"blk.{layer}.{tensor}.weight" in keys.file.tensors


def _state_sizes(keys: GgufKeys) -> dict[str, Any]:
    """Of Mamba-2, by the names that most configs have."""
    heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_ssm": inner,
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_n_groups": keys.count("ssm.group_count", 1),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
    }


def _lfm2(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "layer_types": _mixers(keys, config, "conv"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in keys.file.tensors),
    }


def _lfm2_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _lfm2(keys, config)
    experts(keys, config)
    config |= {
        "num_experts": config["num_local_experts"],
        "num_dense_layers": int(keys.number("leading_dense_block_count", 0)),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in keys.file.tensors),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def _granite_hybrid(keys: GgufKeys, config: dict[str, Any]) -> None:
    granite(keys, config)
    dense = config["intermediate_size"]
    config |= {
        **_state_sizes(keys),
        "layer_types": _mixers(keys, config, "linear_attention"),
        "position_embedding_type": "nope" if keys.get("rope.scaling.finetuned") is False else "rope",
        "num_local_experts": 0,
        "shared_intermediate_size": dense,
    }
    if keys.get("expert_count"):
        experts_alone(keys, config)
        config["shared_intermediate_size"] = keys.count("expert_shared_feed_forward_length", dense)


def _falcon_h1(keys: GgufKeys, config: dict[str, Any]) -> None:
    """The converter multiplies weights by all factors of the config."""
    config |= _state_sizes(keys)
    config |= {"mamba_rms_norm": _has(keys, 0, "ssm_norm"), "mamba_norm_before_gate": False}


def _nemotron_h(keys: GgufKeys, config: dict[str, Any]) -> None:
    sizes = _state_sizes(keys)
    kinds = {"ffn_gate_inp": "moe", "ffn_up": "mlp", "attn_q": "attention", "attn_norm": "mamba"}
    layers = range(config["num_hidden_layers"])
    config |= {
        "layers_block_type": [next(kind for tensor, kind in kinds.items() if _has(keys, n, tensor)) for n in layers],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "ssm_state_size": sizes["mamba_d_state"],
        "n_groups": sizes["mamba_n_groups"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "time_step_min": 0.0,
        "mlp_hidden_act": "relu2",
    }
    if keys.get("expert_count"):
        experts(keys, config)
        config |= {
            "n_routed_experts": config["num_local_experts"],
            "n_shared_experts": keys.count("expert_shared_count", 1),
            "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": bool(keys.get("expert_weights_norm")),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "n_group": keys.count("expert_group_count", 1),
            "topk_group": keys.count("expert_group_used_count", 1),
            "moe_latent_size": keys.get("moe_latent_size"),
        }


def _mamba(keys: GgufKeys, config: dict[str, Any]) -> None:
    inner, hidden = keys.count("ssm.inner_size"), config["hidden_size"]
    config |= {
        "expand": inner / hidden,
        "state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": "blk.0.ssm_in.bias" in keys.file.tensors,
    }
    if keys.get("ssm.dt_b_c_rms"):
        config |= {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]}
        config["mixer_rms_eps"] = config["rms_norm_eps"]


def _mamba2(keys: GgufKeys, config: dict[str, Any]) -> None:
    _mamba(keys, config)
    sizes = _state_sizes(keys)
    config |= {"num_heads": sizes["mamba_n_heads"], "head_dim": sizes["mamba_d_head"]}
    config["n_groups"] = sizes["mamba_n_groups"]


def _jamba(keys: GgufKeys, config: dict[str, Any]) -> None:
    layers = range(config["num_hidden_layers"])
    for kind, tensor in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        found = [layer for layer in layers if _has(keys, layer, tensor)] or [len(layers)]
        period = found[1] - found[0] if len(found) > 1 else len(layers) + 1
        if found != list(range(found[0], len(layers), period)) and found != [len(layers)]:
            raise keys.wrong("block_count", len(layers), f"of layers whose {tensor} are evenly spaced")
        config |= {f"{kind}_layer_offset": found[0], f"{kind}_layer_period": period}
    config |= {
        "num_experts": keys.count("expert_count", 1, at_most=MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count", 1),
        "mamba_expand": keys.count("ssm.inner_size") / config["hidden_size"],
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_dt_rank": keys.count("ssm.time_step_rank"),
        "mamba_proj_bias": "blk.0.ssm_in.bias" in keys.file.tensors,
    }


def _qwen35(keys: GgufKeys, config: dict[str, Any]) -> None:
    heads = keys.count("ssm.time_step_rank")
    count = config["num_hidden_layers"] - int(keys.number("nextn_predict_layers", 0))
    config |= {
        "num_hidden_layers": count,
        "layer_types": [
            "full_attention" if _has(keys, layer, "attn_q") else "linear_attention" for layer in range(count)
        ],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
    }
    if keys.get("expert_count"):
        experts(keys, config)
        config |= {
            "num_experts": config["num_local_experts"],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        }


def _qwen3_next(keys: GgufKeys, config: dict[str, Any]) -> None:
    _qwen35(keys, config)
    # Older files have queries, keys, values and gates in one matrix, as the model's own checkpoints do.
    config["in_proj_qkv_apart"] = any(name.endswith("attn_gate.weight") for name in keys.file.tensors)


def _kimi_linear(keys: GgufKeys, config: dict[str, Any]) -> None:
    deepseek_experts(keys, config)
    latent_sizes(keys, config)
    needs_sigmoid(keys)
    types = _mixers(keys, config, "linear_attention")
    config |= {
        "norm_topk_prob": True,  # as llama.cpp does whatever a file says
        "layer_types": types,
        "linear_attn_config": {
            "head_dim": keys.count("kda.head_dim"),
            "num_heads": config["num_attention_heads"],
            "short_conv_kernel_size": keys.count("ssm.conv_kernel"),
        },
    }


STATES_ALONE = ("mamba", "mamba2")  # without attention and MLPs
RECURRENT_KEYS: dict[str, Callable[[GgufKeys, dict[str, Any]], None]] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3_next,
    "kimi-linear": _kimi_linear,
}
