"""What a step does with the permanent rows: requests start, inputs are gathered, drafts placed, tokens appended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton
from quire.ops.sample import first_max
from quire.types.status import BAD_LOGITS, NO_TOKEN, OVERFLOWS
from quire.types.step import RowStart

_FIELDS = 7  # a row's number, its tokens, where they begin, prompt tokens, computed tokens, two halves of its seed


def write_blocks(tables: Tensor, packed: Tensor) -> Tensor:
    """tables[group, row, column] = block for each column of packed [4, n] int32. Mutates and returns `tables`.

    `packed` may lie on the host where the device can read it.
    """
    groups, rows, columns, blocks = packed.to(torch.int64).unbind(0)
    tables[groups, rows, columns] = blocks.to(tables.dtype)
    return tables


WRITE_BLOCKS = Op(write_blocks, 0.0, triton("rows", F32), changes=(0,))


def pack_starts(starts: Sequence[RowStart]) -> list[int]:
    """Requests that start, as `start_rows` reads them: a header for each, then the known tokens of all."""
    headers: list[int] = []
    begin = 0
    for start in starts:
        length = len(start.token_ids)
        seed = (start.seed & 0xFFFFFFFF, start.seed >> 32 & 0xFFFFFFFF)
        headers += (start.row, length, begin, start.num_prompt_tokens, start.num_computed_tokens, *seed)
        begin += length
    return [*headers, *chain.from_iterable(start.token_ids for start in starts)]


def start_rows(token_ids: Tensor, numbers: Tensor, packed: Tensor, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """Fill the rows of `count` requests that start, as packed by `pack_starts`; the longest has `longest` tokens.

    token_ids: [rows, length] int32; numbers: [4, rows] int64: known, prompt and computed tokens, seeds. Mutates and
    returns both. `packed` may lie on the host where the device can read it.
    """
    headers, tokens = packed[: count * _FIELDS].view(count, _FIELDS).to(torch.int64), packed[count * _FIELDS :]
    for row, length, begin in headers[:, :3].tolist():
        token_ids[row, :length] = tokens[begin : begin + length]
    rows, lengths, _, prompt, computed, low, high = headers.unbind(1)
    numbers[:, rows] = torch.stack((lengths, prompt, computed, high << 32 | low & 0xFFFFFFFF))
    return token_ids, numbers


START_ROWS = Op(start_rows, 0.0, triton("rows", F32), changes=(0, 1))


def gather_decode(
    rows: Tensor, token_ids: Tensor, num_computed: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, ...]:
    """Inputs of rows [n] int64 that each compute one token: (input_ids, positions, contexts, *slots of each group).

    A position is a token's index in its row, which its slots follow; what rotates it may be another (TokenInputs).
    token_ids [max_rows, max_len] int32; num_computed [max_rows] int64; tables [groups, max_rows, max_blocks] int32.
    All are [n] int64 but for contexts, int32: how many tokens each row has computed after the step.
    """
    positions = num_computed[rows]
    input_ids = token_ids[rows, positions].to(torch.int64)
    slots = [_slots(table, rows, positions, block_size) for table in tables]
    return input_ids, positions, (positions + 1).to(torch.int32), *slots


def gather_mixed(
    rows: Tensor,
    contexts: Tensor,
    query_starts: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    tables: Tensor,
    block_size: int,
    size: int,
) -> tuple[Tensor, ...]:
    """Inputs of rows with any numbers of tokens, which then count as computed: (input_ids, positions, *slots).

    Row rows[i] has the tokens from query_starts[i] to query_starts[i + 1], of which the last has the position
    contexts[i] - 1; num_computed is set to contexts. Rows without a token are padding. Tokens beyond the last, up to
    `size`, are 0 at position 0, and go to the null block. contexts and query_starts are int32.
    """
    counts = (query_starts[1:] - query_starts[:-1]).to(torch.int64)
    total = int(query_starts[-1])
    line = torch.arange(len(rows), device=rows.device).repeat_interleave(counts, output_size=total)
    tokens = torch.arange(total, device=rows.device)
    positions = contexts[line].to(torch.int64) - query_starts[1:][line] + tokens
    token_rows = rows[line]
    present = counts > 0
    num_computed[rows[present]] = contexts[present].to(torch.int64)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, size - total))

    input_ids = token_ids[token_rows, positions].to(torch.int64)
    slots = [pad(_slots(table, token_rows, positions, block_size)) for table in tables]
    return pad(input_ids), pad(positions), *slots


def _slots(table: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where each token's key and value go: block_id * block_size + offset."""
    return table[rows, positions // block_size].to(torch.int64) * block_size + positions % block_size


def gather_sampling(
    rows: Tensor,
    table: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the op sample_within reads of rows [n]: their columns of table [4, max_rows], seeds, output positions.

    Of each row ahead [n] int32 drafts come before what is sampled.
    """
    positions = num_tokens.index_select(0, rows) - num_prompt_tokens.index_select(0, rows)
    if ahead is not None:
        positions = positions + ahead
    return table.index_select(1, rows), seeds.index_select(0, rows), positions


GATHER_DECODE = Op(gather_decode, 0.0, triton("step", F32), native("step"))
GATHER_MIXED = Op(gather_mixed, 0.0, triton("step", F32), native("step"), changes=(4,))
GATHER_SAMPLING = Op(gather_sampling, 0.0, native("step"))


def place_drafts(
    rows: Tensor,
    query_starts: Tensor,
    contexts: Tensor,
    sample_rows: Tensor,
    ahead: Tensor,
    drafts: Tensor,
    sample_contexts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
) -> Tensor:
    """Write drafts into token_ids, which is returned, and make contexts and sample_contexts, upper bounds, exact.

    rows [n] int64 with query_starts [n + 1] and contexts [n] int32 are as gather_mixed takes them. At each of
    sample_rows [m] int64, ahead [m] int32 drafts of the row come before what is sampled, the last of which is
    drafts [m] int32; sample_contexts [m] int32 says how many tokens do. A row without known tokens is padding.
    """
    counts = torch.diff(query_starts)
    exact = (num_computed[rows] + counts).to(torch.int32)
    contexts.copy_(torch.where(counts > 0, torch.minimum(contexts, exact), contexts))
    known = num_tokens[sample_rows]
    exact = (known + ahead).to(torch.int32)
    sample_contexts.copy_(torch.where(known > 0, torch.minimum(sample_contexts, exact), sample_contexts))
    is_draft = ahead > 0
    token_ids[sample_rows[is_draft], sample_contexts[is_draft].to(torch.int64) - 1] = drafts[is_draft]
    return token_ids


PLACE_DRAFTS = Op(place_drafts, 0.0, triton("drafts", F32), native("step"), changes=(2, 6, 7))


def spread_logits(logits: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Logits [m, n] of a smaller vocabulary, whose token i is i + offsets[i] of one of `size`; others are -inf."""
    tokens = torch.arange(len(offsets), device=logits.device) + offsets
    return logits.new_full((logits.shape[0], size), -torch.inf).index_copy_(1, tokens, logits)


SPREAD_LOGITS = Op(spread_logits, 0.0, native())


def append_tokens(
    tokens: Tensor,
    highest: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
    raw_highest: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Append tokens [m] int32 to rows [m] int64, of which highest [m] float32 are the highest logits.

    They are infinite where a logit is NaN. All tokens of a row but the new one then count as computed; `scratch_row`
    stays as it is. Returns [m, 2] int32: the token, and OK or what was wrong (quire/types/status.py). Where logits
    were changed before the choice, raw_highest [m, parts] are the highest that the model gave.

    With ahead [m] int32 a row may come several times, one place after the other, with 0, 1, ... drafts ahead of its
    token, which stand behind its known tokens. Then the drafts that hold are appended, and the token behind them.
    """
    status = torch.zeros_like(tokens)
    raw = highest
    if raw_highest is not None:
        raw = raw_highest.amax(1)
        status = torch.where(highest == torch.inf, OVERFLOWS, torch.where(highest == -torch.inf, NO_TOKEN, status))
    status = torch.where(raw.isinf(), BAD_LOGITS, status)
    is_request = rows != scratch_row
    if ahead is not None:
        length = num_tokens[rows] + ahead
        is_request &= _last_of_rows(tokens, rows, ahead, token_ids, length)
        num_tokens[rows[is_request]] = length[is_request]
    mine = rows[is_request]
    token_ids[mine, num_tokens[mine]] = tokens[is_request]
    num_computed[mine] = num_tokens[mine]
    num_tokens[mine] += 1
    return torch.stack([tokens, status.to(torch.int32)], dim=1)


def _last_of_rows(tokens: Tensor, rows: Tensor, ahead: Tensor, token_ids: Tensor, length: Tensor) -> Tensor:
    """Which tokens their rows end with: all drafts ahead hold, and a draft at the token's own place does not."""
    right = torch.zeros_like(tokens, dtype=torch.bool)
    right[:-1] = (ahead[1:] > 0) & (tokens == token_ids[rows, length])[:-1]
    last = torch.zeros_like(right)
    holds = True
    for place, (count, is_right) in enumerate(zip(ahead.tolist(), right.tolist(), strict=True)):
        holds = holds or count == 0
        last[place] = holds and not is_right
        holds = holds and is_right
    return last


def append_greedy(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
    ahead: Tensor | None = None,
) -> Tensor:
    """append_tokens of the token with the highest of logits [m, vocab_size], the lowest id among equals."""
    tokens, highest = first_max(logits.to(torch.float32))
    highest = torch.where(highest.isnan(), torch.inf, highest)
    state = (token_ids, num_tokens, num_computed, scratch_row)
    return append_tokens(tokens.to(torch.int32), highest, rows, *state, ahead=ahead)


APPEND_TOKENS = Op(append_tokens, 0.0, triton("step", F32), native("step"), changes=(3, 4, 5))
APPEND_GREEDY = Op(append_greedy, 0.0, triton("step", F32), native("step"), changes=(2, 3, 4))
