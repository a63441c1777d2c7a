"""Parity with transformers: same logits and greedy tokens, however the sequence is cut into chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quire.models.base import CausalLM
from tests.models.harness import greedy, load, run_chunks
from tests.models.zoo import ARCHITECTURES, LATENTS, LENGTH, MIXTURES, RECURRENT, ROPES, Tiny

PROMPT = 37
TOKENS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


class Pair:
    """A transformers model, its logits for TOKENS, and the same weights in Quire."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        self.theirs: nn.Module = tiny.make(folder)
        with torch.no_grad():
            self.logits: Tensor = self.theirs(torch.tensor([TOKENS])).logits[0]
        self.ours: CausalLM = load(folder, tiny.max_model_len)

    def their_greedy(self, count: int) -> list[int]:
        tokens = TOKENS[:PROMPT]
        with torch.no_grad():
            for _ in range(count):
                # A full-length sequence each time: transformers chooses dynamic frequencies by length.
                padded = torch.tensor([tokens + [0] * (LENGTH - len(tokens))])
                tokens = [*tokens, int(self.theirs(padded).logits[0, len(tokens) - 1].argmax())]
        return tokens[PROMPT:]


PARITY = [*ARCHITECTURES, *MIXTURES, *LATENTS, *ROPES, *RECURRENT]


@pytest.fixture(scope="module", params=PARITY, ids=lambda tiny: tiny.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("sizes", [[LENGTH], [5, 1, 7, 2, 13], [1]], ids=["one-chunk", "odd-chunks", "decode"])
def test_logits_equal_transformers(pair: Pair, sizes: list[int]) -> None:
    assert pair.logits.std() > 0.3, "the reference must vary, or the comparison says nothing"
    torch.testing.assert_close(run_chunks(pair.ours, TOKENS, sizes), pair.logits, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(pair: Pair) -> None:
    count = LENGTH - PROMPT
    assert greedy(pair.ours, TOKENS[:PROMPT], count) == pair.their_greedy(count)


def test_dynamic_frequencies_are_those_of_the_longest_sequence_for_all(tmp_path: Path) -> None:
    """Not of each sequence's own length, as in transformers: cached keys are shared between lengths."""
    tiny = next(tiny for tiny in ROPES if tiny.name == "rope-dynamic")
    theirs, short = tiny.make(tmp_path), LENGTH // 2
    with torch.no_grad():
        alone = theirs(torch.tensor([TOKENS[:short]])).logits[0]  # first: it remembers the longest it has seen
        padded = theirs(torch.tensor([TOKENS])).logits[0, :short]
    assert (padded - alone).abs().max() > 0.1, "the lengths must differ in their frequencies"
    for max_model_len, expected in ((LENGTH, padded), (short, alone)):
        ours = run_chunks(load(tmp_path, max_model_len), TOKENS[:short], [5])
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
