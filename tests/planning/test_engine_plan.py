"""Planning: the ledger of a model before it is loaded, and whether the process keeps to it."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.parallel.pipeline import Pipeline
from quire.planning.engine_plan import EnginePlan, plan_engine, plan_memory
from quire.platform.cpu import CpuPlatform
from quire.types.errors import ConfigError, MemoryPlanError, UnknownNameError
from quire.worker.worker import Worker, load_model, measure_workspace
from tests.kernels.cpu.isa import needs_library
from tests.kernels.triton.paged import needs_triton
from tests.loader.gguf_tiny import write_tiny_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SLIDING = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 32,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2,
}


def write_config(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_plan(folder: Path, config: dict[str, Any], **settings: Any) -> EnginePlan:
    return plan_engine(EngineConfig.from_flat(model=write_config(folder, **config), load_format="dummy", **settings))


def entry(plan: EnginePlan, name: str) -> int:
    return next(entry.num_bytes for entry in plan.ledger.entries if entry.name == name)


def graphs(plan: EnginePlan) -> dict[str, int]:
    return {entry.name: entry.num_bytes for entry in plan.ledger.entries if entry.name.startswith("CUDA graphs")}


@pytest.mark.parametrize("config", [LLAMA, SLIDING], ids=["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_model_will_take(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    plan = make_plan(tmp_path, config, dtype=dtype)
    assert plan.dtype == getattr(torch, dtype)
    model = load_model(plan, EngineConfig.from_flat(load_format="dummy"))
    assert entry(plan, "weights") == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_a_page_is_the_keys_and_values_of_one_block_in_all_layers(tmp_path: Path) -> None:
    layout = make_plan(tmp_path, LLAMA, block_size=32, kv_cache_dtype="float32").ledger.layout
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3, 4, 5)]
    assert layout.page_bytes == 6 * 32 * 2 * (2 * 16) * 4


@needs_library
@pytest.mark.parametrize(
    ("name", "dtype", "head_bytes"),
    [("auto", torch.float16, 32), ("bfloat16", torch.bfloat16, 32), ("int8", torch.int8, 20)],
)
def test_the_type_of_the_cache_sizes_its_pages(
    tmp_path: Path, name: str, dtype: torch.dtype, head_bytes: int
) -> None:
    plan = make_plan(tmp_path, LLAMA, kv_cache_dtype=name)
    assert plan.kv_dtype == dtype
    assert plan.ledger.layout.page_bytes == 6 * 16 * 2 * 2 * head_bytes


def test_a_type_that_attention_cannot_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"int8.*torch_ref.*float32.*--kv-cache-dtype auto"):
        make_plan(tmp_path, LLAMA, kv_cache_dtype="int8", attention_backend="torch_ref")


@needs_triton
def test_heads_that_attention_has_no_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"head_dim is 512 but triton attention takes at most 256; set --device cpu"
    ):
        make_plan(tmp_path, {**LLAMA, "head_dim": 512}, attention_backend="triton")


def test_a_drafter_of_a_model_that_only_embeds_is_said_to_be_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no error: models that one server has share its flags."""
    make_plan(tmp_path, LLAMA, convert="embed", speculative_config={"method": "ngram"})
    assert "speculative_config is not used" in caplog.text
    caplog.clear()
    make_plan(tmp_path, LLAMA, speculative_config={"method": "ngram"})
    assert "speculative_config" not in caplog.text


def test_sliding_layers_share_the_pages_of_full_ones(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, SLIDING, max_num_seqs=1, max_num_batched_tokens=16, kv_cache_dtype="float32")
    layout = plan.ledger.layout
    assert [(group.kind, group.layers) for group in layout.groups] == [
        ("full", (4, 5)),
        ("sliding", (0, 1)),
        ("sliding", (2, 3)),
    ]
    assert layout.page_bytes == 2 * 16 * 2 * (2 * 16) * 4
    # One request of 512 tokens: all of them in the full group, a window and a step in the sliding ones.
    window_blocks = -(-(31 + 16 - 1) // 16) + 1
    assert plan.ledger.num_kv_blocks == 512 // 16 + 2 * window_blocks + 1


def test_settings_shape_the_ledger(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, LLAMA, kv_cache_memory=1 << 22, max_model_len=100, max_num_seqs=3)
    ledger = plan.ledger
    assert (ledger.max_model_len, ledger.num_kv_blocks) == (100, (1 << 22) // ledger.layout.page_bytes)
    few, many = (make_plan(tmp_path, LLAMA, max_num_batched_tokens=n, max_num_seqs=8) for n in (8, 800))
    assert entry(few, "activations") < entry(many, "activations")
    alone = {"speculative_config": {"method": "none"}}  # drafts have masks and samples of their own
    few, many = (make_plan(tmp_path, LLAMA, max_num_seqs=n, **alone) for n in (1, 100))
    for name in ("rows", "block tables", "masks", "sampling"):
        assert 100 * entry(few, name) == entry(many, name)


def test_planning_reads_no_weights_and_takes_no_memory(tmp_path: Path) -> None:
    huge = {**LLAMA, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 80}
    with pytest.raises(MemoryPlanError, match="weights"):
        make_plan(tmp_path, huge)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 513}, MemoryPlanError, "trained for 512"),
        ({"max_model_len": 10**12}, MemoryPlanError, "trained for 512"),  # at once, not after making tables of it
        ({"attention_backend": "magic"}, UnknownNameError, "unknown attention backend 'magic'; known: .*torch_ref"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_seqs is 9"),
        ({"kv_cache_memory": 10}, MemoryPlanError, "kv_cache_memory is 10B"),
        ({"load_format": "gguf"}, ConfigError, "load_format is 'gguf' but .* is a folder .*auto"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_memory(
            EngineConfig.from_flat(**{"model": write_config(tmp_path, **LLAMA), "load_format": "dummy", **settings})
        )


WIDE = {**LLAMA, "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
# So many heads have the scores of a long context, and are faster to run.
LONG = {**LLAMA, "num_hidden_layers": 1, "num_attention_heads": 256, "head_dim": 4, "max_position_embeddings": 1024}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; other systems need another way to measure")
@pytest.mark.parametrize(
    ("config", "settings", "prompt_lens"),
    [
        (WIDE, {"max_num_batched_tokens": 2048, "max_num_seqs": 8}, [500, 500, 400, 400, 100, 50, 50, 48]),
        (WIDE, {"max_num_batched_tokens": 64, "max_num_seqs": 64}, [4] * 64),
        (LONG, {"max_num_batched_tokens": 512, "max_num_seqs": 1}, [1000]),
    ],
    ids=["many tokens", "many rows", "many scores"],
)
def test_the_process_keeps_to_the_ledger(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], prompt_lens: list[int]
) -> None:
    settings = {"model": write_config(tmp_path, **config), "kv_cache_memory": 32 << 20, **settings}
    command = [sys.executable, "-m", "tests.planning.rss", json.dumps(settings), json.dumps(prompt_lens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["peak"] < measured["planned"], measured
    assert measured["peak"] > measured["entries"]["weights"], "the measurement itself is broken"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce RLIMIT_AS")
def test_a_limit_on_addresses_shapes_the_ledger_or_is_refused_with_it(tmp_path: Path) -> None:
    config = {**WIDE, "max_position_embeddings": 100_000, "num_hidden_layers": 16, "hidden_size": 64}
    command = [sys.executable, "-m", "tests.planning.addresses", write_config(tmp_path, **config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    roomy, tight = done.stdout.split("---\n")
    assert "a quarter of what is available, by default; --kv-cache-memory changes it" in roomy
    assert re.match(r"not enough memory: needed .*; available .* \(ulimit -v\); .*, or raise ulimit -v\n", tight)
    assert re.search(r"^total .* of .* available \(ulimit -v\)$", tight, re.MULTILINE)


def test_memory_that_cannot_be_had_after_all_is_refused_with_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: CpuPlatform, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise MemoryError(f"Unable to allocate an array of shape {shape}")

    monkeypatch.setattr(CpuPlatform, "zeros", refuse)
    config = EngineConfig.from_flat(model=write_config(tmp_path, **LLAMA), load_format="dummy")
    with pytest.raises(MemoryPlanError, match=r"^memory ran out .*Unable to allocate .*--kv-cache-memory") as info:
        Worker(config)
    assert "\nKV blocks " in str(info.value)


def test_the_kv_cache_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    Worker(EngineConfig.from_flat(model=write_config(tmp_path, **LLAMA), load_format="dummy", max_num_seqs=2))
    (line,) = (message for message in caplog.messages if message.startswith("KV cache: "))
    assert line.endswith("(all that 2 requests can fill, by default; --kv-cache-memory changes it)")


@pytest.mark.parametrize("max_model_len", [512, 513])
def test_frequencies_chosen_by_length_are_said_when_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_model_len: int
) -> None:
    dynamic = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    plan = make_plan(tmp_path, dynamic, max_model_len=max_model_len)
    load_model(plan, EngineConfig.from_flat(load_format="dummy"))
    said = [message for message in caplog.messages if message.startswith("RoPE type 'dynamic'")]
    assert len(said) == (max_model_len > 512)
    assert all("max_model_len = 513" in line and line.endswith("set --max-model-len 512") for line in said)


@pytest.mark.parametrize(
    ("name", "quant", "settings", "expected"),
    [
        ("llama", "Q4_0", {}, "float16"),
        ("llama", "F16", {}, "float16"),
        ("llama", "BF16", {}, "bfloat16"),
        ("llama", "Q4_0", {"dtype": "bfloat16"}, "bfloat16"),
        ("gemma2", "Q4_0", {}, "bfloat16"),
        ("qwen2", "Q4_0", {}, "bfloat16"),
    ],
)
def test_a_gguf_file_is_computed_in_float16_where_its_family_stays_in_range(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    quant: str,
    settings: dict[str, Any],
    expected: str,
) -> None:
    """On devices that compute in bfloat16, which has fewer bits than the file's scales."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(name, path, quant)
    config = EngineConfig.from_flat(model=str(path), **settings)
    assert plan_engine(config).settings.dtype == settings.get("dtype", "float32")
    monkeypatch.setattr(CpuPlatform, "default_dtype", torch.bfloat16)
    resolved = plan_engine(config).settings
    assert resolved.dtype == expected
    assert ("for a GGUF file of a Llama" in resolved.reasons["dtype"]) == (expected == "float16")


@needs_triton
def test_captured_steps_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory grows with the largest of them, which is no larger than the engine can need."""
    settings: dict[str, Any] = {"attention_backend": "triton", "dtype": "float32", "kv_cache_memory": 1 << 22}
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 2048}
    without = make_plan(tmp_path, LLAMA, **settings, **limits)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4, 8, 16))
    monkeypatch.setattr(CpuPlatform, "mixed_graph_sizes", (32, 256, 1024))
    plan = make_plan(tmp_path, LLAMA, **settings, **limits)
    added = plan.demand.fixed - without.demand.fixed
    assert added > 5 * 1000 * 3 * 4, "logits, what shapes them, and counts"
    few = make_plan(tmp_path, LLAMA, **settings, max_num_seqs=5, max_num_batched_tokens=256)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", ())
    few_without = make_plan(tmp_path, LLAMA, **settings, max_num_seqs=5, max_num_batched_tokens=256)
    assert 0 < few.demand.fixed - few_without.demand.fixed < added
    assert sum(graphs(plan).values()) == added
    assert graphs(few_without) == {}


@needs_triton
def test_what_was_measured_replaces_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's own memory counts as it is; what is beside steps is added, and captured steps take their share."""
    settings: dict[str, Any] = {"attention_backend": "triton", "dtype": "float32", "kv_cache_memory": 1 << 22}
    settings |= {"load_format": "dummy", "max_num_seqs": 5, "max_num_batched_tokens": 64}
    config = EngineConfig.from_flat(model=write_config(tmp_path, **LLAMA), **settings)
    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4, 8))
    monkeypatch.setattr(CpuPlatform, "mixed_graph_sizes", (32, 64))
    plan = plan_engine(config)
    model = load_model(plan, config)
    measured = {}
    for peak in (1 << 28, 1 << 29):
        monkeypatch.setattr(CpuPlatform, "peak_memory", lambda self, work, peak=peak: peak)
        measured[peak] = measure_workspace(plan, config, model)
    less, more = measured.values()
    cache = {peak - entry(plan, "step") for peak, plan in measured.items()}
    assert len(cache) == 1, "blocks that the step was measured with"
    assert {"activations", "attention"}.isdisjoint(line.name for line in less.ledger.entries)
    assert entry(more, "sampling") == entry(less, "sampling") == entry(plan, "sampling")
    forward = entry(more, "CUDA graphs") - entry(less, "CUDA graphs")
    assert forward >= 1 << 28, "a captured step is as large as the measured one"
    assert entry(more, "CUDA graphs, sampling") == entry(less, "CUDA graphs, sampling") > 0


HYBRID = {
    **LLAMA,
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("length", "ends"), [(16, [3, 6]), (8192, [1, 6])])
def test_stages_count_what_layers_keep(length: int, ends: list[int], tmp_path: Path) -> None:
    config = EngineConfig.from_flat(
        model=write_config(tmp_path, **HYBRID), load_format="dummy", max_model_len=length, pipeline_parallel_size=2
    )
    plans = [plan_engine(config, pipeline=Pipeline(stage, 2)) for stage in range(2)]
    assert [plan.pipeline.layers for plan in plans] == [(0, ends[0]), (ends[0], ends[1])]


def test_adapters_in_host_memory_are_in_the_ledger(tmp_path: Path) -> None:
    """Of a CPU, whose memory they share; as many as may stay, one a slot at least, each as large as a slot."""
    common = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    unset, few, many = (make_plan(tmp_path, LLAMA, **common, max_cpu_loras=count) for count in (None, 1, 6))
    assert entry(unset, "adapters in host memory") == entry(unset, "adapters")
    assert entry(few, "adapters in host memory") == entry(few, "adapters")
    assert entry(many, "adapters in host memory") == 3 * entry(many, "adapters")
    names = [line.name for line in make_plan(tmp_path, LLAMA).ledger.entries]
    assert "adapters in host memory" not in names


NEXT = {
    **LLAMA,
    **{"architectures": ["Qwen3NextForCausalLM"], "head_dim": 16, "full_attention_interval": 2, "num_experts": 4},
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
MAMBA = {
    **{"architectures": ["MambaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2},
    **{"state_size": 16, "expand": 2, "conv_kernel": 4, "intermediate_size": 128, "time_step_rank": 4},
}


@pytest.mark.parametrize("config", [NEXT, MAMBA], ids=["hybrid", "mamba"])
def test_max_num_seqs_follows_from_the_memory_of_states(tmp_path: Path, config: dict[str, Any]) -> None:
    roomy = make_plan(tmp_path, config, max_model_len=256, kv_cache_memory=64 << 20)
    assert roomy.settings.max_num_seqs == 64
    assert "max_num_seqs" not in roomy.ledger.format()
    small = {"max_model_len": 256, "kv_cache_memory": 2 << 20}
    plan = make_plan(tmp_path, config, **small)
    rows = plan.settings.max_num_seqs
    assert 1 <= rows < 64
    assert plan.sizes.max_num_seqs == plan.demand.max_num_seqs == rows
    assert entry(plan, "rows") < entry(roomy, "rows"), "what is sized by rows follows"
    for told in ("\n".join(plan.settings.explain()), plan.ledger.format()):
        assert f"\nmax_num_seqs = {rows} (states of more requests do not fit" in told
    # What the user asks for stays: requests whose states do not fit wait.
    asked = make_plan(tmp_path, config, **small, max_num_seqs=50)
    assert asked.settings.max_num_seqs == asked.sizes.max_num_seqs == 50
    assert f"\nmax_num_seqs = 50 (as asked; the states of {rows} fit at once)" in asked.ledger.format()
    assert "as asked" not in make_plan(tmp_path, config, **small, max_num_seqs=rows).ledger.format()


def test_drafts_follow_the_number_of_requests(tmp_path: Path) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    plan = make_plan(tmp_path, NEXT, max_model_len=256, kv_cache_memory=2 << 20, **drafts)
    assert plan.sizes.max_num_drafts == plan.settings.max_num_drafts == 4 * plan.settings.max_num_seqs
