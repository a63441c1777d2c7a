"""What ten plans take, to the byte: parts may say it in other words, and may not say less or more by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.planning.engine_plan import plan_engine
from quire.platform.base import MemorySupply
from quire.platform.cpu import CpuPlatform
from quire.worker.worker import load_model, measure_workspace
from tests.kernels.cpu.isa import needs_library
from tests.kernels.triton.paged import needs_triton
from tests.planning.test_engine_plan import LLAMA, SLIDING, write_config

WIDE_HEAD = {**LLAMA, "vocab_size": 32_000, "tie_word_embeddings": False}
LONG = {**LLAMA, "max_position_embeddings": 40_000, "num_key_value_heads": 4}
NATIVE = {"attention_backend": "cpu_native"}
TORCH = {"attention_backend": "torch_ref"}
TRITON = {"attention_backend": "triton", "dtype": "float32"}
FIXED = {"attention_backend": "triton_fixed", "dtype": "bfloat16"}
GRAPHS = {
    "graph_sizes": (1, 2, 4, 8, 16),
    "mixed_graph_sizes": (32, 256, 1024),
    "deterministic_backend": "triton_fixed",
}
MEASURED = {**GRAPHS, "peak": 1 << 28}
SUPPLY = MemorySupply(3 << 30, "free memory", "free some memory")

PLANS = [
    pytest.param(LLAMA, NATIVE, {}, (13_841_664, 2112), id="native", marks=needs_library),
    pytest.param(
        LLAMA,
        {**NATIVE, "kv_cache_dtype": "int8", "max_num_seqs": 7},
        {},
        (11_882_688, 231),
        id="native int8",
        marks=needs_library,
    ),
    pytest.param(
        SLIDING, {**NATIVE, "block_size": 32}, {}, (8_651_776, 3136), id="native sliding", marks=needs_library
    ),
    pytest.param(LLAMA, TORCH, {}, (280_145_152, 2112), id="torch"),
    pytest.param(
        WIDE_HEAD,
        {**TORCH, "dtype": "bfloat16", "max_num_batched_tokens": 4096},
        {},
        (405_222_016, 2112),
        id="torch wide",
    ),
    pytest.param(
        LONG,
        {**TORCH, "reserved_memory": 300 << 20, "max_model_len": 33_000},
        {},
        (605_732_096, 13_303),
        id="torch long",
    ),
    pytest.param(LLAMA, TRITON, GRAPHS, (34_883_552, 2112), id="graphs", marks=needs_triton),
    pytest.param(
        SLIDING, {**FIXED, "max_num_seqs": 5}, GRAPHS, (7_431_217, 485), id="graphs fixed", marks=needs_triton
    ),
    pytest.param(
        LLAMA,
        {**TRITON, "max_num_seqs": 5, "max_num_batched_tokens": 64},
        MEASURED,
        (1_482_379_729, 165),
        id="measured",
        marks=needs_triton,
    ),
    pytest.param(
        WIDE_HEAD,
        {**FIXED, "kv_cache_memory": 1 << 24},
        MEASURED,
        (1_019_614_848, 1365),
        id="measured fixed",
        marks=needs_triton,
    ),
]


@pytest.mark.parametrize(("model", "settings", "platform", "expected"), PLANS)
def test_totals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    settings: dict[str, Any],
    platform: dict[str, Any],
    expected: tuple[int, int],
) -> None:
    """(all that is taken besides KV blocks, number of KV blocks)"""
    monkeypatch.setattr(CpuPlatform, "available_memory", lambda self, utilization=1.0: SUPPLY)
    monkeypatch.setattr("quire.platform.cpu.machine_memory", lambda: 64 << 30)
    for name, value in platform.items():
        if name != "peak":
            monkeypatch.setattr(CpuPlatform, name, value)
    given = {"load_format": "dummy", "num_threads": 2, **settings}
    config = EngineConfig.from_flat(model=write_config(tmp_path, **model), **given)
    plan = plan_engine(config)
    if "peak" in platform:
        monkeypatch.setattr(CpuPlatform, "peak_memory", lambda self, work: platform["peak"])
        plan = measure_workspace(plan, config, load_model(plan, config))
    assert plan.ledger.supply == SUPPLY
    assert (plan.ledger.total - plan.ledger.kv_bytes, plan.ledger.num_kv_blocks) == expected
