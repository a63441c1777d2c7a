"""Masks: exactly the allowed tokens stay possible, in rows that have a mask; nothing is left for the next step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.runner.sampling.mask_buffer import mask_words
from quire.runner.sampling.sampler import Sampler
from tests.runner.sampling.helpers import CPU, Rows, make_row, sample, start_of

MAX_ROWS = 6


@given(st.data(), st.sampled_from([1, 31, 32, 33, 100, 263]))
def test_exactly_the_allowed_tokens_stay(data: st.DataObject, vocab_size: int) -> None:
    sampling = data.draw(st.lists(st.integers(0, MAX_ROWS - 1), unique=True, min_size=1))
    masked = [row for row in sampling if data.draw(st.booleans())]
    allowed = {row: data.draw(st.sets(st.integers(0, vocab_size - 1))) for row in masked}
    masks = np.zeros((len(masked), mask_words(vocab_size)), dtype=np.int32)
    for line, row in enumerate(masked):
        for token in allowed[row]:
            masks.view(np.uint32)[line, token // 32] |= np.uint32(1 << token % 32)
    sampler, state = Sampler(vocab_size, MAX_ROWS, CPU), Rows.empty(MAX_ROWS)
    for row in sampling:
        state.place(row, make_row(temperature=0.0))
        sampler.add_request(row, start_of(row, make_row(temperature=0.0)))
    sampler.apply_staged_writes()
    sampler.masks.load({row: line for line, row in enumerate(masked)}, masks)
    # The highest of the allowed tokens is chosen, so that each mask is seen at work.
    logits = torch.arange(vocab_size, dtype=torch.float32).repeat(len(sampling), 1)
    found = sample(sampler, logits, sampling, state, masked=True)
    for place, row in enumerate(sampling):
        possible = allowed.get(row, set(range(vocab_size)))
        if possible:
            assert found.tokens()[place] == max(possible)
        else:
            assert "no token may be chosen" in found.errors()[place]
    free = sample(sampler, logits, sampling, state)
    assert free.tokens() == [vocab_size - 1] * len(sampling), "no mask is left for a step without one"
