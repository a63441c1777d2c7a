"""A model's topology on the cards of a machine, by the ledgers that `quire fit` prints. A process of its own, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.config.engine import EngineConfig
from quire.config.machines import CONTEXT_MEMORY, Machine
from quire.config.topology import Outcome, Topology, choose_topology
from quire.frontend.topology import TopologyAnswer, TopologyOrder
from quire.types.errors import MemoryPlanError, QuireError
from quire.types.ledger import LedgerLine

if TYPE_CHECKING:
    from quire.platform.base import Platform

USUAL_CARDS = 8  # of a host, where a machine's number of cards is not given


def platform_of(machine: Machine) -> Platform:
    """Imports torch, as what follows does."""
    from quire.platform.cuda import DescribedCuda

    return DescribedCuda(machine.card.upper(), machine.memory, machine.memory - CONTEXT_MEMORY)


def plan_topology(
    config: EngineConfig,
    others: Sequence[LedgerLine] = (),
    machine: Machine | None = None,
    most_replicas: int | None = None,
) -> Topology:
    """On this machine, or on another. Without its number of cards, the question is how many are needed."""
    from quire.planning.engine_plan import plan_memory
    from quire.platform.registry import get_platform

    if machine is None:
        platform = get_platform(config.device.device)
        cards, hosts, looks = platform.num_cards, 1, platform.num_cards
    else:
        platform, hosts, looks = platform_of(machine), machine.hosts, 1
        cards = machine.cards or USUAL_CARDS
        most_replicas = most_replicas if machine.cards else 1
    utilization = config.cache.gpu_memory_utilization
    supply = min(platform.available_memory(utilization, card) for card in range(looks))

    def plan(tensor: int, stages: int) -> Outcome:
        sized = config.with_sizes(tensor, stages)
        ledgers = [plan_memory(sized, others, stage, supply, platform) for stage in range(stages)]
        return Outcome(min(one.max_model_len for one in ledgers), not any(one.is_cut for one in ledgers))

    return choose_topology(plan, cards, hosts, most_replicas=most_replicas)


def answer(order: TopologyOrder) -> TopologyAnswer:
    try:
        return TopologyAnswer(plan_topology(order.config, most_replicas=order.most_replicas))
    except QuireError as error:
        return TopologyAnswer(error=str(error), is_memory=isinstance(error, MemoryPlanError))


if __name__ == "__main__":
    said = answer(msgspec.json.decode(sys.stdin.buffer.read(), type=TopologyOrder))
    sys.stdout.buffer.write(msgspec.json.encode(said))
