"""The mask buffer: lines are written where their kind lies, in any order, and rows are told of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.sampling.mask_buffer import MaskBuffer, mask_words
from tests.kernels.device import DEVICE


@pytest.mark.parametrize("kind", [0, 1])
def test_masks_are_copied_into_the_first_lines_of_their_kind(kind: int) -> None:
    buffer = MaskBuffer(70, 5, 2, DEVICE)
    masks, lines = buffer.masks, buffer.lines
    given = np.arange(1, 10, dtype=np.int32).reshape(3, 3)
    buffer.stage(given)
    assert not buffer.masks.any(), "nothing is copied yet"
    buffer.copy_staged(kind, 3)
    expected = torch.zeros(10, 3, dtype=torch.int32)
    expected[5 * kind : 5 * kind + 3] = torch.from_numpy(given)
    assert torch.equal(buffer.masks.cpu(), expected)
    assert torch.equal(buffer.of_kind(kind).cpu()[:3], torch.from_numpy(given))
    assert buffer.masks is masks
    assert buffer.lines is lines


def test_rows_are_told_of_their_lines_and_of_no_others() -> None:
    buffer = MaskBuffer(70, 4, 2, DEVICE)
    buffer.line_up(0, {3: 1, 0: 2})
    buffer.line_up(1, {3: 3})
    assert buffer.lines.tolist() == [[2, -1, -1, 1, -1], [-1, -1, -1, 7, -1]]
    buffer.line_up(0, {1: 1})
    assert buffer.lines.tolist() == [[-1, 1, -1, -1, -1], [-1, -1, -1, 7, -1]]


def test_masks_made_in_the_room_need_no_staging() -> None:
    buffer = MaskBuffer(1000, 4, 1, DEVICE)
    room = buffer.room(2)
    assert room.shape == (2, mask_words(1000))
    room[:] = [[7], [8]]
    buffer.stage(room)
    buffer.copy_staged(0, 2)
    assert buffer.masks[:, 0].tolist() == [7, 8, 0, 0]
