"""One forward pass of whole prompts over fresh blocks, without scheduler, rows or sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import HostLengths, make_batch
from quire.layers.attention import ForwardBatch
from quire.models.base import Model
from quire.planning.engine_plan import EnginePlan


@torch.inference_mode()
def forward_alone(plan: EnginePlan, model: Model, block_size: int, prompts: list[list[int]]) -> Tensor:
    """Hidden states of every token [n, hidden], one prompt after the other. The caches must be bound.

    Uses blocks from 1 on, as many for each group as the prompts need.
    """
    device = plan.platform.device
    lengths = [len(prompt) for prompt in prompts]
    blocks = [-(-length // block_size) for length in lengths]
    places = torch.cat([torch.arange(length, device=device) for length in lengths])
    line = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    attention = []
    layout = plan.ledger.layout
    next_block = [1] * len(layout.pools)
    for group in layout.groups:
        first = next_block[group.pool]
        tables = torch.zeros(len(prompts), max(blocks), dtype=torch.int32, device=device)
        for index, count in enumerate(blocks):
            tables[index, :count] = torch.arange(first, first + count, device=device)
            first += count
        next_block[group.pool] = first
        slots = tables[line, places // block_size].long() * block_size + places % block_size
        attention.append(
            plan.backends[group.index].prepare_eager(make_batch(lengths, lengths, tables, slots, block_size))
        )
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    embeds = None
    if not plan.pipeline.is_first:
        embeds = torch.zeros(len(token_ids), plan.description.hidden_size, dtype=plan.context.dtype, device=device)
    batch = ForwardBatch(attention, lengths=HostLengths(lengths, lengths))
    hidden: Tensor = model(token_ids, places, batch, embeds)
    return hidden
