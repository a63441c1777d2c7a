"""The mask buffer: lines are written where their kind lies, in any order, and rows are told of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.sampling.mask_buffer import MaskBuffer, mask_words
from tests.kernels.device import DEVICE


@pytest.mark.parametrize("places", [[2, 3, 4], [0], [4, 2, 3], [1, 3]])
@pytest.mark.parametrize("kind", [0, 1])
def test_masks_are_written_into_the_lines_of_their_kind(places: list[int], kind: int) -> None:
    buffer = MaskBuffer(70, 5, 2, DEVICE)
    masks, lines = buffer.masks, buffer.lines
    given = np.arange(1, 1 + 3 * len(places), dtype=np.int32).reshape(len(places), 3)
    buffer.write(kind, places, given)
    expected = torch.zeros(10, 3, dtype=torch.int32)
    expected[[5 * kind + place for place in places]] = torch.from_numpy(given)
    assert torch.equal(buffer.masks.cpu(), expected)
    assert buffer.masks is masks
    assert buffer.lines is lines


def test_rows_are_told_of_their_lines_and_of_no_others() -> None:
    buffer = MaskBuffer(70, 4, 2, DEVICE)
    buffer.line_up(0, {3: 1, 0: 2})
    buffer.line_up(1, {3: 3})
    assert buffer.lines.tolist() == [[2, -1, -1, 1, -1], [-1, -1, -1, 7, -1]]
    buffer.line_up(0, {1: 1})
    assert buffer.lines.tolist() == [[-1, 1, -1, -1, -1], [-1, -1, -1, 7, -1]]


def test_a_room_keeps_its_masks_while_the_next_ones_are_made() -> None:
    buffer = MaskBuffer(1000, 4, 1, DEVICE)
    first = buffer.room(4)
    first[:] = 7
    buffer.write(0, [0, 1, 2, 3], first)
    second = buffer.room(2)
    assert second.shape == (2, mask_words(1000))
    second[:] = 8
    assert (first == 7).all()
    buffer.write(0, [1, 2], second)
    assert buffer.masks[:, 0].tolist() == [7, 8, 8, 7]
