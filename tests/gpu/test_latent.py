"""Models with latent attention on a GPU: CUDA graphs give the bits of eager steps, whatever a step's rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.runner.cuda_graphs import CudaGraphs
from tests.e2e.tiny import make_model
from tests.gpu.helpers import ROOMY_CACHE, SIZES, engine, make_jobs, needs_gpu, run_jobs
from tests.runner.engines import run_eagerly, spy_on

pytestmark = needs_gpu

LATENT: dict[str, Any] = {
    **{**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 32},
    **{"kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}
INDEX = {"index_topk": 64, "index_head_dim": 64, "index_n_heads": 8}
KIMI = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "q_lora_rank": None},
    **{"linear_head_dim": 64, "linear_num_heads": 4, "num_local_experts": 8},
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None},
    "deepseek_v3": {},
    "deepseek_v32": INDEX,
    "glm4_moe_lite": {},
    "glm_moe_dsa": {
        **INDEX,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "minicpm3": {},
    "kimi_linear": KIMI,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_graphs_give_the_bits_of_eager_steps(model_type: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, model_type, **{**LATENT, **MODELS[model_type]})
    settings = {"deterministic": True, "kv_cache_memory": ROOMY_CACHE, "max_num_seqs": 16}
    graphs, eager = (engine(model, **settings) for _ in range(2))
    spy, jobs = spy_on(graphs), make_jobs(24, longest=200)
    assert isinstance(spy.way, CudaGraphs)
    run_eagerly(eager)
    found, expected = (run_jobs(core, jobs, seed) for seed, core in enumerate((graphs, eager)))
    assert {name: answer.content() for name, answer in found.items()} == {
        name: answer.content() for name, answer in expected.items()
    }
    assert {shape.is_decode for shape in spy.ran} == {False, True}
