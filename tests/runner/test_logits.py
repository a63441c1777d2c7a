"""Logits of chosen rows, padded to the sizes that the self-check admitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.runner.prompt_logprobs import LogitsHead


class Model:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        self.seen.append(hidden.shape[0])
        return hidden * 2


@pytest.mark.parametrize(("count", "padded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_rows_are_padded_and_the_padding_is_dropped(count: int, padded: int) -> None:
    model: Any = Model()
    head = LogitsHead(model, [4, 8, 16])
    hidden = torch.arange(40.0).view(20, 2)
    assert torch.equal(head(hidden[:count]), hidden[:count] * 2)
    assert model.seen == [padded]
    assert head.max_rows == 16
