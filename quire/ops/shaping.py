"""Changes of some logits of a row, by tables that hold what every row asks for: edits and penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton

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


EDIT_LOGITS = Op(
    "edit_logits",
    edit_logits,
    0.0,
    (triton("edit_logits", "shaping", (torch.float32,)), native("edit_logits", "shaping")),
    changes=(0,),
)
PENALIZE = Op(
    "penalize",
    penalize,
    1e-6,
    (triton("penalize", "shaping", (torch.float32,)), native("penalize", "shaping")),
    changes=(0,),
)
