"""Permanent rows: written once, advanced in place, and the host's copy of the lengths never differs."""

from __future__ import annotations

import pytest
import torch

from quire.ops.step import append_tokens
from quire.runner.request_rows import SPARE_TOKENS, RequestRows
from quire.types.errors import EngineError
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart

CPU = torch.device("cpu")


def start(row: int, tokens: list[int], computed: int = 0, seed: int = 0, prompt: int | None = None) -> RowStart:
    num_prompt_tokens = len(tokens) if prompt is None else prompt
    return RowStart(row, f"r{row}", tokens, num_prompt_tokens, computed, SamplingParams(), seed, ())


def begin(rows: RequestRows, *starts: RowStart) -> None:
    for one in starts:
        rows.start(one)
    rows.apply_staged_writes()


def assert_in_step(rows: RequestRows) -> None:
    assert rows.num_tokens.tolist() == rows.host_num_tokens
    assert rows.num_computed.tolist() == rows.host_num_computed


def test_a_row_holds_what_the_request_starts_with() -> None:
    rows = RequestRows(3, 10, CPU)
    begin(rows, start(2, [5, 6, 7, 8], computed=2, prompt=3))
    assert rows.token_ids[2, :4].tolist() == [5, 6, 7, 8]
    assert (rows.host_num_tokens[2], rows.host_num_computed[2]) == (4, 2)
    assert rows.num_prompt_tokens.tolist() == [0, 0, 3, 0]
    assert_in_step(rows)


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 63)])
def test_every_64_bit_seed_keeps_its_bits(seed: int) -> None:
    rows = RequestRows(1, 4, CPU)
    begin(rows, start(0, [1], seed=seed))
    assert int(rows.seeds[0]) % (1 << 64) == seed % (1 << 64)


def test_a_row_changes_hands_only_after_it_was_freed() -> None:
    rows = RequestRows(2, 8, CPU)
    begin(rows, start(0, [1, 2, 3, 4]))
    with pytest.raises(EngineError, match="row 0 given to r0 still belongs to r0"):
        rows.start(start(0, [9]))
    rows.free(0)
    begin(rows, start(0, [9], computed=0))
    assert (rows.host_num_tokens[0], rows.token_ids[0, 0].item()) == (1, 9)
    assert_in_step(rows)


def test_rows_that_start_together_keep_apart() -> None:
    rows = RequestRows(4, 8, CPU)
    starts = [start(3, [1, 2], seed=7), start(0, [3], computed=0, seed=-1), start(2, [4, 5, 6], computed=2, prompt=1)]
    begin(rows, *starts)
    for one in starts:
        assert rows.token_ids[one.row, : len(one.token_ids)].tolist() == one.token_ids
        assert (int(rows.seeds[one.row]), int(rows.num_prompt_tokens[one.row])) == (one.seed, one.num_prompt_tokens)
    assert_in_step(rows)


def test_the_device_itself_may_advance_rows() -> None:
    rows = RequestRows(2, 8, CPU)
    begin(rows, start(1, [1, 2], computed=1))
    rows.note_computed([1], [1])
    rows.note_appended([1])
    assert (rows.host_num_tokens[1], rows.host_num_computed[1]) == (3, 2)


def test_steps_in_flight_may_run_past_the_end() -> None:
    rows = RequestRows(1, 4, CPU)
    begin(rows, start(0, [1, 2, 3, 4]))
    state = (rows.token_ids, rows.num_tokens, rows.num_computed, rows.scratch_row)
    for token in range(SPARE_TOKENS):
        append_tokens(torch.tensor([token], dtype=torch.int32), torch.ones(1), torch.tensor([0]), *state)
    assert rows.token_ids[0].tolist() == [1, 2, 3, 4, *range(SPARE_TOKENS)]
