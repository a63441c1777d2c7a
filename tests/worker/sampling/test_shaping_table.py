"""What recorded steps read of a request's parameters, and which requests they leave to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.worker.sampling.mask_buffer import MaskBuffer
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.worker.sampling.helpers import make_row, start_of

pytestmark = needs_triton
VOCAB = 100


def table_with(**row: Any) -> Any:
    from quire.worker.sampling.shaping_table import ShapingTable

    table = ShapingTable(VOCAB, 3, MaskBuffer(VOCAB, 3, 2, DEVICE), DEVICE)
    table.set(1, start_of(1, make_row(**row)))
    table.apply_staged_writes()
    return table


def edits_of(table: Any) -> list[list[int]]:
    return table.edits[1, : int(table.counts[1])].tolist()


def test_edits_are_biases_bans_of_stops_and_last_tokens_of_words() -> None:
    table = table_with(
        logit_bias={3: 1.5, VOCAB: 9.0},
        min_tokens=2,
        stop_token_ids=[8],
        eos=(7, VOCAB + 1),
        bad_words_token_ids=((5,), (1, 2, 6), (1, VOCAB)),
    )
    bias, ban = (int(np.float32(value).view(np.int32)) for value in (1.5, -np.inf))
    any_token = [-1] * 7
    assert edits_of(table) == [
        [3, bias, 2**31 - 1, 0, *any_token],
        [7, ban, 2, 0, *any_token],
        [8, ban, 2, 0, *any_token],
        [5, ban, 2**31 - 1, 0, *any_token],
        [6, ban, 2**31 - 1, 2, 2, 1, *any_token[2:]],
    ]
    assert table.penalties[:, 1].tolist() == [0.0, 0.0, 1.0]
    assert (table.shaped, table.too_large) == ({1}, set())


def test_stops_are_free_once_enough_outputs_are_there() -> None:
    assert edits_of(table_with(min_tokens=2, stop_token_ids=[8], outputs=[1, 1])) == []


def test_allowed_tokens_are_a_line_of_the_mask_buffer() -> None:
    table = table_with(allowed_token_ids=[0, 31, 32, 99, VOCAB])
    assert table.shaped == {1}
    assert table._masks.lines[1].tolist() == [-1, 4, -1, -1]
    words = table._masks.masks[4].cpu().numpy().view(np.uint32).tolist()
    assert words == [1 | 1 << 31, 1, 0, 1 << 3]


@pytest.mark.parametrize(
    "row", [{"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}, {"bad_words_token_ids": (tuple(range(8)),)}]
)
def test_the_largest_that_fit_and_one_more(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.sampling.shaping_table.MAX_EDITS", VOCAB)
    assert table_with(**row).too_large == set()
    monkeypatch.setattr("quire.worker.sampling.shaping_table.MAX_EDITS", VOCAB - 1)
    monkeypatch.setattr("quire.worker.sampling.shaping_table.MAX_BEFORE", 6)
    assert table_with(**row).too_large == {1}


def test_a_removed_row_asks_for_nothing() -> None:
    table = table_with(logit_bias={3: 1.0}, repetition_penalty=2.0, allowed_token_ids=[4])
    assert table.shaped == {1}
    table.remove(1)
    assert table.shaped == set()
    table.set(1, start_of(1, make_row()))
    table.apply_staged_writes()
    assert edits_of(table) == []
    assert table.penalties[:, 1].tolist() == [0.0, 0.0, 1.0]
    assert table._masks.lines[1].tolist() == [-1, -1, -1, -1]
    assert table.shaped == set()


@pytest.mark.parametrize(
    "row",
    [{"logit_bias": {1: 1.0}}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}],
)
def test_each_alone_shapes(row: dict[str, Any]) -> None:
    assert table_with(**row).shaped == {1}
    assert table_with().shaped == set()
