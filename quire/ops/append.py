"""The end of a step: each sampled token is appended to its row, with a status code beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native
from quire.ops.choice import first_max
from quire.types.status import BAD_LOGITS, NO_TOKEN, OVERFLOW


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
        status = torch.where(highest == torch.inf, OVERFLOW, torch.where(highest == -torch.inf, NO_TOKEN, status))
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


def _rows(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor, int, Tensor | None]:
    """Every third time rows with drafts behind their tokens."""
    generator = torch.Generator().manual_seed(seed)
    count, scratch = 1 + seed % 7, 8
    rows = torch.randperm(scratch, generator=generator)[:count]
    rows[1:2] = scratch
    lengths = torch.randint(1, 20, (scratch + 1,), generator=generator)
    token_ids = torch.zeros(scratch + 1, 32, dtype=torch.int32)
    ahead = None
    if seed % 3 == 2:
        counts = torch.randint(1, 5, rows.shape, generator=generator)
        counts[rows == scratch] = 1
        ahead = torch.cat([torch.arange(each) for each in counts.tolist()]).int()
        rows = rows.repeat_interleave(counts)
        token_ids = torch.randint(1, 3, token_ids.shape, generator=generator).int()
    return generator, rows, token_ids, lengths, lengths - 2, scratch, ahead


def generate_append(seed: int) -> tuple[Tensor | int | None, ...]:
    generator, rows, room, lengths, computed, scratch, ahead = _rows(seed)
    tokens = torch.randint(1, 1 << 17 if ahead is None else 4, rows.shape, generator=generator).int()
    values = torch.tensor([1.5, -3.0, torch.inf, -torch.inf])
    highest = values[torch.randint(4, rows.shape, generator=generator)]
    raw = values[torch.randint(4, (len(rows), 3), generator=generator)] if seed % 2 else None
    return tokens, highest, rows, room, lengths, computed, scratch, raw, ahead


def generate_greedy(seed: int) -> tuple[Tensor | int | None, ...]:
    generator, rows, room, lengths, computed, scratch, ahead = _rows(seed)
    size = (130, 3, 5000, 9001, 20000)[seed % 5]
    logits = torch.randint(1, 20, (len(rows), size), generator=generator).float()
    if ahead is not None:
        logits[torch.arange(len(rows)), torch.randint(1, 3, rows.shape, generator=generator)] = 30.0
    return logits, rows, room, lengths, computed, scratch, ahead


APPEND_TOKENS = Op(
    "append_tokens",
    append_tokens,
    generate_append,
    0.0,
    (
        Implementation("triton", "triton.step:append_tokens", ("cuda",), (torch.float32,)),
        native("append_tokens", "step"),
    ),
    changes=(3, 4, 5),
)
APPEND_GREEDY = Op(
    "append_greedy",
    append_greedy,
    generate_greedy,
    0.0,
    (
        Implementation("triton", "triton.step:append_greedy", ("cuda",), (torch.float32,)),
        native("append_greedy", "step"),
    ),
    changes=(2, 3, 4),
)
