"""A kind of KV group is one file and one registry line: the file is written here, by name."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kv.kinds import KINDS
from quire.kv.layout import LayerKV, plan_layout
from tests.fakes import FIRST_READ, generate_alone
from tests.sched.driver import Driver, make_request

KIND = '''
"""Layers whose tokens read the token before them and every token since the last multiple of the window."""
from quire.kv.kinds import Sliding

class Staircase(Sliding):
    def first_needed(self, num_tokens):
        return max(0, num_tokens // self.window * self.window - 1) // self.block_size

    def blocks_for(self, num_tokens, step_tokens):
        return min(-(-num_tokens // self.block_size), (self.window + step_tokens) // self.block_size + 2)
'''


@pytest.fixture
def staircase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack) -> None:
    (tmp_path / "added_kinds").mkdir()
    (tmp_path / "added_kinds" / "staircase.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("added_kinds", "added_kinds.staircase"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    contexts.enter_context(KINDS.with_entries({"staircase": "added_kinds.staircase:Staircase"}))


SETTINGS: dict[str, Any] = {
    "max_examples": 40,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(**SETTINGS)
@given(
    window=st.integers(1, 9),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 16),
    depth=st.integers(1, 3),
    spare=st.integers(0, 6),
    sizes=st.sampled_from([(1, 1), (1, 2)]),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=6),
)
@pytest.mark.usefixtures("staircase")
def test_a_kind_that_is_added_runs_any_schedule(
    window: int,
    block_size: int,
    budget: int,
    depth: int,
    spare: int,
    sizes: tuple[int, int],
    prompts: list[tuple[int, int]],
) -> None:
    layers = [LayerKV("full", None, sizes[0]), LayerKV("staircase", window, sizes[1])]
    least = plan_layout(layers, block_size).blocks_for(40, budget)
    driver = Driver(
        layers=layers,
        block_size=block_size,
        num_blocks=[1 + count + spare for count in least],
        max_num_seqs=3,
        budget=budget,
        max_model_len=40,
        depth=depth,
    )
    driver.executor.first_read = {**FIRST_READ, "staircase": lambda at, size: max(0, at // size * size - 1)}
    requests = [make_request(str(index), range(length), count) for index, (length, count) in enumerate(prompts)]
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        assert driver.ending(request.request_id) == generate_alone(request, 40)
