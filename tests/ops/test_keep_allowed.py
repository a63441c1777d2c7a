"""Masks over logits, against plain Python."""

from __future__ import annotations

import torch

from quire.ops.shaping import CHUNK, keep_allowed
from tests.ops.inputs.keep_allowed import generate_inputs


def test_every_bit_of_every_line_counts() -> None:
    for seed in range(4):
        logits, rows, masks, lines, *_ = generate_inputs(seed)
        kept, highest = keep_allowed(logits, rows, masks, lines)
        assert kept.dtype == torch.float32
        for place, row in enumerate(rows.tolist()):
            own = [masks[line].tolist() for line in lines[:, row].tolist() if line >= 0]
            for token in range(0, logits.shape[1], 7):
                allowed = all(words[token // 32] >> (token % 32) & 1 for words in own)
                assert kept[place, token] == (logits[place, token] if allowed else -torch.inf)
        for chunk, part in enumerate(logits.split(CHUNK, dim=1)):
            assert torch.equal(highest[:, chunk], part.amax(-1)), "of what was given, allowed or not"


def test_nan_is_told_though_it_is_not_allowed() -> None:
    logits = torch.zeros(2, 40)
    logits[0, 35] = torch.nan
    masks = torch.tensor([[1, 0]], dtype=torch.int32)
    kept, highest = keep_allowed(logits, torch.tensor([1, 0]), masks, torch.tensor([[-1, 0]], dtype=torch.int32))
    assert highest.tolist() == [[torch.inf], [0.0]]
    assert kept[0].tolist() == [0.0, *[-torch.inf] * 39]
    assert torch.equal(kept[1], logits[1])
