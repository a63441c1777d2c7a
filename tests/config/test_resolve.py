"""What the user leaves unset comes from the platform, with the reason; what contradicts is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine import EngineConfig
from quire.config.resolve import DeviceDefaults, ResolvedConfig, resolve
from quire.types.errors import ConfigError

DEFAULTS = DeviceDefaults("abacus", "float32", "none", 64, 512, 1, "wooden")


def resolved(**settings: object) -> ResolvedConfig:
    return resolve(EngineConfig.from_flat(**settings), DEFAULTS)


def test_everything_unset() -> None:
    found = resolved()
    assert (found.dtype, found.max_num_seqs, found.max_num_batched_tokens) == ("float32", 64, 512)
    assert (found.long_prefill_token_threshold, found.steps_in_flight) == (256, 1)
    assert found.attention_backend == "wooden"
    assert "dtype = float32 (default on abacus)" in found.explain()
    assert "long_prefill_token_threshold = 256 (half of max_num_batched_tokens)" in found.explain()


def test_the_user_wins() -> None:
    found = resolved(
        dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=9, steps_in_flight=2, attention_backend="x"
    )
    assert (found.dtype, found.max_num_seqs, found.max_num_batched_tokens) == ("bfloat16", 3, 9)
    assert (found.steps_in_flight, found.attention_backend) == (2, "x")
    assert "max_num_seqs = 3 (set by the user)" in found.explain()


def test_every_decision_is_explained() -> None:
    names = [line.split(" = ")[0] for line in resolved().explain()]
    assert sorted(names) == sorted(ResolvedConfig.__dataclass_fields__.keys() - {"reasons"})


def test_more_rows_than_tokens_in_a_step() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs is 16 .* only 8.* --max-num-batched-tokens to 16 or more"):
        resolved(max_num_seqs=16, max_num_batched_tokens=8)


@given(st.none() | st.integers(1, 2000), st.none() | st.integers(1, 2000))
def test_limits_are_within_the_budget(budget: int | None, threshold: int | None) -> None:
    found = resolved(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
    assert 1 <= found.max_num_seqs <= found.max_num_batched_tokens
    assert 1 <= found.long_prefill_token_threshold <= found.max_num_batched_tokens
