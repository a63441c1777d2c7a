"""Nomic's encoder with experts, which transformers does not have, beside its definition in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from quire.types.sampling import PoolingParams
from tests.e2e.test_pooling import PROMPTS, pool, vector
from tests.e2e.tiny import VOCAB, make_engine

HIDDEN, WIDTH, HEADS, LAYERS, EXPERTS, EPS = 64, 48, 4, 4, 8, 1e-5
# As the config of nomic-embed-text-v2-moe names things.
CONFIG: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    **{"vocab_size": VOCAB, "n_embd": HIDDEN, "n_inner": WIDTH, "n_head": HEADS, "n_layer": LAYERS},
    **{"n_positions": 2048, "max_trained_positions": 160, "layer_norm_epsilon": EPS, "type_vocab_size": 1},
    **{"activation_function": "gelu", "mlp_fc1_bias": True, "mlp_fc2_bias": True, "qkv_proj_bias": True},
    **{"rotary_emb_base": 10000.0, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": EXPERTS, "num_shared_experts": 0},
    **{"moe_normalize_expert_weights": False, "expert_choice_router": False, "moe_impl": "megablocks"},
    **{"prenorm": False, "use_rms_norm": False, "pad_token_id": 1},
}
WHOLE = PoolingParams(pooling="all", use_activation=False)


def make_weights() -> dict[str, Tensor]:
    """By the names, and in the shapes, of the published checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
        **{f"emb_ln.{kind}": (HIDDEN,) for kind in ("weight", "bias")},
    }
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        dense = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.out_proj": (HIDDEN, HIDDEN)}
        if index % 2 == 1:
            shapes[f"{layer}.mlp.router.layer.weight"] = (EXPERTS, HIDDEN)
            shapes |= {f"{layer}.mlp.experts.mlp.w{n}": (EXPERTS * WIDTH, HIDDEN) for n in (1, 2)}
            shapes[f"{layer}.mlp.experts.bias"] = (HIDDEN,)
        else:
            dense |= {"mlp.fc1": (WIDTH, HIDDEN), "mlp.fc2": (HIDDEN, WIDTH)}
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in dense.items()}
        shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in dense.items()}
        shapes |= {f"{layer}.norm{n}.{kind}": (HIDDEN,) for n in (1, 2) for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(5)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in weights:
        if "norm" in name or "emb_ln" in name:
            weights[name] += float(name.endswith("weight"))
    return weights


def write(folder: Path, **keys: Any) -> dict[str, Tensor]:
    weights = make_weights()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    return weights


def reference(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Hidden states [len(tokens), HIDDEN], one token and one expert after the other."""

    def affine(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)

    embeddings = weights["embeddings.word_embeddings.weight"][tokens]
    x = norm(embeddings + weights["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    size = HIDDEN // HEADS
    angles = torch.arange(len(tokens))[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in (angles.cos(), angles.sin()))

    def rotate(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        q, k, v = affine(x, f"{layer}.attn.Wqkv").view(-1, 3, HEADS, size).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) / math.sqrt(size)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = norm(x + affine(mixed, f"{layer}.attn.out_proj"), f"{layer}.norm1")
        if index % 2 == 1:
            given = experts(weights, f"{layer}.mlp", x)
        else:
            given = affine(gelu(affine(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
        x = norm(x + given, f"{layer}.norm2")
    return x


def experts(weights: dict[str, Tensor], mlp: str, x: Tensor) -> Tensor:
    up, down = (weights[f"{mlp}.experts.mlp.w{n}"].view(EXPERTS, WIDTH, HIDDEN) for n in (1, 2))
    scores = linear(x, weights[f"{mlp}.router.layer.weight"]).softmax(-1)
    chosen = scores.topk(2, dim=-1)
    rows = []
    for token, of_experts, ids in zip(x, chosen.values, chosen.indices, strict=True):
        parts = [
            score * (gelu(up[expert] @ token) @ down[expert]) for score, expert in zip(of_experts, ids, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0) + weights[f"{mlp}.experts.bias"])
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["cpu_native", "torch_ref"])
def test_hidden_states_are_those_of_the_definition(backend: str, tmp_path: Path) -> None:
    weights = write(tmp_path)
    core = make_engine(tmp_path, max_model_len=150, attention_backend=backend)
    outputs = pool(core, PROMPTS, WHOLE)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        expected = reference(weights, tokens)
        assert expected.std() > 0.3, "the reference must vary, or the comparison says nothing"
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)
    # The same bits alone and, where the budget takes two prompts at most, beside others.
    sizes = {"max_num_batched_tokens": 150, "max_num_seqs": 2}
    small = make_engine(tmp_path, max_model_len=150, attention_backend=backend, **sizes)
    assert [output.pooled for output in pool(small, PROMPTS, WHOLE)] == [output.pooled for output in outputs]
    assert pool(core, PROMPTS[4:], WHOLE)[0].pooled == outputs[4].pooled


def test_a_checkpoint_whose_experts_are_missing_is_refused_by_name(tmp_path: Path) -> None:
    weights = write(tmp_path)
    del weights["encoder.layers.1.mlp.experts.mlp.w2"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"encoder\.layers\.1\.mlp\.experts\.mlp\.w2"):
        make_engine(tmp_path, max_model_len=150)
