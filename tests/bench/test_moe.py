"""`quire bench moe` on a CPU: every storage and rounding is timed; what cannot be is refused."""

from __future__ import annotations

import pytest

from quire.bench.moe import TOKENS, MoeOptions, bench_moe
from quire.kernels.cpu.library import unavailable
from quire.types.errors import ConfigError

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")


def test_times_of_each_storage() -> None:
    grids, results = bench_moe(MoeOptions(experts=4, width=32, hidden=64, top_k=2, dtype="bfloat16", repeats=1))
    assert len(results["ms"]) == 7
    assert all(len(times) == len(TOKENS) and min(times) > 0 for times in results["ms"].values())
    assert [row[0] for row in grids[0].rows] == list(results["ms"])


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ConfigError, match="top_k is 5, and there are 4 experts"):
        bench_moe(MoeOptions(experts=4, width=32, hidden=64, top_k=5, dtype="bfloat16", repeats=1))


@pytest.mark.parametrize("name", ["experts", "width", "hidden", "top_k", "repeats"])
def test_a_size_that_is_none_is_named_by_its_flag(name: str) -> None:
    sizes = {"experts": 4, "width": 32, "hidden": 64, "top_k": 2, "repeats": 1} | {name: 0}
    flag = {"hidden": "hidden-size", "top_k": "top-k"}.get(name, name)
    with pytest.raises(ConfigError, match=f"^--{flag} is 0 but must be at least 1"):
        bench_moe(MoeOptions(**sizes, dtype="bfloat16"))
