from __future__ import annotations

import torch

from quire.ops.select import gather_rows


def test_rows_come_in_the_order_asked_for_and_more_than_once() -> None:
    x = torch.arange(24.0).view(4, 2, 3)
    assert torch.equal(gather_rows(x, torch.tensor([3, 0, 3])), torch.stack([x[3], x[0], x[3]]))
