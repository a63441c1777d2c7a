"""Whole mixtures of experts by the kernels and the attention of CUDA, in Triton's interpreter, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quire.layers.experts import GroupedLinear
from quire.layers.quant.packed_weights import PackedWeightGrouped
from quire.loader.dummy import dummy_schemes, fill_dummy
from quire.models.base import BuildContext, CausalLM
from quire.models.experts import ExpertsMLP
from quire.models.registry import model_class
from tests.kernels.device import NATIVE
from tests.kernels.triton.paged import needs_triton
from tests.models.harness import run_chunks
from tests.models.zoo import SIZES

pytestmark = [needs_triton, pytest.mark.skipif(NATIVE, reason="a GPU has tests of kernels, and no interpreter")]

SMALL: dict[str, Any] = {
    **{**SIZES, "vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},  # the interpreter runs each by itself
}
# Sinks and experts in 4 bits; head norms after the rotation and a shared expert; layer norms.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "num_hidden_layers": 2},
            "layer_types": ["sliding_attention", "full_attention"],
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}),
    "phi-moe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
}
TOKENS = torch.randint(0, 64, (7,), generator=torch.Generator().manual_seed(3)).tolist()
CHUNKS = [6, 1]


def build(name: str, platform: str, *, deterministic: bool = False) -> CausalLM:
    kind, keys = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SMALL).to_dict()
    config |= {**keys, "architectures": [f"{kind}ForCausalLM"]}
    context = BuildContext(torch.float32, 64, platform=platform, deterministic=deterministic)
    model = model_class(config).from_config(config, context)
    fill_dummy(model, amplitude=0.3, schemes=dummy_schemes(model, config))
    return model


# Rows of padding hold whatever their memory did, and numpy, which the interpreter computes with, warns of it.
@pytest.mark.filterwarnings("ignore:overflow encountered in reduce:RuntimeWarning")
@pytest.mark.parametrize("name", ["gpt-oss", "hunyuan-moe", pytest.param("phi-moe", marks=pytest.mark.nightly)])
def test_same_logits_as_plain_torch(name: str) -> None:
    from quire.attention.triton import TritonAttention
    from quire.attention.triton_fixed import FixedTritonAttention

    expected = run_chunks(build(name, "elsewhere"), TOKENS, CHUNKS)
    assert expected.std() > 0.1, "the reference must vary, or the comparison says nothing"
    model = build(name, "cuda")
    packed = [isinstance(x.method, PackedWeightGrouped) for x in model.modules() if isinstance(x, GroupedLinear)]
    assert packed == ([True] * 4 if name == "gpt-oss" else [False] * 2)
    torch.testing.assert_close(run_chunks(model, TOKENS, CHUNKS, TritonAttention()), expected, atol=1e-3, rtol=1e-3)
    # What the last layer gives is read by a norm, which adds up the shared expert too.
    joined = [x._takes_shared for x in model.modules() if isinstance(x, ExpertsMLP)]
    assert joined == ([True] if name == "hunyuan-moe" else [False] * len(joined))
    fixed = build(name, "cuda", deterministic=True)
    in_chunks = run_chunks(fixed, TOKENS, CHUNKS, FixedTritonAttention())
    torch.testing.assert_close(in_chunks, expected, atol=1e-3, rtol=1e-3)
