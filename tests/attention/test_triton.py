"""Kinds of steps that Triton's attention has captured ahead: all that long prompts beside streams come to."""

from __future__ import annotations

import pytest

from quire.attention.base import HostLengths
from quire.attention.triton import MixedKind, TritonAttention
from quire.sched.step_times import Prior, StepTimes
from quire.sched.time_shares import make_shares
from tests.sched.simulation import GPU, Simulation

LONGEST = 100_000


def kinds_of(found: Simulation) -> dict[tuple[int, MixedKind], int]:
    """How many steps came of each captured size and kind."""
    backend = TritonAttention()
    kinds: dict[tuple[int, MixedKind], int] = {}
    computed: dict[int, int] = {}
    for plan in found.plans:
        computed |= {start.row: start.num_computed_tokens for start in plan.starts}
        contexts = [computed[row] + count for row, count in zip(plan.rows, plan.num_tokens, strict=True)]
        size = next((size for size in GPU.sizes if size >= sum(plan.num_tokens)), None)
        if max(plan.num_tokens) > 1 and size is not None:
            kind = backend.divide(HostLengths(plan.num_tokens, contexts)).kind
            assert isinstance(kind, MixedKind)
            kinds[size, kind] = kinds.get((size, kind), 0) + 1
        computed |= dict(zip(plan.rows, contexts, strict=True))
    return kinds


@pytest.mark.parametrize("num_streams", [0, 4])
@pytest.mark.parametrize(("mode", "target"), [("balanced", 0.023), ("interactivity", 0.008)])
def test_every_kind_of_step_beside_a_long_prompt_is_usual(mode: str, target: float, num_streams: int) -> None:
    shares = make_shares(target, mode, StepTimes(Prior(0.004, 5e-5, 2.5e-5, 1e-9), GPU.sizes, GPU.tile))
    found = Simulation(GPU, shares, budget=8192, depth=2)
    for number in range(num_streams):
        found.add(f"stream {number}", 0.0, 100, 1500)
    found.add("long", 0.5, LONGEST - 4, 4)
    for number in range(120):  # two at once
        found.add(f"short {number}", 0.5 + 0.09 * (number // 2), (8, 24, 90, 17, 40)[number % 5], 4)
    found.run()
    kinds = kinds_of(found)
    unusual = [key for key in kinds if key[1] not in TritonAttention().usual_kinds(key[0], LONGEST, is_full=False)]
    assert unusual == []
    assert any(kind.few and kind.tiles for _, kind in kinds), "chunks of few tokens beside larger ones"
