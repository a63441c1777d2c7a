"""The executor whose ranks Ray places on the nodes of its cluster, an actor for each. Links are those of hosts."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any

import msgspec
import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.config.engine import EngineConfig
from quire.config.env import prepare_ray, rank_environment
from quire.platform.registry import get_platform
from quire.types.errors import EngineDeadError, EngineStartError
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase
from quire.worker.hosts import HostsExecutor
from quire.worker.joining import JoinOrder
from quire.worker.ranks import RanksExecutor

logger = get_logger(__name__)

_LOOK_EVERY = 5  # ticks between two looks at the actors


def _actor_class() -> type:
    """Local, so that it travels by value: a node imports Quire only in the process that the actor launches."""

    class QuireRank:
        def run(self, environment: dict[str, str], order: bytes) -> int:
            """The exit status of the rank. It ends with this process."""
            import subprocess
            import sys

            values = [f"{name}={value}" for name, value in environment.items()]
            # Ray sets OMP_NUM_THREADS, for work that is not ours.
            command = ["env", "-u", "OMP_NUM_THREADS", *values, sys.executable, "-P", "-m"]
            process = subprocess.Popen([*command, "quire.worker.remote_rank"], stdin=subprocess.PIPE)
            process.communicate(order + b"\n")
            return process.returncode

    return QuireRank


class RayExecutor(HostsExecutor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        RanksExecutor.__init__(self, config, report)
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            prepare_ray()
            ray.init(include_dashboard=False, log_to_driver=False)
        self._actors: list[Any] = []
        self._ends: list[Any] = []  # of each actor's run
        self._ticks, self._group = 0, None
        try:
            secret = secrets.token_bytes(32)
            self._open_door(f"{get_node_ip_address()}:0", secret)
            self._launch(config, secret)
            self._run(config)
        except BaseException:
            self._give_back()
            raise

    def _launch(self, config: EngineConfig, secret: bytes) -> None:
        uses_gpu = not get_platform(config.device.device).uses_host_memory
        bundle = {"CPU": 1, "GPU": 1} if uses_gpu else {"CPU": config.device.num_threads or 1}
        self._group = group = placement_group([bundle] * self.num_ranks, strategy="PACK")
        limit = config.parallel.join_timeout
        if not group.wait(limit):
            raise EngineStartError(
                f"Ray has found no place for {self.num_ranks} ranks of {bundle} in {limit:g} s; its cluster has"
                f" {ray.cluster_resources()} in all and {ray.available_resources()} free"
            )
        nodes = placement_group_table(group)["bundles_to_node_id"]
        num_local = Counter(nodes.values())
        actor = ray.remote(_actor_class())
        for index in range(self.num_ranks):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": where}
            self._actors.append(actor.options(**options).remote())
            order = JoinOrder(self._door.address, secret, secrets.token_hex(8), num_local[nodes[index]])
            self._ends.append(self._actors[-1].run.remote(rank_environment(), msgspec.json.encode(order)))

    def _look(self) -> None:
        super()._look()
        self._ticks += 1
        if self.failure is not None or self._ticks % _LOOK_EVERY:
            return
        ended, _ = ray.wait(self._ends, timeout=0)
        for end in ended:
            try:
                how = f"exited with status {ray.get(end)}"
            except ray.exceptions.RayError as error:
                how = f"was lost: {str(error).splitlines()[0]}"
            self._fail(EngineDeadError(f"a rank that Ray had placed {how}"))

    def _close(self) -> None:
        super()._close()
        self._give_back()

    def _give_back(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._is_ours:
            ray.shutdown()
