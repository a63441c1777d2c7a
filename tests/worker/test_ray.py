"""Ranks that Ray places on two nodes of a cluster on this host; and a node that is removed under load.

Ray is no test dependency: `pip install 'quire[ray]'`, then run it with `-m nightly`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.sampling import SamplingParams
from quire.worker.hosts import HostsExecutor
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.gpu.helpers import make_jobs, run_jobs
from tests.worker.test_multiproc import LIMIT, SETTINGS, assert_alike, is_alive, wait_until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with room for a rank each, and this process as their driver."""
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'quire[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")  # of a busy machine
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.second = found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_ranks_on_two_nodes_and_one_that_is_removed(cluster: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", num_attention_heads=8, head_dim=8)
    jobs = make_jobs(12, longest=60)
    settings = SETTINGS | {"max_model_len": 256}
    one = make_engine(model, **settings)
    expected = run_jobs(one, jobs, seed=1)
    one.shutdown()
    core = make_engine(model, tensor_parallel_size=2, executor="ray", **settings)
    assert isinstance(core.executor, HostsExecutor)
    pids = [member.join.pid for member in core.executor.members]
    assert_alike(run_jobs(core, jobs, seed=1), expected)
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True))
    driver.step()
    begin = time.monotonic()
    cluster.remove_node(cluster.second, allow_graceful=False)
    with pytest.raises(EngineDeadError, match=r"rank \d on .* not been heard of|a rank that Ray had placed was lost"):
        driver.finish()
    assert time.monotonic() - begin < 2 * LIMIT  # Ray takes some of it to remove a node
    core.shutdown()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_an_address_is_not_for_ray() -> None:
    with pytest.raises(ConfigError, match="executor is 'ray'"):
        EngineConfig.from_flat(model="smollm2", executor="ray", hosts_address="127.0.0.1:5900")
