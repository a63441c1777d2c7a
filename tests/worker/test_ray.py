"""Ranks that Ray places on two nodes of a cluster on this host; a node that is removed under load; Ray Serve.

Ray is no test dependency: `pip install 'quire[ray]'`, then run it with `-m nightly`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.sampling import SamplingParams
from quire.worker.hosts import HostsExecutor
from tests.e2e.serving import start
from tests.e2e.tiny import VOCAB, Driver, make_engine, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer
from tests.gpu.helpers import make_jobs, run_jobs
from tests.worker.test_multiproc import LIMIT, SETTINGS, assert_alike, is_alive, wait_until

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallel.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own


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


class Death(threading.Thread):
    """When the first of these processes has ended."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._pids, self.at = pids, 0.0
        self.start()

    def run(self) -> None:
        while all(map(is_alive, self._pids)):
            time.sleep(0.01)
        self.at = time.monotonic()


@pytest.mark.nightly
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
    death = Death(pids)
    cluster.remove_node(cluster.second, allow_graceful=False)
    with pytest.raises(EngineDeadError, match=r"rank \d on .* not been heard of|a rank that Ray had placed was lost"):
        driver.finish()
    took = time.monotonic() - death.at
    print(f"the engine failed {took:.1f} s after the rank had died")
    assert took < LIMIT
    core.shutdown()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.nightly
def test_a_server_outlives_a_node(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor starts the engine again, on the nodes that there are then; the open request has its tokens."""
    make_model(tmp_path / "model", "llama", num_attention_heads=8, head_dim=8, max_position_embeddings=1024)
    write_tokenizer(tmp_path / "model", extra_tokens=VOCAB - len(SPECIAL) - 95)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    memory = ["--kv-cache-memory", "8MiB", "--no-spare-engine"]
    running = start(str(tmp_path / "model"), "-tp", "2", "--executor", "ray", "--served-model-name", "m", *memory)
    asked = {"model": "m", "prompt": [5, 9, 33], "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    try:
        with httpx.Client(base_url=running.url, timeout=280) as client:
            calm = client.post("/v1/completions", json={**asked, "return_token_ids": True}).json()
            answers: list[Any] = []

            def ask() -> None:
                answers.append(client.post("/v1/completions", json={**asked, "return_token_ids": True}).json())

            asking = threading.Thread(target=ask)
            asking.start()
            wait_until(lambda: client.get("/load").json()["server_load"] > 0)
            cluster.remove_node(cluster.second, allow_graceful=False)
            cluster.add_node(num_cpus=1)
            asking.join(280)
        tokens = [answer["choices"][0]["token_ids"] for answer in (calm, *answers)]
        assert len(tokens) == 2
        assert tokens[0] == tokens[1]
        assert any(re.search(r"(not been heard of|was lost).*restart 1", line) for line in running.log), running.log
    finally:
        assert running.stop() == 0, "".join(running.log)


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.nightly
def test_the_deployment_of_the_guide_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its engine ends with it."""
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'quire[ray]'")
    pytest.importorskip("ray.serve")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(GUIDE.parents[2]))
    (code,) = re.findall(r"^```python\n(from ray import serve.*?)^```$", GUIDE.read_text(), flags=re.M | re.S)
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        assert code.count("8000") == 1
        exec(compile(code.replace("8000", str(port)), "parallel.md", "exec"), {})
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as streamed:
                lines = [line for line in streamed.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            assert len(lines) > 3
            assert client.post("/v1/chat/completions", json={**body, "model": "none"}).status_code == 404
            assert "quire" in client.get("/metrics").text
            assert text
        engines = engine_pids()
        assert engines
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()
    wait_until(lambda: not any(map(is_alive, engines)))


def engine_pids() -> list[int]:
    """Engine processes of this user that this test has started: they have the test's own PYTHONPATH."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"quire.engine.process" in words and f"PYTHONPATH={GUIDE.parents[2]}".encode() in environment:
                found.append(int(entry.name))
    assert os.getpid() not in found
    return found


def test_an_address_is_not_for_ray() -> None:
    with pytest.raises(ConfigError, match="executor is 'ray'"):
        EngineConfig.from_flat(model="smollm2", executor="ray", hosts_address="127.0.0.1:5900")
