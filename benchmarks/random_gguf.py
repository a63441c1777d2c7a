"""GGUF files of the shapes of real models with random Q4_K blocks, for comparisons with llama.cpp.

No real file is at hand. Routers, norms and small matrices are floats or Q8_0, as llama.cpp's converter leaves them,
and the tokenizer is that of the default model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from quire.loader.hub import resolve_model

BLOCK, BLOCK_BYTES, STEP = 256, 144, 1e-4  # of Q4_K, and its scales


class Writer:
    """A file of one architecture: its tokenizer and the keys that all have are written at once."""

    def __init__(self, path: Path, architecture: str, hidden: int, layers: int, width: int, heads: int) -> None:
        self.file = gguf.GGUFWriter(path, architecture)
        self.hidden, self.layers = hidden, layers
        self.generator = np.random.default_rng(0)
        source, vocab = gguf.GGUFReader(resolve_model("smollm2").path), 0
        for field in source.fields.values():
            if field.name.startswith("tokenizer."):
                kind, value = field.types[0], field.contents()
                self.file.add_key_value(field.name, value, kind, field.types[-1] if len(field.types) > 1 else None)
                vocab = len(value) if field.name == "tokenizer.ggml.tokens" else vocab
        self.file.add_context_length(4096)
        self.file.add_embedding_length(hidden)
        self.file.add_block_count(layers)
        self.file.add_feed_forward_length(width)
        self.file.add_head_count(heads)
        self.file.add_layer_norm_rms_eps(1e-6)
        self.file.add_vocab_size(vocab)
        self.file.add_rope_freq_base(10000.0)
        self.matrix("token_embd", vocab, hidden)

    def matrix(self, name: str, *shape: int) -> None:
        data = q4_k(self.generator, int(np.prod(shape[:-1])), shape[-1]).reshape(*shape[:-1], -1)
        self.file.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    def small(self, name: str, *shape: int) -> None:
        values = self.generator.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        kind = gguf.GGMLQuantizationType.Q8_0
        self.file.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

    def floats(self, name: str, *shape: int, scale: float = 0.05) -> None:
        self.file.add_tensor(name, self.generator.standard_normal(shape, np.float32) * scale)

    def norm(self, name: str, size: int | None = None) -> None:
        self.file.add_tensor(f"{name}.weight", np.ones(size or self.hidden, np.float32))

    def mlp(self, place: str, width: int, kind: str = "") -> None:
        self.matrix(f"{place}.ffn_gate{kind}", width, self.hidden)
        self.matrix(f"{place}.ffn_up{kind}", width, self.hidden)
        self.matrix(f"{place}.ffn_down{kind}", self.hidden, width)

    def experts(self, place: str, count: int, width: int) -> None:
        self.floats(f"{place}.ffn_gate_inp.weight", count, self.hidden)
        self.matrix(f"{place}.ffn_gate_exps", count, width, self.hidden)
        self.matrix(f"{place}.ffn_up_exps", count, width, self.hidden)
        self.matrix(f"{place}.ffn_down_exps", count, self.hidden, width)

    def attention(self, place: str, heads: int, kv_heads: int) -> None:
        size = self.hidden // heads
        rows = {"q": self.hidden, "k": size * kv_heads, "v": size * kv_heads, "output": self.hidden}
        for part, outputs in rows.items():
            self.matrix(f"{place}.attn_{part}", outputs, self.hidden)

    def granite(self) -> None:
        self.file.add_attention_scale(0.015625)
        self.file.add_embedding_scale(12.0)
        self.file.add_residual_scale(0.22)
        self.file.add_logit_scale(6.0)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def granite_moe(path: Path) -> Writer:
    """granite-3.0-1b-a400m: 32 experts of width 512, 8 a token."""
    writer = Writer(path, "granitemoe", 1024, 24, 512, 16)
    writer.file.add_head_count_kv(8)
    writer.file.add_rope_dimension_count(64)
    writer.file.add_expert_count(32)
    writer.file.add_expert_used_count(8)
    writer.granite()
    writer.norm("output_norm")
    for layer in range(writer.layers):
        place = f"blk.{layer}"
        writer.norm(f"{place}.attn_norm")
        writer.norm(f"{place}.ffn_norm")
        writer.attention(place, 16, 8)
        writer.experts(place, 32, 512)
    return writer


def deepseek2(path: Path) -> Writer:
    """Heads and latents of DeepSeek-V2-Lite, half of its width and of its layers, 32 experts of width 512.

    Queries come of a latent, too: llama.cpp knows files without one by their 27 layers.
    """
    hidden, heads, rank, nope, rope, value, experts, width = 1024, 16, 512, 128, 64, 128, 32, 512
    writer = Writer(path, "deepseek2", hidden, 14, 2816, heads)
    file = writer.file
    file.add_head_count_kv(1)
    file.add_key_length(rank + rope)
    file.add_value_length(rank)
    file.add_key_length_mla(nope + rope)
    file.add_value_length_mla(value)
    file.add_kv_lora_rank(rank)
    file.add_q_lora_rank(rank)
    file.add_rope_dimension_count(rope)
    file.add_leading_dense_block_count(1)
    file.add_expert_count(experts)
    file.add_expert_used_count(6)
    file.add_expert_shared_count(2)
    file.add_expert_feed_forward_length(width)
    file.add_expert_weights_scale(1.0)
    file.add_expert_weights_norm(False)
    file.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.norm("output_norm")
    for layer in range(writer.layers):
        place = f"blk.{layer}"
        writer.norm(f"{place}.attn_norm")
        writer.norm(f"{place}.ffn_norm")
        writer.matrix(f"{place}.attn_q_a", rank, hidden)
        writer.norm(f"{place}.attn_q_a_norm", rank)
        writer.matrix(f"{place}.attn_q_b", heads * (nope + rope), rank)
        writer.matrix(f"{place}.attn_kv_a_mqa", rank + rope, hidden)
        writer.norm(f"{place}.attn_kv_a_norm", rank)
        writer.small(f"{place}.attn_k_b", heads, rank, nope)
        writer.small(f"{place}.attn_v_b", heads, value, rank)
        writer.matrix(f"{place}.attn_output", hidden, heads * value)
        if layer == 0:
            writer.mlp(place, 2816)
        else:
            writer.experts(place, experts, width)
            writer.mlp(place, 2 * width, "_shexp")
    return writer


def lfm2(path: Path) -> Writer:
    """LFM2-350M."""
    hidden, heads, attends = 1024, 16, (2, 5, 8, 10, 12, 14)
    writer = Writer(path, "lfm2", hidden, 16, 4608, heads)
    writer.file.add_head_count_kv([8 if layer in attends else 0 for layer in range(writer.layers)])
    writer.file.add_shortconv_l_cache(3)
    writer.norm("token_embd_norm")
    for layer in range(writer.layers):
        place = f"blk.{layer}"
        writer.norm(f"{place}.attn_norm")
        writer.norm(f"{place}.ffn_norm")
        writer.mlp(place, 4608)
        if layer in attends:
            writer.attention(place, heads, 8)
            writer.norm(f"{place}.attn_q_norm", hidden // heads)
            writer.norm(f"{place}.attn_k_norm", hidden // heads)
        else:
            writer.matrix(f"{place}.shortconv.in_proj", 3 * hidden, hidden)
            writer.matrix(f"{place}.shortconv.out_proj", hidden, hidden)
            writer.floats(f"{place}.shortconv.conv.weight", hidden, 3, scale=0.5)
    return writer


def granite_hybrid(path: Path) -> Writer:
    """granite-4.0-h-350m."""
    hidden, heads, attends, inner, state, groups = 768, 12, (10, 13, 17, 27), 1536, 128, 48
    writer = Writer(path, "granitehybrid", hidden, 32, 2048, heads)
    file = writer.file
    file.add_head_count_kv([4 if layer in attends else 0 for layer in range(writer.layers)])
    file.add_ssm_conv_kernel(4)
    file.add_ssm_inner_size(inner)
    file.add_ssm_state_size(state)
    file.add_ssm_time_step_rank(groups)
    file.add_ssm_group_count(1)
    file.add_rope_dimension_count(hidden // heads)
    file.add_rope_scaling_finetuned(False)
    writer.granite()
    writer.norm("output_norm")
    for layer in range(writer.layers):
        place = f"blk.{layer}"
        writer.norm(f"{place}.attn_norm")
        writer.norm(f"{place}.ffn_norm")
        writer.mlp(place, 2048)
        if layer in attends:
            writer.attention(place, heads, 4)
            continue
        writer.matrix(f"{place}.ssm_in", 2 * inner + 2 * state + groups, hidden)
        writer.matrix(f"{place}.ssm_out", hidden, inner)
        writer.floats(f"{place}.ssm_conv1d.weight", inner + 2 * state, 4, scale=0.5)
        writer.floats(f"{place}.ssm_conv1d.bias", inner + 2 * state)
        writer.floats(f"{place}.ssm_dt.bias", groups)
        file.add_tensor(f"{place}.ssm_a", -np.linspace(0.1, 1.0, groups, dtype=np.float32)[:, None])
        file.add_tensor(f"{place}.ssm_d", np.ones((groups, 1), np.float32))
        file.add_tensor(f"{place}.ssm_norm.weight", np.ones((1, inner), np.float32))
    return writer


SHAPES: dict[str, Callable[[Path], Writer]] = {
    "granite-moe": granite_moe,
    "deepseek2": deepseek2,
    "lfm2-350m": lfm2,
    "granite-4.0-h-350m": granite_hybrid,
}


def q4_k(generator: np.random.Generator, rows: int, inner: int) -> NDArray[np.uint8]:
    """Random codes and 6-bit scales; weights are about 0 because minima are 7.5 steps."""
    blocks = generator.integers(0, 256, (rows, inner // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :4] = np.array([STEP, 7.5 * STEP], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
