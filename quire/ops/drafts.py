"""Drafts behind the known tokens of rows, whose lengths only the device knows while drafts are in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native


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


def generate_inputs(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    count, scratch = 1 + seed % 7, 8
    rows = torch.randperm(scratch, generator=generator)[:count]
    num_computed = torch.randint(0, 20, (scratch + 1,), generator=generator)
    num_tokens = num_computed + torch.randint(1, 4, num_computed.shape, generator=generator)
    num_tokens[scratch] = num_computed[scratch] = 0
    num_drafts = torch.randint(1, 5, rows.shape, generator=generator)
    counts = (num_tokens - num_computed)[rows] + num_drafts
    late = torch.randint(1, 3, rows.shape, generator=generator)  # how far the bounds are off
    contexts = (num_computed[rows] + counts + late).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    ahead = torch.cat([torch.arange(1 + each) for each in num_drafts.tolist()]).int()
    lines = torch.arange(count).repeat_interleave(1 + num_drafts)
    sample_contexts = (contexts - num_drafts)[lines].int() + ahead
    drafts = torch.where(ahead > 0, torch.randint(1 << 17, ahead.shape, generator=generator), -1).int()
    padded = (torch.tensor([scratch]), torch.zeros(1).int(), torch.full((1,), -1).int(), torch.ones(1).int())
    samples = (torch.cat(pair) for pair in zip((rows[lines], ahead, drafts, sample_contexts), padded, strict=True))
    rows, contexts = torch.cat([rows, padded[0]]), torch.cat([contexts, padded[3]])
    token_ids = torch.zeros(scratch + 1, 40, dtype=torch.int32)
    return rows, torch.cat([starts, starts[-1:]]), contexts, *samples, token_ids, num_tokens, num_computed


PLACE_DRAFTS = Op(
    "place_drafts",
    place_drafts,
    generate_inputs,
    0.0,
    (
        Implementation("triton", "triton.drafts:place_drafts", ("cuda",), (torch.float32,)),
        native("place_drafts", "step"),
    ),
    changes=(2, 6, 7),
)
