"""The mask buffer: lines are written where their kind lies, in any order, and rows are told of them."""

from __future__ import annotations

import numpy as np
import torch

from quire.runner.sampling.mask_buffer import MaskBuffer, mask_words
from tests.kernels.device import DEVICE


def test_masks_are_copied_into_the_first_lines() -> None:
    buffer = MaskBuffer(70, 5, 5, DEVICE)
    masks, lines = buffer.masks, buffer.lines
    given = np.arange(1, 10, dtype=np.int32).reshape(3, 3)
    buffer.load({}, given)
    buffer.copy_staged(3)
    buffer.write(1, [4, 0], given[:2])
    expected = torch.zeros(10, 3, dtype=torch.int32)
    expected[:3] = torch.from_numpy(given)
    expected[[9, 5]] = torch.from_numpy(given[:2])
    assert torch.equal(buffer.masks.cpu(), expected)
    assert buffer.masks is masks
    assert buffer.lines is lines


def test_rows_are_told_of_their_lines_and_of_no_others() -> None:
    buffer = MaskBuffer(70, 4, 4, DEVICE)
    buffer.line_up(0, {3: 1, 0: 2})
    buffer.line_up(1, {3: 3})
    assert buffer.lines.tolist() == [[2, -1, -1, 1, -1], [-1, -1, -1, 7, -1]]
    buffer.line_up(0, {1: 1})
    assert buffer.lines.tolist() == [[-1, 1, -1, -1, -1], [-1, -1, -1, 7, -1]]


def test_masks_made_in_the_room_need_no_staging() -> None:
    buffer = MaskBuffer(1000, 4, 4, DEVICE)
    room = buffer.room(2)
    assert room.shape == (2, mask_words(1000))
    room[:] = [[7], [8]]
    buffer.load({}, room)
    buffer.copy_staged(2)
    assert buffer.masks[:, 0].tolist() == [7, 8, 0, 0, 0, 0, 0, 0]
