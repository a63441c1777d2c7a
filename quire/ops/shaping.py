"""Changes of some logits of a row, by masks and by tables that hold what every row asks for: edits and penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton

CHUNK = 4096  # tokens that share a highest logit


def keep_allowed(
    logits: Tensor, rows: Tensor, masks: Tensor, lines: Tensor, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [m, vocab_size] as float32 with -inf where a token is not allowed, and what was highest before.

    rows [m] int64 are columns of lines [k, max_rows] int32, which names k lines of masks [n, words] int32 for a row,
    -1 for none: bit i of word w allows token 32 * w + i. The highest logits [m, chunks] are of CHUNK tokens each, and
    infinite where one is NaN. Of the first of the k masks a row may have several, in lines one after the other: it
    takes the one that is ahead [m] int32 lines behind the named one.
    """
    count, vocab_size = logits.shape
    logits = logits.to(torch.float32)
    padding = -vocab_size % CHUNK
    padded = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf).view(count, -1, CHUNK)
    highest = torch.where(padded.isnan(), torch.inf, padded).amax(-1)
    tokens = torch.arange(vocab_size, device=logits.device)
    for index, line in enumerate(lines[:, rows].to(torch.int64)):
        if ahead is not None and index == 0:
            line = torch.where(line < 0, line, line + ahead)
        words = masks[line.clamp(min=0)][:, tokens // 32]
        allowed = (words >> (tokens % 32)) & 1 == 1
        logits = torch.where(allowed | (line < 0).unsqueeze(1), logits, -torch.inf)
    return logits, highest


KEEP_ALLOWED = Op(keep_allowed, 0.0, triton("shaping", F32), native("shaping"))


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


EDIT_LOGITS = Op(edit_logits, 0.0, triton("shaping", F32), native("shaping"), changes=(0,))
PENALIZE = Op(penalize, 1e-6, triton("shaping", F32), native("shaping"), changes=(0,))
