"""Builds a Hugging Face config from GGUF metadata. Torch-free; what a file does not say is what ggml assumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.loader.gguf_file import GgufFile
from quire.loader.gguf_names import ARCHITECTURES, GgufArchitecture
from quire.types.errors import CheckpointError

DEFAULT_ROPE_THETA = 10000.0
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
# Control tokens that end a turn. Many files name only one of theirs as the end-of-sequence token.
END_OF_TURN_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)


class GgufKeys:
    """Metadata of one architecture: keys are given without their "llama." prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return _shortest(self.file.metadata.get(f"{self.architecture}.{key}", default))

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.file.path} has no metadata key {self.architecture}.{key}, which a model of this "
                f"architecture needs; convert the model again"
            )
        return value

    def count(self, key: str) -> int:
        """A required positive number; it may be given per layer if it is the same for all."""
        value = self.need(key)
        values = value if isinstance(value, list) else [value]
        if len(set(values)) != 1:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} differs between layers ({values}); such models "
                f"are not supported"
            )
        number = values[0]
        if not isinstance(number, int) or number < 1:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} is {number!r}; it must be a positive number"
            )
        return number

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
    if name not in ARCHITECTURES:
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
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight; convert the model again")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads
        if keys.get("attention.head_count_kv") is None
        else keys.count("attention.head_count_kv"),
        "head_dim": keys.get("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_rope(keys),
        **_special_tokens(file),
    }
    if keys.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise CheckpointError(
            f"{file.path}: {name}.attention.value_length is {keys.get('attention.value_length')} but key_length "
            f"is {config['head_dim']}; such models are not supported"
        )
    _add_partial_rotary(keys, config)
    if name in _OWN_KEYS:
        _OWN_KEYS[name](keys, config)
    return config


def _add_partial_rotary(keys: GgufKeys, config: dict[str, Any]) -> None:
    rotary_dim = keys.get("rope.dimension_count", config["head_dim"])
    if rotary_dim != config["head_dim"]:
        config["partial_rotary_factor"] = rotary_dim / config["head_dim"]


def _rope(keys: GgufKeys) -> dict[str, Any]:
    return {
        "rope_theta": float(keys.get("rope.freq_base", DEFAULT_ROPE_THETA)),
        "rope_scaling": _rope_scaling(keys),
    }


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    original = keys.get("rope.scaling.original_context_length", keys.count("context_length"))
    same = keys.floats("rope_freqs.weight")
    if same is not None:
        # llama3 scaling, stored as the factors it leads to: longrope with equal tables says just that.
        return {
            "rope_type": "longrope",
            "short_factor": same,
            "long_factor": same,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    long, short = keys.floats("rope_factors_long.weight"), keys.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": keys.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture}.rope.scaling.type is {kind!r}; supported: none, linear, yarn, "
            f"and longrope with its factor tensors"
        )
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, hf_key in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := keys.get(f"rope.scaling.{key}")) is not None:
            scaling[hf_key] = value
    return scaling


def _special_tokens(file: GgufFile) -> dict[str, int]:
    ids = {}
    for kind, gguf_kind in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{gguf_kind}_token_id")
        if value is not None:
            ids[f"{kind}_token_id"] = value
    return ids


def _layer_types(keys: GgufKeys, num_layers: int, default_period: int) -> list[str]:
    """Every period-th layer sees everything, the others a window; newer files list the layers one by one."""
    pattern = keys.get("attention.sliding_window_pattern", default_period)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides[:num_layers]]


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
        "sliding_window": keys.get("attention.sliding_window"),
    }


def _gemma2(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=2, layers_of_27b=46)
    config["sliding_window"] = config["sliding_window"] or 4096
    config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping", 30.0)


def _gemma3(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=6, layers_of_27b=62)
    if not config["sliding_window"]:
        config["sliding_window"] = None
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["rope_theta"] = float(keys.get("rope.freq_base", 1_000_000.0))
    config["rope_local_base_freq"] = float(keys.get("rope.freq_base_swa", DEFAULT_ROPE_THETA))
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping")
    config["attn_logit_softcapping"] = None


def _phi3(keys: GgufKeys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.get("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = keys.get(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )


def _olmo2(keys: GgufKeys, config: dict[str, Any]) -> None:
    # OLMo 3 is written under the same name; only it has a window.
    if window := keys.get("attention.sliding_window", 0):
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
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "attention_multiplier": keys.get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.need("logit_scale"),  # both sides divide the logits by it
    }


_OWN_KEYS: dict[str, Callable[[GgufKeys, dict[str, Any]], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
}


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys of generation_config.json that GGUF can express: every token that ends a turn, and sampling."""
    metadata = file.metadata
    ends = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    ends |= {
        index
        for index, kind in enumerate(types)
        if kind == CONTROL_TOKEN and index < len(tokens) and tokens[index] in END_OF_TURN_TEXTS
    }
    config: dict[str, Any] = {"eos_token_id": sorted(ends)}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    for key, hf_key in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            config[hf_key] = _shortest(value)
    return config
