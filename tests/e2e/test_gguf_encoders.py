"""GGUF files of encoders through the whole engine, beside llama.cpp on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
import xllamacpp
from safetensors.torch import save_file

from quire import LLM
from quire.types.sampling import PoolingParams
from tests.e2e import test_nomic_experts as nomic
from tests.e2e.test_pooling import pool
from tests.e2e.tiny import make_engine
from tests.loader import gguf_tiny

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "cat",
    "##s",
    "sit",
    "##ting",
    "on",
    "the",
    "mat",
    ".",
    "é",
]
TEXTS = ["A cat sits on the mat.", "sitting cats", "the the the the unknown"]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "layer_norm_eps": 1e-12,
}
# GGUF architecture -> transformers' model, and the keys that its names differ by from those that gguf-py knows.
KINDS = {"bert": "Bert", "nomic-bert": "NomicBert", "modern-bert": "ModernBert"}
MODERN = {
    **{"global_attn_every_n_layers": 2, "local_attention": 4, "norm_eps": SIZES["layer_norm_eps"]},
    **{"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
}
OLD_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def make(kind: str, folder: Path | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Sizes, and tensors by names that gguf-py knows; `folder` gets the same as a checkpoint of safetensors."""
    if kind == "nomic-bert-moe":
        return make_nomic_experts(folder)
    torch.manual_seed(2)
    config = getattr(transformers, f"{KINDS[kind]}Config")(**SIZES, **(MODERN if kind == "modern-bert" else {}))
    model = getattr(transformers, f"{KINDS[kind]}Model")(config).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return SIZES, tensors_of(kind, model)


def make_nomic_experts(folder: Path | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    weights = nomic.make_weights()
    name = "embeddings.word_embeddings.weight"
    weights[name] = weights[name][: len(WORDS)].clone()
    for key in [key for key in weights if key.endswith("experts.bias")]:
        weights[key].zero_()  # the files do not have it
    if folder is not None:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**nomic.CONFIG, "vocab_size": len(WORDS)}))
    for key in [key for key in weights if "experts" in key]:
        whole = weights.pop(key)
        if not key.endswith("bias"):
            whole = whole.view(nomic.EXPERTS, nomic.WIDTH, nomic.HIDDEN)
            weights[key] = whole.transpose(1, 2).contiguous() if key.endswith("w2") else whole
    sizes = {"intermediate_size": nomic.WIDTH, "num_hidden_layers": nomic.LAYERS, "layer_norm_eps": nomic.EPS}
    return {**SIZES, **sizes}, weights


def tensors_of(kind: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in model.state_dict().items() if "pooler" not in name}
    if kind != "nomic-bert":
        return found
    for layer in range(SIZES["num_hidden_layers"]):
        parts = [found.pop(f"layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        found[f"layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
    for new, old in OLD_NAMES.items():
        found = {name.replace(new, old): value for name, value in found.items()}
    return found


def write(
    kind: str, path: Path, pooling: gguf.PoolingType, quant: str | None = None, folder: Path | None = None
) -> None:
    """A GGUF file, and the same weights as safetensors in `folder`."""
    sizes, tensors = make(kind, folder)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_layer_norm_eps(sizes["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if kind == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    elif kind == "nomic-bert-moe":
        writer.add_rope_freq_base(10_000.0)
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(nomic.EXPERTS)
        writer.add_expert_used_count(2)
    elif kind == "modern-bert":
        writer.add_rope_freq_base(160_000.0)
        writer.add_rope_freq_base_swa(10_000.0)
        writer.add_sliding_window(MODERN["local_attention"])
        writer.add_sliding_window_pattern(MODERN["global_attn_every_n_layers"])
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(1 if kind == "nomic-bert-moe" else 2)
    spelled = [word if word[0] == "[" else word[2:] if word.startswith("##") else f"\u2581{word}" for word in WORDS]
    writer.add_token_list(spelled)
    writer.add_token_types([gguf.TokenType.CONTROL if word[0] == "[" else gguf.TokenType.NORMAL for word in WORDS])
    for name, token in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("eos", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(token)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == kind)
    names = gguf.get_tensor_name_map(arch, sizes["num_hidden_layers"])
    for key, tensor in tensors.items():
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        if "experts" in key:  # whose names have no ending
            found += ".weight"
        data = tensor.numpy().astype(np.float32)
        if quant is not None and found.startswith("blk") and data.ndim > 1:
            raw = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(found, gguf.quants.quantize(data, raw), raw_dtype=raw)
        else:
            writer.add_tensor(found, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_vectors(path: Path, texts: list[str] = TEXTS) -> list[np.ndarray]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.embedding, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = True, 64, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    return [np.array(server.handle_embeddings({"input": text})["data"][0]["embedding"]) for text in texts]


@pytest.mark.parametrize(
    ("kind", "pooling", "quant"),
    [
        ("bert", "MEAN", None),
        ("bert", "CLS", "Q8_0"),
        ("nomic-bert", "MEAN", None),
        ("nomic-bert-moe", "MEAN", None),
        ("modern-bert", "CLS", None),
        ("modern-bert", "MEAN", "Q8_0"),
    ],
)
def test_vectors_are_those_of_llama_cpp(kind: str, pooling: str, quant: str | None, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.gguf"
    write(kind, path, gguf.PoolingType[pooling], quant)
    with LLM(str(path)) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for output, expected in zip(outputs, llama_cpp_vectors(path), strict=True):
        found = np.array(output.outputs.embedding)
        # llama.cpp takes GELU from a float16 table, and rounds activations for quantized weights to 8 bits.
        assert float(found @ expected) > (1 - 1e-5 if quant is None else 1 - 1e-3)


@pytest.mark.parametrize("kind", ["nomic-bert-moe", "modern-bert"])
def test_a_file_and_a_folder_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.gguf"
    write(kind, path, gguf.PoolingType.MEAN, folder=tmp_path)
    prompts = [[2, 5, 6, 3], [2, 9, 10, 11, 12, 13, 8, 7, 3]]
    whole = PoolingParams(pooling="all", use_activation=False)
    found = [pool(make_engine(model, max_model_len=64), prompts, whole) for model in (path, tmp_path)]
    assert [output.pooled for output in found[0]] == [output.pooled for output in found[1]]


def test_gemma_embedders_attend_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_keys(writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_sliding_window(16)
        writer.add_pooling_type(gguf.PoolingType.MEAN)

    sizes = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32}
    name, path = "gemma-embedding", tmp_path / "gemma.gguf"
    monkeypatch.setitem(gguf_tiny.TINY_MODELS, name, gguf_tiny.TinyModel(name, "gemma3_text", sizes))
    monkeypatch.setitem(gguf_tiny._OWN_METADATA, name, own_keys)
    gguf_tiny.write_tiny_gguf(name, path)
    texts = ["the one", "a text that is longer than one window", "x"]
    with LLM(str(path), max_model_len=64) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
    assert len(outputs[1].prompt_token_ids) > 20
    for output, expected in zip(outputs, llama_cpp_vectors(path, texts), strict=True):
        assert float(np.array(output.outputs.embedding) @ expected) > 1 - 1e-4
