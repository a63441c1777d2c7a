"""The parameters of rows, as the draw within limits takes them."""

from __future__ import annotations

import math

import torch

from quire.runner.sampling.draw import DrawTable
from quire.types.sampling import SamplingParams


def test_rows_keep_what_was_set_last_and_padding_is_greedy() -> None:
    table = DrawTable(1000, 3, torch.device("cpu"))
    parameters = table.parameters
    table.set(1, SamplingParams(temperature=0.5, min_p=0.1, top_k=7, top_p=0.9))
    table.set(2, SamplingParams(temperature=1.0, top_k=1000))
    table.apply_staged_writes()
    assert parameters[:, 1].tolist() == [0.5, math.log(0.1), 7.0, 0.9]
    assert parameters[:, 2].tolist() == [1.0, -math.inf, 0.0, 1.0], "a top_k of the whole vocabulary is none"
    table.set(1, SamplingParams(temperature=0.0, top_p=0.5))
    table.apply_staged_writes()
    assert parameters[:, 1].tolist() == [0.0, -math.inf, 0.0, 1.0]
    assert parameters[0, 3] == 0.0
    assert table.parameters is parameters
