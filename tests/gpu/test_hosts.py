"""A rank that joined by address and computes on a GPU: the tokens of the engine's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from tests.gpu.helpers import engine, make_jobs, needs_gpu, run_jobs, tiny_model
from tests.worker.test_hosts import SECRET, free_port, running_worker

pytestmark = needs_gpu


def test_a_rank_that_joined_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", SECRET)
    model, jobs = tiny_model(tmp_path / "model"), make_jobs(12, longest=60)
    plain = engine(model, deterministic=True)
    expected = run_jobs(plain, jobs, seed=1)
    plain.shutdown()
    address = f"127.0.0.1:{free_port()}"
    with running_worker(address, "--once"):
        settings = {"device": "cuda", "max_model_len": 1024, "deterministic": True, "kv_cache_memory": "64MiB"}
        config = EngineConfig.from_flat(model=str(model), executor="hosts", hosts_address=address, **settings)
        core, _, _ = build_engine(config)
        found = run_jobs(core, jobs, seed=1)
        core.shutdown()
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
