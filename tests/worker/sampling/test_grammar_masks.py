"""Masks: exactly the allowed tokens stay possible, in rows that have a mask; nothing is left for the next step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.grammar_masks import GrammarMasks
from quire.worker.sampling.mask_buffer import MaskBuffer, mask_words

CPU = torch.device("cpu")


@given(st.data(), st.sampled_from([1, 31, 32, 33, 100, 263]))
def test_exactly_the_allowed_tokens_stay(data: st.DataObject, vocab_size: int) -> None:
    max_rows = 6
    sampling = data.draw(st.lists(st.integers(0, max_rows - 1), unique=True, min_size=1))
    masked = [row for row in sampling if data.draw(st.booleans())]
    allowed = {row: data.draw(st.sets(st.integers(0, vocab_size - 1))) for row in masked}
    masks = np.zeros((len(masked), mask_words(vocab_size)), dtype=np.int32)
    for line, row in enumerate(masked):
        for token in allowed[row]:
            masks.view(np.uint32)[line, token // 32] |= np.uint32(1 << token % 32)
    feature = GrammarMasks(vocab_size, MaskBuffer(vocab_size, max_rows, 1, CPU))
    if masked:
        feature.load(masked, masks)
    logits = torch.arange(len(sampling) * vocab_size, dtype=torch.float32).view(len(sampling), vocab_size)
    before = logits.clone()
    rows = SampleRows(torch.tensor(sampling), sampling)
    after = feature.apply(logits, rows)
    for place, row in enumerate(sampling):
        for token in range(vocab_size):
            stays = row not in allowed or token in allowed[row]
            assert after[place, token] == (before[place, token] if stays else -torch.inf)
    feature.clear()
    assert feature.apply(before, rows) is before
