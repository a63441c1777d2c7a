"""What any kernel that gathers the inputs of a decode step must give, in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.device import DEVICE


def check_inputs_are_gathered_by_row(gather_decode: Callable[..., Any], device: torch.device = DEVICE) -> None:
    generator = torch.Generator().manual_seed(0)
    block_size, groups = 8, 3
    token_ids = torch.randint(0, 1 << 30, (5, 50), generator=generator, dtype=torch.int32)
    tables = torch.randint(0, (1 << 31) - 1, (groups, 5, 7), generator=generator, dtype=torch.int32)
    computed = torch.tensor([0, 7, 8, 49, 0])
    rows = [3, 1, 4, 0, 2, 4]
    input_ids, positions, contexts, *slots = gather_decode(
        torch.tensor(rows, device=device), *(x.to(device) for x in (token_ids, computed, tables)), block_size
    )
    at = computed[rows].tolist()
    assert input_ids.tolist() == [int(token_ids[row, p]) for row, p in zip(rows, at, strict=True)]
    assert positions.tolist() == at
    assert contexts.tolist() == [p + 1 for p in at]
    assert [of_group.tolist() for of_group in slots] == [
        [
            int(tables[group, row, p // block_size]) * block_size + p % block_size
            for row, p in zip(rows, at, strict=True)
        ]
        for group in range(groups)
    ], "blocks of a large cache need 64 bits"
    wide = torch.int64
    assert [x.dtype for x in (input_ids, positions, contexts, *slots)] == [wide, wide, torch.int32, *[wide] * groups]
