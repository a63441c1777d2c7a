"""Writes tiny random models as GGUF files in the conventions of llama.cpp's converter, tokenizer included.

The file is input for tests, never their oracle: what a file means is decided by a program that is not ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 288
BOS, EOS, PAD = 264, 265, 266
MERGES = ("t h", "h e", "th e", "i n", "a n", "o n", "Ġ the", "e r")
CONTEXT = 128


@dataclass(frozen=True)
class TinyModel:
    arch: str  # GGUF architecture
    model_type: str  # of the Hugging Face config
    config: dict[str, Any] = field(default_factory=dict)


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.5,
}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama", "llama", {"head_dim": 32, "tie_word_embeddings": False}),
    "llama-tied": TinyModel("llama", "llama", {"tie_word_embeddings": True}),
    # Wide enough for blocks of 256 values.
    "llama-wide": TinyModel(
        "llama", "llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": True}
    ),
    "llama-bias": TinyModel("llama", "llama", {"attention_bias": True}),
    "llama-llama3": TinyModel("llama", "llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": TinyModel("llama", "llama", {"rope_parameters": _LINEAR}),
    "llama-yarn": TinyModel("llama", "llama", {"rope_parameters": _YARN}),
    "qwen2": TinyModel("qwen2", "qwen2"),
    "qwen3": TinyModel("qwen3", "qwen3", {"head_dim": 32}),
    "gemma2": TinyModel("gemma2", "gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gemma3": TinyModel(
        "gemma3",
        "gemma3_text",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
    "gemma3-linear": TinyModel(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3-partial": TinyModel(
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3": TinyModel("phi3", "phi3", {"original_max_position_embeddings": CONTEXT}),
    "phi3-longrope": TinyModel(
        "phi3",
        "phi3",
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
        },
    ),
    "olmo2": TinyModel("olmo2", "olmo2"),
    "smollm3": TinyModel("smollm3", "smollm3", {"num_hidden_layers": 5}),
    "granite": TinyModel("granite", "granite", _GRANITE),
}


def tiny_hf_model(name: str) -> PreTrainedModel:
    """The model that `write_tiny_gguf(name, ...)` writes: seeded, with weights far from their defaults."""
    spec = TINY_MODELS[name]
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    config = AutoConfig.for_model(spec.model_type, **{**common, **spec.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(len(name))
    gemma = spec.arch.startswith("gemma")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                low, high = (-0.5, 0.5) if gemma else (0.5, 1.5)
                parameter.uniform_(low, high, generator=generator)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3, generator=generator)
            else:
                scale = 0.3 if "embed" in key else 1.5 / math.sqrt(parameter.shape[1])
                parameter.normal_(0, scale, generator=generator)
    return model


def write_tiny_gguf(name: str, path: Path, quant: str | None = None) -> PreTrainedModel:
    """Write a tiny model of TINY_MODELS; `quant` (such as "Q8_0") is applied to matrices. Returns the HF model."""
    spec = TINY_MODELS[name]
    model = tiny_hf_model(name)
    config = model.config
    writer = gguf.GGUFWriter(path, spec.arch)
    _write_common(writer, config)
    _write_rope(writer, config, spec)
    if spec.arch in _OWN_METADATA:
        _OWN_METADATA[spec.arch](writer, config)
    write_tokenizer(writer)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == spec.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, key
        _add_tensor(writer, gguf_name, _converted(spec, config, key, tensor), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quant: str | None) -> None:
    data = tensor.detach().numpy().astype(np.float32)
    if quant is None or data.ndim == 1:
        writer.add_tensor(name, data)
        return
    if name.startswith("blk") and "attn_v" in name:  # as in llama.cpp's mixed files
        quant = {"Q4_K": "Q6_K", "Q2_K": "Q4_K"}.get(quant, quant)
    kind = gguf.GGMLQuantizationType[quant]
    if quant.endswith("_K"):
        blocks = k_blocks(quant, *data.shape)
    elif quant.startswith(("IQ", "TQ", "MX", "NV")):
        blocks = finite_blocks(quant, *data.shape)
    else:
        blocks = gguf.quants.quantize(data, kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)


# Offsets of the float16 factors in a block.
_K_FACTORS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_K_SIZES = {"Q2_K": 5e-3, "Q3_K": 5e-4, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 2e-5}


def k_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Blocks of a K format with random codes and small factors: gguf-py cannot make them from values."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    generator = np.random.default_rng(rows * columns)
    blocks = generator.integers(0, 256, (rows * columns // values, num_bytes), dtype=np.uint8)
    for offset in _K_FACTORS[name]:
        factors = generator.uniform(0.5, 1.5, len(blocks)) * _K_SIZES[name]
        blocks[:, offset : offset + 2] = factors.astype(np.float16).reshape(-1, 1).view(np.uint8)
    return blocks.reshape(rows, -1)


# Where a type has its scales, and the bytes that make them small and finite; other types of scales always are.
_FINITE = {
    "IQ1_M": ((48, 50, 52, 54), None),  # the float16 is spread over the high bits of four numbers
    "MXFP4": ((0,), 118),
    "NVFP4": ((0, 1, 2, 3), 4),
    "TQ1_0": ((52,), None),
    "TQ2_0": ((64,), None),
}


def finite_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Random blocks of an IQ, TQ or 4-bit float type, whose values are finite and small."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    generator = np.random.default_rng(rows * columns)
    blocks = generator.integers(0, 256, (rows * columns // values, num_bytes), dtype=np.uint8)
    offsets, fixed = _FINITE.get(name, ((0,), None))
    if fixed is not None:
        blocks[:, list(offsets)] = fixed + generator.integers(0, 3, (len(blocks), len(offsets)))
    elif name == "IQ1_M":
        step = int(np.float16(0.002).view(np.uint16))
        for place, offset in enumerate(offsets):
            blocks[:, offset + 1] = blocks[:, offset + 1] & 15 | (step >> 4 * place & 15) << 4
    else:
        steps = generator.uniform(5e-5, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, offsets[0] : offsets[0] + 2] = steps.reshape(-1, 1).view(np.uint8)
    return blocks.reshape(rows, -1)


def _converted(spec: TinyModel, config: Any, key: str, tensor: Tensor) -> Tensor:
    if spec.arch.startswith("gemma") and key.endswith("norm.weight"):
        return tensor + 1
    if spec.arch in ("llama", "smollm3", "granite"):
        if ".q_proj." in key:
            return _interleave(tensor, config.num_attention_heads)
        if ".k_proj." in key:
            return _interleave(tensor, config.num_key_value_heads)
    return tensor


def _interleave(tensor: Tensor, heads: int) -> Tensor:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _head_dim(config: Any) -> int:
    explicit = config.to_dict().get("head_dim")
    return int(explicit or config.hidden_size // config.num_attention_heads)


def _write_common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if _head_dim(config) != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))


def _write_rope(writer: gguf.GGUFWriter, config: Any, spec: TinyModel) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if spec.arch != "gemma2":  # its converter writes no base: the default is right
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        _add_tensor(writer, "rope_freqs.weight", llama3_factors(rope, _head_dim(config)), None)
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        ratio = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(original)))
        _add_tensor(writer, "rope_factors_long.weight", torch.tensor(rope["long_factor"]), None)
        _add_tensor(writer, "rope_factors_short.weight", torch.tensor(rope["short_factor"]), None)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """By how much llama3 scaling stretches each frequency."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** exponents)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    period = config.layer_types.index("full_attention") + 1
    if period != 6:
        writer.add_sliding_window_pattern(period)


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


_OWN_METADATA: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}


def byte_alphabet() -> list[str]:
    """The printable stand-ins of byte-level BPE, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level BPE vocabulary: 256 bytes, a few merges, three control tokens, padding."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), "<|bos|>", "<|eos|>", "<|pad|>"]
    types = [gguf.TokenType.NORMAL] * (256 + len(MERGES)) + [gguf.TokenType.CONTROL] * 3
    for index in range(len(tokens), VOCAB_SIZE):
        tokens.append(f"<unused{index}>")
        types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
