"""Permanent rows: what the device knows about each running request, written once and then advanced in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.ops.base import Target
from quire.ops.step import START_ROWS, WRITE_BLOCKS, pack_starts
from quire.platform.transfer import PinnedRing
from quire.types.errors import EngineError
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.sampling import PoolingParams
from quire.types.step import RowStart, StepPlan

# Steps in flight may sample past the end of a request that has just finished.
SPARE_TOKENS = 8


class RequestRows:
    """Device tensors indexed by row, and the host's copy of the two lengths it needs to plan a batch.

    The last row belongs to nobody: it stands in for the padding of a batch, and its table holds the null block.
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.scratch_row = max_rows
        count = max_rows + 1
        # Always tokens of the vocabulary, also behind the known ones, which a head may read.
        self.token_ids = torch.zeros(count, max_model_len + SPARE_TOKENS, dtype=torch.int32, device=device)
        # One tensor, as START_ROWS fills it: known tokens, prompt tokens, computed tokens, seeds.
        self.numbers = torch.zeros(4, count, dtype=torch.int64, device=device)
        self.num_tokens, self.num_prompt_tokens, self.num_computed, self.seeds = self.numbers.unbind(0)
        self.host_num_tokens = [0] * count
        self.host_num_computed = [0] * count
        self.request_ids: list[str | None] = [None] * count
        self.unsettled: dict[int, int] = {}  # row -> steps in flight with drafts of it: its lengths are upper bounds
        self.attended: dict[int, int] = {}  # row -> attended_tokens of its PoolingParams, where it says them
        self.num_starts = [0] * count  # of each row, to tell results of its last request
        self._staged: list[RowStart] = []
        self._start_rows = START_ROWS.bind(Target(device.type))
        self._pinned = PinnedRing(device)

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        count = sizes.max_num_seqs
        copies = 2 if sizes.proposes else 1
        yield LedgerLine("rows", copies * count * (4 * sizes.max_model_len + 64), f"{count} requests at once")

    def start(self, start: RowStart) -> None:
        """Take a row; the device hears of it at `apply_staged_writes`."""
        row = start.row
        if self.request_ids[row] is not None:
            raise EngineError(f"row {row} given to {start.request_id} still belongs to {self.request_ids[row]}")
        self.request_ids[row] = start.request_id
        self.unsettled.pop(row, None)
        self.num_starts[row] += 1
        self.host_num_tokens[row] = len(start.token_ids)
        self.host_num_computed[row] = start.num_computed_tokens
        if isinstance(start.params, PoolingParams) and start.params.attended_tokens is not None:
            self.attended[row] = start.params.attended_tokens
        self._staged.append(start)

    def apply_staged_writes(self) -> None:
        """Write all started rows to the device."""
        if not self._staged:
            return
        starts, self._staged = self._staged, []
        longest = max(len(start.token_ids) for start in starts)
        with self._pinned.list(pack_starts(starts)) as packed:
            self._start_rows(self.token_ids, self.numbers, packed, len(starts), longest)

    def free(self, row: int) -> None:
        self.request_ids[row] = None
        self.attended.pop(row, None)

    def note_computed(self, row_list: list[int], count_list: list[int]) -> None:
        """Only the host's copy: the device itself has counted these tokens."""
        for row, count in zip(row_list, count_list, strict=True):
            self.host_num_computed[row] += count

    def note_appended(self, row_list: list[int]) -> None:
        """The same for a token that was appended to each of these rows."""
        for row in row_list:
            self.host_num_tokens[row] += 1

    def note_drafts(self, rows: Iterable[int]) -> list[tuple[int, int]]:
        """Rows whose drafts a step verifies, as `settle` takes them."""
        noted = [(row, self.num_starts[row]) for row in rows]
        for row, _ in noted:
            self.unsettled[row] = self.unsettled.get(row, 0) + 1
        return noted

    def settle(self, noted: tuple[int, int], num_rejected: int) -> None:
        """Take back what the host has counted of drafts that did not hold, if the row is still the same request's."""
        row, num_starts = noted
        if self.num_starts[row] != num_starts:
            return
        self.host_num_tokens[row] -= num_rejected
        self.host_num_computed[row] -= num_rejected
        self.unsettled[row] -= 1
        if not self.unsettled[row]:
            del self.unsettled[row]


class BlockTables:
    """Block tables of all rows and KV groups, on the device, kept current by the plans' packed deltas."""

    def __init__(
        self, num_groups: int, max_rows: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        # One spare block: a step in flight may run past the end of a request that has just finished.
        max_blocks = -(-max_model_len // block_size) + 1
        # And one spare row, see RequestRows.
        self.tables = torch.zeros(num_groups, max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self._write = WRITE_BLOCKS.bind(Target(device.type))
        self._pinned = PinnedRing(device)

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        blocks = sizes.max_model_len // sizes.block_size
        yield LedgerLine("block tables", sizes.max_num_seqs * blocks * 4, f"{blocks} blocks a request")

    def apply(self, plan: StepPlan) -> None:
        if not plan.block_ids:
            return
        columns = (plan.block_groups, plan.block_rows, plan.block_indices, plan.block_ids)
        with self._pinned.list([x for column in columns for x in column]) as packed:
            self._write(self.tables, packed.view(4, -1))
