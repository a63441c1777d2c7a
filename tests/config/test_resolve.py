"""What the user leaves unset comes from the platform, with the reason; what contradicts is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine import EngineConfig
from quire.config.resolve import DeviceDefaults, ResolvedConfig, resolve
from quire.types.errors import ConfigError

DEFAULTS = DeviceDefaults("abacus", "float32", "default on abacus", "none", 64, 512, 1, "wooden")


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


def test_activations_are_those_of_the_method() -> None:
    defaults = replace(DEFAULTS, quantization="stored", activations="int16")
    found = resolve(EngineConfig.from_flat(), defaults)
    assert "activations = int16 (what the processor multiplies fastest)" in found.explain()
    assert resolve(EngineConfig.from_flat(activations="float32"), defaults).activations == "float32"
    # Another method has its own, which the layers know.
    assert resolve(EngineConfig.from_flat(dtype="float32"), defaults).activations == "auto"


@pytest.mark.parametrize(("typed", "why"), [("none", "dtype is set"), ("packed", "default on abacus")])
def test_a_type_that_is_set_may_leave_weights_packed(typed: str, why: str) -> None:
    defaults = replace(DEFAULTS, quantization="packed", typed_quantization=typed)
    assert resolve(EngineConfig.from_flat(), defaults).quantization == "packed"
    found = resolve(EngineConfig.from_flat(dtype="float32"), defaults)
    assert f"quantization = {typed} ({why})" in found.explain()


@pytest.mark.parametrize(("mode", "budget", "seqs"), [("interactivity", 128, 64), ("throughput", 1024, 128)])
def test_a_mode_changes_only_what_is_unset(mode: str, budget: int, seqs: int) -> None:
    found = resolved(performance_mode=mode)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (budget, seqs)
    assert f"max_num_batched_tokens = {budget} (default on abacus, for {mode})" in found.explain()
    explicit = resolved(performance_mode=mode, max_num_batched_tokens=200, max_num_seqs=7)
    assert (explicit.max_num_batched_tokens, explicit.max_num_seqs) == (200, 7)


@pytest.mark.parametrize(("mode", "target"), [("balanced", 0.14), ("interactivity", 0.049), ("throughput", 0.0)])
def test_a_mode_has_its_step_time(mode: str, target: float) -> None:
    assert resolved(performance_mode=mode).step_time_target == pytest.approx(target)
    assert resolved(performance_mode=mode, step_time_target=0.5).step_time_target == 0.5


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_step_time_that_cannot_be(value: float) -> None:
    with pytest.raises(ConfigError, match=r"step_time_target is .* number of seconds; 0 is no bound"):
        resolved(step_time_target=value)


def test_deterministic_takes_the_backend_that_is() -> None:
    fixed = replace(DEFAULTS, deterministic_backend="stone")
    assert resolve(EngineConfig.from_flat(deterministic=True), fixed).attention_backend == "stone"
    assert resolve(EngineConfig.from_flat(), fixed).attention_backend == "wooden"
    assert resolved(deterministic=True).attention_backend == "wooden", "where every backend is deterministic"


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01])
def test_a_part_of_memory_that_cannot_be(value: float) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is .* at most 1"):
        resolved(gpu_memory_utilization=value)


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


def test_forced_tokens_are_drafts_by_default_where_bits_do_not_depend_on_a_steps_shape() -> None:
    on_gpu = replace(DEFAULTS, deterministic_backend="fixed")
    for asked, expected in (
        ({}, (True, False)),
        ({"speculative_config": {"method": "prediction"}}, (True, True)),
        ({"speculative_config": {"method": "none"}}, (False, False)),
    ):
        config = EngineConfig.from_flat(**asked)
        assert tuple(resolve(config, defaults).jumps_forward for defaults in (DEFAULTS, on_gpu)) == expected
