"""After the start no more memory is taken than the ledger says, whatever steps come."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.helpers import engine, make_jobs, needs_gpu, run_jobs, shaped

pytestmark = needs_gpu

# Wide and with a large vocabulary, so that what steps take is more than what allocators round to.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 100_000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SLACK = 64 << 20


def graph_bytes() -> int:
    """Memory that belongs to captured steps."""
    return sum(part["total_size"] for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] != (0, 0))


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_more_is_taken_than_was_declared(tmp_path: Path, deterministic: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    gc.collect()
    torch.cuda.empty_cache()
    before, others = torch.cuda.memory_allocated(), graph_bytes()
    settings = {"max_model_len": 16384, "max_num_seqs": 64, "kv_cache_memory": 1 << 30}
    core = engine(tmp_path, load_format="dummy", deterministic=deterministic, **settings)
    plan = core.executor._worker.plan
    graphs = sum(line.num_bytes for line in plan.ledger.entries if line.name.startswith("CUDA graphs"))
    assert graph_bytes() - others >= graphs > 0, "taken at the start"
    torch.cuda.reset_peak_memory_stats()
    while core.capture_next():
        pass
    jobs = shaped(make_jobs(60, longest=3000))
    for seed in range(2):  # the second time prompts are cached
        answers = run_jobs(core, [replace(job, name=f"{seed} {job.name}") for job in jobs], seed)
        assert all(answer.error is None for answer in answers.values())
    assert graph_bytes() - others <= graphs + SLACK
    assert torch.cuda.max_memory_allocated() - before <= plan.ledger.total + SLACK
    core.shutdown()
