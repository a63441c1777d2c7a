"""Changes of some logits of a row, by tables that hold what every row asks for: edits and penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native

FIXED_COLUMNS = 4  # of an edit
ANY = -1  # token that an edit accepts at a place before it


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    edits: Tensor,
    starts: Tensor,
    counts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    """Add to or ban some tokens of rows [m] int64: logits [m, vocab_size] float32, changed in place and returned.

    Row r has counts[r] lines of edits [n, columns] int32 from starts[r] on: a token, the bits of the float32 that is
    added (-inf bans, and wins), how many outputs there may be at most, less one, and must be at least, then the
    tokens that the row must end with, the last first, ANY for any. A token has one number added at most. Of each row
    ahead [m] int32 drafts behind its known tokens count as known.
    """
    more = [0] * len(rows) if ahead is None else ahead.tolist()
    for line, row in enumerate(rows.tolist()):
        count, start = int(counts[row]), int(starts[row])
        if count == 0:
            continue
        mine = edits[start : start + count].to(torch.int64)
        known = int(num_tokens[row]) + more[line]
        outputs = known - int(num_prompt_tokens[row])
        active = (outputs < mine[:, 2]) & (mine[:, 3] <= outputs)
        before = mine[:, FIXED_COLUMNS:]
        places = (known - 1 - torch.arange(before.shape[1], device=logits.device)).clamp(min=0)
        active &= ((before == ANY) | (before == token_ids[row, places])).all(1)
        tokens, values = mine[active, 0], edits[start : start + count, 1].contiguous().view(torch.float32)[active]
        bans = values == -torch.inf
        logits[line, tokens[~bans]] += values[~bans]
        logits[line, tokens[bans]] = -torch.inf
    return logits


def penalize(
    logits: Tensor,
    rows: Tensor,
    penalties: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    """Penalize what rows [m] int64 have said: logits [m, vocab_size] float32, changed in place and returned.

    penalties [3, max_rows] float32: presence, frequency (both of outputs) and repetition (of the prompt too). Counts
    are taken afresh from the row's tokens; ids outside the vocabulary count nothing. Of each row ahead [m] int32
    drafts behind its known tokens count as known.
    """
    more = [0] * len(rows) if ahead is None else ahead.tolist()
    size = logits.shape[1]
    for line, row in enumerate(rows.tolist()):
        presence, frequency, repetition = penalties[:, row]
        if presence == 0.0 and frequency == 0.0 and repetition == 1.0:
            continue
        known = token_ids[row, : int(num_tokens[row]) + more[line]].to(torch.int64)
        inside = (known >= 0) & (known < size)
        outputs = known[int(num_prompt_tokens[row]) :][inside[int(num_prompt_tokens[row]) :]]
        counts = torch.bincount(outputs, minlength=size).to(torch.float32)
        seen = torch.bincount(known[inside], minlength=size) > 0
        x = logits[line]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[line] = x - counts * frequency - (counts > 0) * presence
    return logits


_ROWS, _LENGTH = 7, 40


def _rows(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    size = (33, 90, 5000)[seed % 3]
    count = 1 + seed % 5
    logits = torch.randint(-40, 40, (count, size), generator=generator) * 0.125
    rows = torch.randperm(_ROWS, generator=generator)[:count]
    token_ids = torch.randint(-1, min(size, 40) + 2, (_ROWS, _LENGTH), generator=generator).int()
    num_tokens = torch.randint(2, _LENGTH - 4, (_ROWS,), generator=generator)
    ahead = None
    if seed % 2:
        rows = rows[torch.arange(count) // 2]
        ahead = torch.randint(4, rows.shape, generator=generator).int()
    return generator, logits, rows, token_ids, num_tokens, num_tokens // 2, ahead


def generate_edits(seed: int) -> tuple[Tensor | None, ...]:
    generator, logits, rows, token_ids, num_tokens, num_prompt_tokens, ahead = _rows(seed)
    each = 12
    edits = torch.full((_ROWS * each, FIXED_COLUMNS + 2), ANY, dtype=torch.int32)
    values = torch.tensor([1.5, -2.25, -torch.inf])
    edits[:, 0] = torch.cat([torch.randperm(logits.shape[1], generator=generator)[:each] for _ in range(_ROWS)]).int()
    edits[:, 1] = values[torch.randint(3, (len(edits),), generator=generator)].view(torch.int32)
    edits[:, 2] = torch.randint(1, 60, (len(edits),), generator=generator).int()
    edits[:, 3] = torch.randint(0, 3, (len(edits),), generator=generator).int()
    rest = (num_tokens - 1).repeat_interleave(each)
    ends = token_ids[torch.arange(_ROWS).repeat_interleave(each), rest]
    chooses = torch.rand(len(edits), generator=generator) < 0.4
    edits[chooses, FIXED_COLUMNS] = ends[chooses]
    starts = torch.arange(_ROWS, dtype=torch.int32) * each
    counts = torch.randint(0, each + 1, (_ROWS,), generator=generator).int()
    counts[rows[0]] = each
    return logits, rows, edits, starts, counts, token_ids, num_tokens, num_prompt_tokens, ahead


def generate_penalties(seed: int) -> tuple[Tensor | None, ...]:
    generator, logits, rows, token_ids, num_tokens, num_prompt_tokens, ahead = _rows(seed)
    choices = torch.tensor([[0.0, 0.5, -0.25], [0.0, 0.25, 1.5], [1.0, 1.25, 0.5]])
    penalties = choices.gather(1, torch.randint(3, (3, _ROWS), generator=generator))
    penalties[2, rows[0]] = 1.25
    return logits, rows, penalties, token_ids, num_tokens, num_prompt_tokens, ahead


EDIT_LOGITS = Op(
    "edit_logits",
    edit_logits,
    generate_edits,
    0.0,
    (
        Implementation("triton", "triton.shaping:edit_logits", ("cuda",), (torch.float32,)),
        native("edit_logits", "shaping"),
    ),
    changes=(0,),
)
PENALIZE = Op(
    "penalize",
    penalize,
    generate_penalties,
    1e-6,
    (
        Implementation("triton", "triton.shaping:penalize", ("cuda",), (torch.float32,)),
        native("penalize", "shaping"),
    ),
    changes=(0,),
)
