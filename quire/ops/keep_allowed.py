"""Logits of which only allowed tokens stay possible, by the bits of masks that lie in a permanent buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton

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


KEEP_ALLOWED = Op(
    "keep_allowed",
    keep_allowed,
    0.0,
    (triton("keep_allowed", "shaping", (torch.float32,)), native("keep_allowed", "shaping")),
)
