from __future__ import annotations

import torch

from quire.ops.select import clear_outside_range, embed, tokens_in_range

TABLE = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([11, 0, 5, 5, 8])


def test_embed_takes_rows() -> None:
    assert torch.equal(embed(TABLE, TOKENS), TABLE[TOKENS])


def test_ranges_sum_to_the_whole_and_keep_the_token_ids() -> None:
    tokens = TOKENS.clone()
    parts = [
        clear_outside_range(tokens, embed(TABLE[first : first + 4], tokens_in_range(tokens, first, 4)), first, 4)
        for first in (0, 4, 8)
    ]
    assert torch.equal(sum(parts[1:], parts[0]), TABLE[TOKENS])
    assert torch.equal(tokens, TOKENS)
