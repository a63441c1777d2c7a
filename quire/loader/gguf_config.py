"""Builds a Hugging Face config from GGUF metadata. Torch-free; what a file does not say is what ggml assumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.loader.config_schema import MAX_LAYERS
from quire.loader.gguf_file import GgufFile
from quire.loader.gguf_names import ARCHITECTURES, GgufArchitecture
from quire.types.errors import CheckpointError

DEFAULT_ROPE_THETA = 10000.0


class GgufKeys:
    """Metadata of one architecture: keys are given without their "llama." prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return _shortest(self.file.metadata.get(f"{self.architecture}.{key}"))

    def count(
        self, key: str, default: int | None = None, at_most: int | None = None, *, skips_zero: bool = False
    ) -> int:
        """A positive whole number, required if it has no default; given per layer, it must be the same for all.

        `skips_zero`: layers may have none.
        """
        value = self.get(key)
        values = value if isinstance(value, list) and value else [value]
        if skips_zero:
            values = [each for each in values if each != 0] or values
        if any(other != values[0] for other in values):
            raise self.wrong(key, values, "the same for all layers: such models are not supported")
        number = self._or_default(key, values[0], default)
        if not isinstance(number, int) or number < 1:
            raise self.wrong(key, number, "a positive whole number")
        if at_most is not None and number > at_most:
            raise self.wrong(key, number, f"at most {at_most}")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """A number, required if it has no default."""
        value = self._or_default(key, self.get(key), default)
        if not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._or_default(key, self.get(key), default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def _or_default(self, key: str, value: Any, default: Any) -> Any:
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{self.file.path} has no metadata key {self.architecture}.{key}, which a model of this "
                f"architecture needs; convert the model again"
            )
        return default

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key} is {value!r}; it must be {expected}")

    def floats(self, tensor_name: str) -> list[float] | None:
        """A small float32 tensor such as a table of rope factors; None if the file has none."""
        tensor = self.file.tensors.get(tensor_name)
        if tensor is None:
            return None
        if tensor.type != "F32":
            raise CheckpointError(f"{self.file.path}: {tensor_name} has type {tensor.type}; it must be F32")
        return [_shortest(value) for value in self.file.data(tensor).view(np.float32).tolist()]


def _shortest(value: Any) -> Any:
    """A float32 widened to Python's float, as the shortest decimal that means it: 1e-05, not 9.9999997e-06."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """The file's architecture name and what is known about it."""
    name = file.metadata.get("general.architecture")
    if name is None:
        raise CheckpointError(f"{file.path} has no metadata key general.architecture; convert the model again")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has the GGUF architecture {name!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys that config.json of the same model would have."""
    name, architecture = architecture_of(file)
    keys = GgufKeys(file, name)
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    is_latent = keys.get("attention.kv_lora_rank") is not None
    if not is_latent and keys.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path}: {name}.attention.value_length is {keys.get('attention.value_length')} but heads have "
            f"{head_dim} key values; such models are not supported"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count", at_most=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads, skips_zero=name in _RECURRENT),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": float(keys.number("rope.freq_base", DEFAULT_ROPE_THETA)),
        "rope_scaling": _rope_scaling(keys),
        **_special_tokens(file),
    }
    if keys.get("pooling_type") is not None:
        config["pooling_type"] = keys.get("pooling_type")
    if architecture.is_encoder:
        return _encoder(keys, config)
    config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not is_latent:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if name in _OWN_KEYS:
        _OWN_KEYS[name](keys, config)
    return config


def _encoder(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    types = keys.file.tensors.get("token_types.weight")
    return config | {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "hidden_act": "silu" if "blk.0.ffn_gate.weight" in keys.file.tensors else "gelu",
    }


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} has no matrix token_embd.weight; convert the model again")
    return embedding.shape[0]


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    same = keys.floats("rope_freqs.weight")
    if same is not None:
        # llama3 scaling, stored as the factors it leads to: longrope with equal tables says just that.
        return _longrope(same, same, 1.0, original)
    long, short = keys.floats("rope_factors_long.weight"), keys.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        return _longrope(short, long, keys.number("rope.scaling.attn_factor", 1.0), original)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0, 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture}.rope.scaling.type is {kind!r}; supported: none, linear, yarn, "
            f"and longrope with its factor tensors"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(short: list[float], long: list[float], attention_factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def _special_tokens(file: GgufFile) -> dict[str, int]:
    ids = {}
    for kind, gguf_kind in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{gguf_kind}_token_id")
        if isinstance(value, int):
            ids[f"{kind}_token_id"] = value
    return ids


def _layer_types(keys: GgufKeys, num_layers: int, default_period: int) -> list[str]:
    """Every period-th layer sees everything, the others a window; newer files may list the layers one by one."""
    key = "attention.sliding_window_pattern"
    listed = keys.get(key)
    if isinstance(listed, list) and len(listed) >= num_layers:
        slides = listed[:num_layers]
    else:
        period = keys.count(key, default_period)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _gemma(keys: GgufKeys, config: dict[str, Any], period: int, layers_of_27b: int) -> None:
    # GGUF does not store the attention scale; only the 27B models do not use the head size.
    by_hidden = config["num_hidden_layers"] == layers_of_27b
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if by_hidden
        else config["head_dim"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(keys, config["num_hidden_layers"], period),
        "sliding_window": keys.number("attention.sliding_window", 0) or None,
    }


def _gemma2(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=2, layers_of_27b=46)
    config["sliding_window"] = config["sliding_window"] or 4096
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)


def _gemma3(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=6, layers_of_27b=62)
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["rope_theta"] = float(keys.number("rope.freq_base", 1_000_000.0))
    config["rope_local_base_freq"] = float(keys.number("rope.freq_base_swa", DEFAULT_ROPE_THETA))
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None
    config["attn_logit_softcapping"] = None


def _phi3(keys: GgufKeys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.number("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )


def _olmo2(keys: GgufKeys, config: dict[str, Any]) -> None:
    # OLMo 3 is written under the same name; only it has a window.
    if window := keys.number("attention.sliding_window", 0):
        config |= {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "sliding_window": window,
            "layer_types": _layer_types(keys, config["num_hidden_layers"], 4),
        }


def _smollm3(keys: GgufKeys, config: dict[str, Any]) -> None:
    interval = 4  # ggml's constant: no file can say another
    config["no_rope_layer_interval"] = interval
    config["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(config["num_hidden_layers"])]


def _granite(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale"),  # both sides divide the logits by it
    }


def _experts(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length", config["intermediate_size"]),
    }


def _experts_alone(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Of models without dense layers, whose config calls the width of an expert intermediate_size."""
    _experts(keys, config)
    config["intermediate_size"] = config["moe_intermediate_size"]


def _llama(keys: GgufKeys, config: dict[str, Any]) -> None:
    if keys.get("expert_count"):
        _experts_alone(keys, config)
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _qwen2_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    width = keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    config |= {"norm_topk_prob": False, "shared_expert_intermediate_size": width}
    config["qkv_bias"] = config["attention_bias"]


def _qwen3_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    config["norm_topk_prob"] = True


def _granite_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _granite(keys, config)
    _experts_alone(keys, config)
    if keys.get("expert_shared_feed_forward_length"):
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture}.expert_shared_feed_forward_length is set; Granite models with a "
            f"shared expert are not supported"
        )


def _gpt_oss(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts_alone(keys, config)
    config |= {
        "sliding_window": keys.count("attention.sliding_window", 128),
        "layer_types": _layer_types(keys, config["num_hidden_layers"], 2),
    }


def _deepseek_experts(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Experts by the keys of DeepSeek-V3, which others took over."""
    _experts(keys, config)
    nextn = keys.get("nextn_predict_layers")
    config |= {
        "num_hidden_layers": config["num_hidden_layers"] - (nextn if isinstance(nextn, int) else 0),
        "n_routed_experts": config["num_local_experts"],
        "n_shared_experts": int(keys.number("expert_shared_count", 0)),
        "first_k_dense_replace": int(keys.number("leading_dense_block_count", 0)),
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
        "sliding_window": None,
    }


def _deepseek(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Latent attention. Files that have its keys and values apart state lengths of heads under names of their own."""
    _deepseek_experts(keys, config)
    rope_dim = keys.count("rope.dimension_count")
    head_dim = keys.count("attention.key_length_mla", config["head_dim"])
    is_v2 = keys.count("expert_gating_func", _SOFTMAX) == _SOFTMAX
    q_rank = keys.get("attention.q_lora_rank")
    config |= {
        "architectures": ["DeepseekV2ForCausalLM" if is_v2 else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": q_rank if isinstance(q_rank, int) and q_rank > 0 else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": keys.count("attention.value_length_mla", keys.count("attention.value_length", head_dim)),
    }
    weight = keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if config["rope_scaling"] is not None and weight:
        config["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight}


def _phi_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts_alone(keys, config)
    _phi3(keys, config)
    config["lm_head_bias"] = "output.bias" in keys.file.tensors


def _ernie_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    config |= {
        "moe_num_experts": config["num_local_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": int(keys.number("expert_shared_count", 0)),
        "moe_layer_start_index": int(keys.number("leading_dense_block_count", 0)),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
        "use_bias": config["attention_bias"],
    }


def _hunyuan_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    _experts_alone(keys, config)
    config |= {"num_experts": config["num_local_experts"], "moe_topk": config["num_experts_per_tok"]}


_SOFTMAX = 1  # as expert_gating_func numbers it


def _mixers(keys: GgufKeys, config: dict[str, Any], recurrent: str) -> list[str]:
    """Layers without heads of keys are recurrent."""
    listed = keys.get("attention.head_count_kv")
    count = config["num_hidden_layers"]
    heads = listed if isinstance(listed, list) else [listed] * count
    if len(heads) != count:
        raise keys.wrong("attention.head_count_kv", heads, f"of {count} layers")
    return ["full_attention" if each else recurrent for each in heads]


def _lfm2(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "layer_types": _mixers(keys, config, "conv"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in keys.file.tensors),
    }


def _granite_hybrid(keys: GgufKeys, config: dict[str, Any]) -> None:
    _granite(keys, config)
    heads, dense = keys.count("ssm.time_step_rank"), config["intermediate_size"]
    config |= {
        "layer_types": _mixers(keys, config, "linear_attention"),
        "mamba_n_heads": heads,
        "mamba_d_head": keys.count("ssm.inner_size") // heads,
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_n_groups": keys.count("ssm.group_count", 1),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
        "position_embedding_type": "nope" if keys.get("rope.scaling.finetuned") is False else "rope",
        "num_local_experts": 0,
        "shared_intermediate_size": dense,
    }
    if keys.get("expert_count"):
        _experts_alone(keys, config)
        config["shared_intermediate_size"] = keys.count("expert_shared_feed_forward_length", dense)


_RECURRENT = ("lfm2", "granitehybrid")
_OWN_KEYS: dict[str, Callable[[GgufKeys, dict[str, Any]], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "llama": _llama,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _experts_alone,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _experts_alone,
    "phimoe": _phi_moe,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "dots1": _deepseek_experts,
    "glm4moe": _deepseek_experts,
    "deepseek2": _deepseek,
    "lfm2": _lfm2,
    "granitehybrid": _granite_hybrid,
}


# Keys under general.sampling., and what generation_config.json calls them.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def sampling_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys of generation_config.json that say how to sample, as far as the file suggests any."""
    suggested = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: _shortest(value) for name, value in suggested.items() if value is not None}
