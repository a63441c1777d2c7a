"""The input batch against a plain Python computation, over random rows and plans."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBuilder, Narrowing, planned_tokens
from quire.worker.request_rows import RequestRows

CPU = torch.device("cpu")
ROWS, LENGTH, BLOCK, GROUPS = 6, 64, 8, 2
LADDER = [4, 8, 12, 16, 24, 32, 64, 128, 256, 384]


class RecordingBackend(AttentionBackend):
    """Hands the batch through, so that it can be looked at."""

    name = "recording"

    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (0,)

    def workspace_bytes(self, *args: object) -> int:
        return 0

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        raise AssertionError("not called here")

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:  # type: ignore[override]  # looked at by the test
        return batch

    def write(self, *args: object) -> Tensor:
        raise AssertionError("not called here")

    def attend(self, *args: object) -> Tensor:
        raise AssertionError("not called here")


def make_state(rng: random.Random) -> tuple[RequestRows, BlockTables]:
    rows, tables = RequestRows(ROWS, LENGTH, CPU), BlockTables(GROUPS, ROWS, LENGTH, BLOCK, CPU)
    tables.tables[:] = torch.tensor([rng.randrange(1, 1000) for _ in range(tables.tables.numel())]).view_as(
        tables.tables
    )
    for row in range(ROWS):
        tokens = [rng.randrange(500) for _ in range(rng.randint(1, LENGTH))]
        rows.start(RowStart(row, str(row), tokens, 1, rng.randrange(len(tokens)), SamplingParams(), 0, ()))
    rows.apply_staged_writes()
    return rows, tables


@given(seed=st.integers(0, 1 << 32), decode_only=st.booleans())
def test_against_plain_python(seed: int, decode_only: bool) -> None:
    rng = random.Random(seed)
    state, tables = make_state(rng)
    chosen = rng.sample(range(ROWS), rng.randint(1, ROWS))
    left = [state.host_num_tokens[row] - state.host_num_computed[row] for row in chosen]
    counts = [1 if decode_only else rng.randint(1, n) for n in left]
    builder = InputBuilder(state, tables, RecordingBackend(), LADDER, CPU)
    plan = StepPlan(0, chosen, counts)
    batch = builder.build(plan, planned_tokens(plan, state))

    tokens = [
        (row, state.host_num_computed[row] + offset)
        for row, count in zip(chosen, counts, strict=True)
        for offset in range(count)
    ]
    padded = next(size for size in LADDER if size >= len(tokens))
    zeros = [0] * (padded - len(tokens))
    assert batch.rows.tolist() == chosen
    assert batch.counts.tolist() == counts
    assert batch.positions.tolist() == [position for _, position in tokens] + zeros
    assert batch.input_ids.tolist() == [int(state.token_ids[row, position]) for row, position in tokens] + zeros
    assert batch.starts == [sum(counts[:index]) for index in range(len(counts))]
    assert batch.sample_indices == [
        index for index, (n, count) in enumerate(zip(left, counts, strict=True)) if n == count
    ]
    assert batch.sample_rows == batch.sample_rows_tensor.tolist() == [chosen[index] for index in batch.sample_indices]
    assert batch.last_tokens.tolist() == [batch.starts[index] + counts[index] - 1 for index in batch.sample_indices]

    contexts = [state.host_num_computed[row] + count for row, count in zip(chosen, counts, strict=True)]
    starts = [*batch.starts, len(tokens)]
    for group, attention in enumerate(batch.forward.attention):
        assert isinstance(attention, AttentionBatch)
        assert (attention.query_lens, attention.context_lens) == (counts, contexts)
        table = tables.tables[group]
        assert torch.equal(attention.tables, table)
        assert attention.rows.tolist() == chosen
        assert (attention.contexts.tolist(), attention.query_starts.tolist()) == (contexts, starts)
        assert (attention.contexts.dtype, attention.query_starts.dtype) == (torch.int32, torch.int32)
        slots = [int(table[row, position // BLOCK]) * BLOCK + position % BLOCK for row, position in tokens]
        assert attention.slot_mapping.tolist() == slots + zeros
    assert (batch.input_ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)


@given(seed=st.integers(0, 1 << 32), above=st.integers(0, 40), every_token=st.booleans())
def test_wanted_tokens(seed: int, above: int, every_token: bool) -> None:
    rng = random.Random(seed)
    state, tables = make_state(rng)
    chosen = rng.sample(range(ROWS), rng.randint(1, ROWS))
    counts = [rng.randint(1, state.host_num_tokens[row] - state.host_num_computed[row]) for row in chosen]
    ladder = [1, 4, ROWS]
    builder = InputBuilder(state, tables, RecordingBackend(), LADDER, CPU, Narrowing(above, ladder))
    plan = StepPlan(0, chosen, counts)
    batch = builder.build(plan, planned_tokens(plan, state), every_token)
    wanted = batch.forward.wanted
    if every_token or sum(counts) <= above:
        assert wanted is None
        assert batch.hidden_indices is batch.last_tokens
        return
    assert wanted is not None
    num_samples = len(batch.sample_indices)
    indices = batch.sample_indices or [len(chosen) - 1]
    indices += indices[-1:] * (next(size for size in ladder if size >= len(indices)) - len(indices))
    assert batch.hidden_indices.tolist() == list(range(num_samples))
    assert wanted.tokens.tolist() == [batch.starts[index] + counts[index] - 1 for index in indices]
    assert wanted.finite.shape == batch.input_ids.shape
    contexts = [state.host_num_computed[chosen[index]] + counts[index] for index in indices]
    for group, attention in enumerate(wanted.attention):
        assert isinstance(attention, AttentionBatch)
        assert (attention.query_lens, attention.context_lens) == ([1] * len(indices), contexts)
        assert torch.equal(attention.tables, tables.tables[group])
        assert attention.rows.tolist() == [chosen[index] for index in indices]
        assert attention.contexts.tolist() == contexts
        assert attention.query_starts.tolist() == list(range(len(indices) + 1))


@given(st.integers(1, 384))
def test_padding_goes_to_the_next_size(count: int) -> None:
    rows, tables = RequestRows(1, 4, CPU), BlockTables(1, 1, 4, 4, CPU)
    size = InputBuilder(rows, tables, RecordingBackend(), LADDER, CPU).padded_size(count)
    assert size in LADDER
    assert size >= count
    assert all(other < count for other in LADDER if other < size)
