"""Drafts behind the known tokens of rows, whose lengths only the device knows while drafts are in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


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


PLACE_DRAFTS = Op(
    "place_drafts",
    place_drafts,
    0.0,
    (triton("place_drafts", "drafts", (torch.float32,)), native("place_drafts", "step")),
    changes=(2, 6, 7),
)


def spread_logits(logits: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Logits [m, n] of a smaller vocabulary, whose token i is i + offsets[i] of one of `size`; others are -inf."""
    tokens = torch.arange(len(offsets), device=logits.device) + offsets
    return logits.new_full((logits.shape[0], size), -torch.inf).index_copy_(1, tokens, logits)


SPREAD_LOGITS = Op("spread_logits", spread_logits, 0.0, (native("spread_logits"),))
