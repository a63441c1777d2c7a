"""The executor over Ray, with a Ray that only notes what it is asked: what it launches, and what it gives back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.types.errors import EngineStartError
from quire.worker.joining import JoinOrder
from tests.e2e.tiny import make_model


class FakeRay:
    """A cluster of one node, whose actors never run."""

    def __init__(self) -> None:
        self.runs: list[tuple[dict[str, str], JoinOrder]] = []
        self.options: list[dict[str, Any]] = []
        self.given_back: list[str] = []
        self.bundles: list[dict[str, int]] = []

    def place(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        self.bundles = bundles
        return SimpleNamespace(wait=lambda limit: True)

    def remote(self, kind: type) -> Any:
        def run(environment: dict[str, str], order: bytes) -> object:
            self.runs.append((environment, msgspec.json.decode(order, type=JoinOrder)))
            return object()

        def options(**given: Any) -> Any:
            self.options.append(given)
            actor = SimpleNamespace(run=SimpleNamespace(remote=run))
            return SimpleNamespace(remote=lambda: actor)

        return SimpleNamespace(options=options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    found, modules = FakeRay(), {}
    names = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")
    for name in names:
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    ray, util, placing, strategies = (modules[name] for name in names)
    vars(ray).update(
        is_initialized=lambda: False,
        init=lambda **settings: found.given_back.append(f"init {sorted(settings.items())}"),
        remote=found.remote,
        wait=lambda ends, timeout: ([], ends),
        kill=lambda actor: found.given_back.append("actor"),
        shutdown=lambda: found.given_back.append("ray"),
    )
    vars(util).update(get_node_ip_address=lambda: "127.0.0.1")
    vars(placing).update(
        placement_group=found.place,
        placement_group_table=lambda group: {"bundles_to_node_id": {0: "a", 1: "a"}},
        remove_placement_group=lambda group: found.given_back.append("group"),
    )
    vars(strategies).update(PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: group)
    monkeypatch.delitem(sys.modules, "quire.worker.ray_executor", raising=False)
    yield found
    sys.modules.pop("quire.worker.ray_executor", None)


def test_actors_get_what_ranks_need_and_nothing_else_and_all_is_given_back(
    fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.worker.ray_executor import RayExecutor

    for name in ("HF_HOME", "QUIRE_LOG_LEVEL", "QUIRE_API_KEY", "QUIRE_HOSTS_SECRET", "HF_TOKEN", "SOMETHING"):
        monkeypatch.setenv(name, f"my {name}")
    config = EngineConfig.from_flat(
        model=str(make_model(tmp_path, "llama")),
        tensor_parallel_size=2,
        executor="ray",
        num_threads=3,
        join_timeout=0.2,
    )
    with pytest.raises(EngineStartError, match=r"0 of 2 workers have joined at 127.0.0.1:\d+ in 0.2 s"):
        RayExecutor(config, lambda name, progress=None: None)
    assert fake.bundles == [{"CPU": 3}] * 2
    assert [one["num_cpus"] for one in fake.options] == [3, 3]
    for environment, order in fake.runs:
        environment.pop("PYTHONPATH", None)
        assert environment == {"HF_HOME": "my HF_HOME", "QUIRE_LOG_LEVEL": "my QUIRE_LOG_LEVEL"}
        assert order.num_local == 2
        assert order.secret == fake.runs[0][1].secret
    assert len({order.token for _, order in fake.runs}) == 2
    assert fake.given_back == [
        "init [('include_dashboard', False), ('log_to_driver', False)]",
        *("actor", "actor", "group", "ray"),
    ]
