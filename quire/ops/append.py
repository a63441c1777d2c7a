"""The end of a step: each sampled token is appended to its row, with a status code beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton
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


APPEND_TOKENS = Op(
    "append_tokens",
    append_tokens,
    0.0,
    (triton("append_tokens", "step", (torch.float32,)), native("append_tokens", "step")),
    changes=(3, 4, 5),
)
APPEND_GREEDY = Op(
    "append_greedy",
    append_greedy,
    0.0,
    (triton("append_greedy", "step", (torch.float32,)), native("append_greedy", "step")),
    changes=(2, 3, 4),
)
