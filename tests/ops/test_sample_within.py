"""The reference of the draw within limits, against the definition in plain Python."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.gumbel import gumbel_noise
from quire.ops.sample import sample_within
from tests.ops.inputs.sample_within import generate_inputs


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 20).filter(lambda seed: seed % 4 < 2))
def test_against_plain_python(seed: int) -> None:
    logits, parameters, seeds, positions = generate_inputs(seed)
    tokens, highest = sample_within(logits, parameters, seeds, positions)
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    for row, (temperature, log_min_p, top_k, top_p) in enumerate(parameters.T.tolist()):
        line = logits[row].tolist()
        assert highest[row] == max(line)
        if temperature == 0.0:
            assert tokens[row] == line.index(max(line))
            continue
        scaled = (logits[row] / torch.tensor(temperature, dtype=torch.float32)).tolist()
        order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
        order = [token for token in order if scaled[token] >= max(scaled) + log_min_p]
        order = order[: int(top_k) or len(order)]
        weights = [math.exp(scaled[token] - max(scaled)) for token in order]
        kept = [token for at, token in enumerate(order) if at == 0 or sum(weights[:at]) < top_p * sum(weights) - 1e-6]
        scores = noise[row] + torch.tensor(scaled)
        assert tokens[row] == max(kept, key=lambda token: (float(scores[token]), -token))


def test_a_broken_row_is_told_by_its_highest_logit() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3] = torch.nan
    parameters = torch.tensor([[0.8, 0.8], [-math.inf, -math.inf], [0.0, 0.0], [0.9, 0.9]], dtype=torch.float64)
    tokens, highest = sample_within(logits, parameters, torch.arange(2), torch.arange(2))
    assert highest.tolist() == [math.inf, 0.0]
    assert all(0 <= token < 10 for token in tokens.tolist())
