"""Permanent rows: what the device knows about each running request, written once and then advanced in place."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from quire.platform.transfer import upload
from quire.types.errors import EngineError
from quire.types.step import RowStart

# Steps in flight may sample past the end of a request that has just finished.
SPARE_TOKENS = 8


class RequestRows:
    """Device tensors indexed by row, and the host's copy of the two lengths it needs to plan a batch.

    The last row belongs to nobody: it stands in for the padding of a batch, and its table holds the null block.
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.scratch_row = max_rows
        count = max_rows + 1
        self.token_ids = torch.empty(count, max_model_len + SPARE_TOKENS, dtype=torch.int32, device=device)
        self.token_ids[self.scratch_row, 0] = 0
        # One tensor, so that starting rows is one copy: known tokens, prompt tokens, computed tokens, seeds.
        self._numbers = torch.zeros(4, count, dtype=torch.int64, device=device)
        self.num_tokens, self.num_prompt_tokens, self.num_computed, self.seeds = self._numbers.unbind(0)
        self.host_num_tokens = [0] * count
        self.host_num_computed = [0] * count
        self.request_ids: list[str | None] = [None] * count
        self._staged: list[RowStart] = []

    def start(self, start: RowStart) -> None:
        """Take a row; the device hears of it at `apply_staged_writes`."""
        row = start.row
        if self.request_ids[row] is not None:
            raise EngineError(f"row {row} given to {start.request_id} still belongs to {self.request_ids[row]}")
        self.request_ids[row] = start.request_id
        self.host_num_tokens[row] = len(start.token_ids)
        self.host_num_computed[row] = start.num_computed_tokens
        self._staged.append(start)

    def apply_staged_writes(self) -> None:
        """Write all started rows to the device, in two copies."""
        if not self._staged:
            return
        device, starts = self.token_ids.device, self._staged
        self._staged = []
        lengths = [len(start.token_ids) for start in starts]
        known = starts[0].token_ids if len(starts) == 1 else list(chain.from_iterable(s.token_ids for s in starts))
        tokens = upload(known, device)
        numbers = [
            [start.row for start in starts],
            lengths,
            [start.num_prompt_tokens for start in starts],
            [start.num_computed_tokens for start in starts],
            [_signed(start.seed) for start in starts],
        ]
        packed = upload([x for column in numbers for x in column], device, torch.int64).view(5, -1)
        rows = packed[0]
        self._numbers[:, rows] = packed[1:]
        if len(starts) == 1:
            self.token_ids[starts[0].row, : lengths[0]] = tokens
            return
        line = rows.repeat_interleave(packed[1], output_size=sum(lengths))
        first = (packed[1].cumsum(0) - packed[1]).repeat_interleave(packed[1], output_size=sum(lengths))
        self.token_ids[line, torch.arange(sum(lengths), device=device) - first] = tokens

    def free(self, row: int) -> None:
        self.request_ids[row] = None

    def advance(self, rows: Tensor, counts: Tensor, row_list: list[int], count_list: list[int]) -> None:
        """The step computed counts[i] tokens of rows[i]."""
        self.num_computed[rows] += counts
        for row, count in zip(row_list, count_list, strict=True):
            self.host_num_computed[row] += count

    def advance_host(self, row_list: list[int]) -> None:
        """The device itself computed and appended one token of each of these rows."""
        for row in row_list:
            self.host_num_computed[row] += 1
            self.host_num_tokens[row] += 1

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
