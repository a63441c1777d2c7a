"""The end of a step: each sampled token is appended to its row, and what was wrong is told beside it."""

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
) -> Tensor:
    """Append tokens [m] int32 to rows [m] int64, of which highest [m] float32 are the highest logits.

    They are infinite where a logit is NaN. All tokens of a row but the new one then count as computed; `scratch_row`
    stays as it is. Returns [m, 2] int32: the token, and OK or what was wrong (quire/types/status.py). Where logits
    were changed before the choice, raw_highest [m, parts] are the highest that the model gave.
    """
    status = torch.zeros_like(tokens)
    raw = highest
    if raw_highest is not None:
        raw = raw_highest.amax(1)
        status = torch.where(highest == torch.inf, OVERFLOW, torch.where(highest == -torch.inf, NO_TOKEN, status))
    status = torch.where(raw.isinf(), BAD_LOGITS, status)
    is_request = rows != scratch_row
    mine = rows[is_request]
    token_ids[mine, num_tokens[mine]] = tokens[is_request]
    num_computed[mine] = num_tokens[mine]
    num_tokens[mine] += 1
    return torch.stack([tokens, status.to(torch.int32)], dim=1)


def append_greedy(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_tokens: Tensor, num_computed: Tensor, scratch_row: int
) -> Tensor:
    """append_tokens of the token with the highest of logits [m, vocab_size], the lowest id among equals."""
    tokens, highest = first_max(logits.to(torch.float32))
    highest = torch.where(highest.isnan(), torch.inf, highest)
    return append_tokens(tokens.to(torch.int32), highest, rows, token_ids, num_tokens, num_computed, scratch_row)


def _rows(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    count, scratch = 1 + seed % 7, 8
    rows = torch.randperm(scratch, generator=generator)[:count]
    rows[1:2] = scratch
    lengths = torch.randint(1, 20, (scratch + 1,), generator=generator)
    return generator, rows, torch.zeros(scratch + 1, 32, dtype=torch.int32), lengths, lengths - 2, scratch


def generate_append(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None]:
    generator, rows, room, lengths, computed, scratch = _rows(seed)
    tokens = torch.randint(1, 1 << 17, rows.shape, generator=generator).int()
    values = torch.tensor([1.5, -3.0, torch.inf, -torch.inf])
    highest = values[torch.randint(4, rows.shape, generator=generator)]
    raw = values[torch.randint(4, (len(rows), 3), generator=generator)] if seed % 2 else None
    return tokens, highest, rows, room, lengths, computed, scratch, raw


def generate_greedy(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    generator, rows, room, lengths, computed, scratch = _rows(seed)
    size = (130, 3, 5000, 9001, 20000)[seed % 5]
    logits = torch.randint(1, 20, (len(rows), size), generator=generator).float()
    return logits, rows, room, lengths, computed, scratch


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
