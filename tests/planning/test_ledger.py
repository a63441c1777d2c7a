"""The ledger: never more than there is, always room for one longest request, and a refusal whose fix works."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from quire.kv.layout import LayerKV, plan_layout
from quire.planning.ledger import MIN_CONTEXT, MemoryDemand, MemoryLedger, make_ledger
from quire.platform.base import DefaultMemory, MemorySupply
from quire.types.errors import MemoryPlanError
from quire.types.ledger import LedgerLine
from quire.utils.units import parse_bytes

MIB = 1 << 20
LLAMA = plan_layout([LayerKV("full", None, 1024)] * 4, block_size=16)  # 64 KiB a block, 16 tokens
UNEQUAL = plan_layout(  # three pools
    [LayerKV("sliding", 32, 256)] * 5 + [LayerKV("full", None, 512), LayerKV("state", bytes_per_row=8192)],
    block_size=16,
)
GEMMA = plan_layout([LayerKV("sliding", 32, 512)] * 5 + [LayerKV("full", None, 512)], block_size=16)


def make_demand(**changes: object) -> MemoryDemand:
    values: dict[str, object] = {
        "weights": LedgerLine("weights", 100 * MIB, "25 M parameters in float32"),
        "parts": (LedgerLine("rows", MIB, "4 requests at once"), LedgerLine("activations", 9 * MIB, "steps")),
        "layout": LLAMA,
        "trained_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
    }
    return MemoryDemand(**{**values, **changes})  # type: ignore[arg-type]  # any field may be replaced


def plan(demand: MemoryDemand, supply: int, kv: int | None = None, length: int | None = None) -> MemoryLedger:
    default = DefaultMemory((supply - demand.fixed) // 4, "a quarter of it")
    return make_ledger(demand, MemorySupply(supply, "free memory", "free some memory"), kv, default, length)


def test_everything_fits() -> None:
    ledger = plan(make_demand(), 1000 * MIB)
    assert ledger.max_model_len == 2048
    assert ledger.max_model_len_reason == "what the model was trained for"
    assert [entry.name for entry in ledger.entries] == ["weights", "KV blocks", "rows", "activations"]
    assert ledger.num_kv_blocks == 4 * (2048 // 16 + 1), "four requests of full length and no more"
    assert "100MiB  25 M parameters" in ledger.format()
    assert "of 1000MiB available (free memory)" in ledger.format()
    assert ledger.kv_reason == "all that 4 requests can fill, by default; --kv-cache-memory changes it"
    assert f"KV blocks: {ledger.kv_reason}\n" in ledger.format()
    assert ledger.format().endswith("max_model_len = 2048 (what the model was trained for)")


def test_a_small_default_shortens_the_context_and_says_so() -> None:
    ledger = plan(make_demand(), 126 * MIB)  # a quarter of the 16 MiB left: 64 blocks, one of them null
    assert ledger.max_model_len == 63 * 16
    assert "trained for 2048" in ledger.max_model_len_reason
    assert ledger.kv_reason == "a quarter of it, by default; --kv-cache-memory changes it"
    assert (ledger.kv_bytes, ledger.num_kv_tokens) == (4 * MIB, 64 * 16)


def test_the_default_grows_to_the_shortest_context_worth_serving() -> None:
    demand = make_demand()
    ledger = plan(demand, demand.fixed + demand.kv_bytes(MIN_CONTEXT))
    assert ledger.max_model_len == MIN_CONTEXT
    assert ledger.kv_reason.startswith(f"one request of {MIN_CONTEXT} tokens, by default")


def test_a_context_the_user_sets_may_be_shorter_than_that() -> None:
    demand = make_demand()
    ledger = plan(demand, demand.fixed + demand.kv_bytes(20), length=20)
    assert (ledger.max_model_len, ledger.max_model_len_reason) == (20, "set by the user")


def test_memory_that_the_user_sets_is_taken_as_it_is() -> None:
    ledger = plan(make_demand(), 1000 * MIB, kv=500 * MIB)
    assert ledger.num_kv_blocks == 500 * 16
    assert ledger.kv_reason == "--kv-cache-memory, set by the user"


def test_a_context_longer_than_trained() -> None:
    with pytest.raises(MemoryPlanError, match=r"max_model_len is 4096 .* trained for 2048 .*--max-model-len 2048"):
        plan(make_demand(), 1000 * MIB, length=4096)


def test_kv_memory_too_small_for_the_context() -> None:
    with pytest.raises(
        MemoryPlanError,
        match=r"kv_cache_memory is 4MiB but one request of 2048 tokens needs 8\.062MiB of KV blocks; "
        r"set --max-model-len 1008 or --kv-cache-memory 9MiB",
    ):
        plan(make_demand(), 1000 * MIB, kv=4 * MIB, length=2048)


def test_kv_memory_too_small_for_anything() -> None:
    with pytest.raises(MemoryPlanError, match=r"is 1000B but .* 128 tokens .*; set --kv-cache-memory 1MiB$"):
        plan(make_demand(), 1000 * MIB, kv=1000)


def test_more_kv_memory_than_there_is() -> None:
    with pytest.raises(MemoryPlanError) as info:
        plan(make_demand(), 150 * MIB + MIB // 2, kv=200 * MIB)
    assert str(info.value).splitlines() == [
        "not enough memory: needed 310MiB; available 150.5MiB (free memory); set --kv-cache-memory 40MiB",
        "weights          100MiB  25 M parameters in float32",
        "KV blocks        200MiB  3200 blocks, 51200 tokens",
        "rows               1MiB  4 requests at once",
        "activations        9MiB  steps",
        "total            310MiB  of 150.5MiB available (free memory)",
    ]


def test_too_long_a_context_for_the_memory() -> None:
    with pytest.raises(MemoryPlanError, match=r"available 114MiB \(free memory\); set --max-model-len 1008\n"):
        plan(make_demand(), 114 * MIB, length=2048)


def test_memory_for_others_is_counted_and_named() -> None:
    others = (LedgerLine("reserved", 200 * MIB, ""), LedgerLine("spare engine process", 100 * MIB, ""))
    ledger = plan(make_demand(others=others), 1000 * MIB)
    assert ledger.entries[-2:] == others
    rows = [line for line in ledger.format().splitlines() if "MiB  " in line]
    assert len({line.index("MiB  ") for line in rows}) == 1, "a column"
    assert ledger.total <= 1000 * MIB
    expected = r"available 400MiB \(free memory\); free .*, lower --reserved-memory, or set --no-spare-engine if it"
    with pytest.raises(MemoryPlanError, match=expected):
        plan(make_demand(others=others), 400 * MIB)


@pytest.mark.parametrize(
    ("supply", "fix"),
    [
        (105, "--max-num-batched-tokens or --max-num-seqs, or free some memory"),
        (99, "a smaller model, keep its weights smaller with --quantization, or free some memory"),
    ],
)
def test_no_room_for_any_context(supply: int, fix: str) -> None:
    with pytest.raises(MemoryPlanError, match=fix):
        plan(make_demand(), supply * MIB)


DEMANDS = st.builds(
    make_demand,
    weights=st.builds(LedgerLine, st.just("weights"), st.integers(1, 100 * MIB), st.just("")),
    parts=st.tuples(st.builds(LedgerLine, st.just("rows"), st.integers(0, 11 * MIB), st.just(""))),
    layout=st.sampled_from([LLAMA, GEMMA, UNEQUAL]),
    trained_len=st.integers(1, 5000),
    max_num_batched_tokens=st.integers(1, 300),
    max_num_seqs=st.integers(1, 20),
)


def apply_fix(message: str, kv: int | None, length: int | None) -> tuple[int | None, int | None]:
    """What a user does who follows the message: the first of two alternatives."""
    fix = message.splitlines()[0].rpartition(";")[2].partition(" or --")[0]
    flags = dict(re.findall(r"--(kv-cache-memory|max-model-len) (\d\w*)", fix))
    assume(flags)  # the others ask for another model or machine
    if "kv-cache-memory" in flags:
        kv = parse_bytes(flags["kv-cache-memory"])
    return kv, int(flags.get("max-model-len", 0)) or length


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    demand=DEMANDS,
    more=st.integers(-MIB, 40 * MIB),
    kv=st.none() | st.integers(1, 50 * MIB),
    length=st.none() | st.integers(1, 5000),
)
def test_the_suggested_fix_works(demand: MemoryDemand, more: int, kv: int | None, length: int | None) -> None:
    supply = demand.fixed + more
    ledger: MemoryLedger | None = None
    for _ in range(4):  # too long for the model, KV memory too small for it, too much for the machine
        try:
            ledger = plan(demand, supply, kv, length)
            break
        except MemoryPlanError as error:
            kv, length = apply_fix(str(error), kv, length)
    assert ledger is not None, "the fixes lead in a circle"
    assert ledger.total <= supply
    assert 1 <= ledger.max_model_len <= demand.trained_len
    assert length is None or ledger.max_model_len == length
    needed = demand.layout.blocks_for(ledger.max_model_len, demand.max_num_batched_tokens)
    assert all(count > least for count, least in zip(ledger.pool_blocks, needed, strict=True))


@given(demand=DEMANDS, more=st.integers(0, 40 * MIB))
def test_without_settings_only_a_lack_of_memory_is_refused(demand: MemoryDemand, more: int) -> None:
    enough = more >= demand.kv_bytes(min(MIN_CONTEXT, demand.trained_len))
    if enough:
        assert plan(demand, demand.fixed + more).total <= demand.fixed + more
    else:
        with pytest.raises(MemoryPlanError, match="not enough memory"):
            plan(demand, demand.fixed + more)
