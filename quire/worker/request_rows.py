"""Permanent rows: what the device knows about each running request, written once and then advanced in place."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.errors import EngineError
from quire.types.step import RowStart

# Steps in flight may sample past the end of a request that has just finished.
SPARE_TOKENS = 8


class RequestRows:
    """Device tensors indexed by row, and the host's copy of the two lengths it needs to plan a batch."""

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.token_ids = torch.empty(max_rows, max_model_len + SPARE_TOKENS, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)  # known: prompt and outputs
        self.num_prompt_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.host_num_tokens = [0] * max_rows
        self.host_num_computed = [0] * max_rows
        self.request_ids: list[str | None] = [None] * max_rows

    def start(self, start: RowStart) -> None:
        row, count = start.row, len(start.token_ids)
        if self.request_ids[row] is not None:
            raise EngineError(f"row {row} given to {start.request_id} still belongs to {self.request_ids[row]}")
        self.request_ids[row] = start.request_id
        self.token_ids[row, :count] = torch.tensor(start.token_ids, dtype=torch.int32)
        self.num_tokens[row] = self.host_num_tokens[row] = count
        self.num_computed[row] = self.host_num_computed[row] = start.num_computed_tokens
        self.num_prompt_tokens[row] = start.num_prompt_tokens
        self.seeds[row] = _signed(start.seed)

    def free(self, row: int) -> None:
        self.request_ids[row] = None

    def advance(self, rows: Tensor, counts: Tensor, row_list: list[int], count_list: list[int]) -> None:
        """The step computed counts[i] tokens of rows[i]."""
        self.num_computed[rows] += counts
        for row, count in zip(row_list, count_list, strict=True):
            self.host_num_computed[row] += count

    def append(self, rows: Tensor, tokens: Tensor, row_list: list[int]) -> None:
        """The step sampled tokens[i] for rows[i]; the next step finds it here without a trip to the host."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens.to(torch.int32)
        self.num_tokens[rows] += 1
        for row in row_list:
            self.host_num_tokens[row] += 1


def _signed(seed: int) -> int:
    """A 64-bit seed as the signed integer that a tensor holds."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
