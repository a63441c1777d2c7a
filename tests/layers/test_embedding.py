from __future__ import annotations

import pytest
import torch

from quire.layers.embedding import HeadProjection, LMHead, TiedProjection, VocabParallelEmbedding
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup

GENERATOR = torch.Generator().manual_seed(0)
F32, BF16 = Target(dtype=torch.float32), Target(dtype=torch.bfloat16)
TABLE = torch.randn(24, 10, generator=GENERATOR)
HIDDEN = torch.randn(4, 10, generator=GENERATOR)
TOKENS = torch.tensor([3, 23, 0, 12, 11])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_vocabulary_slices_sum_to_the_rows(size: int) -> None:
    total = torch.zeros(5, 10)
    for rank in range(size):
        layer = VocabParallelEmbedding(24, 10, target=F32, group=ParallelGroup(rank, size)).allocate()
        layer.load("weight", None, TABLE)
        assert layer.pieces("weight") == {None: (24, 10)}
        total += layer(TOKENS)
    assert torch.equal(total, TABLE[TOKENS])


@pytest.mark.parametrize("tied", [True, False])
def test_head_scales_then_caps_in_the_models_dtype(tied: bool) -> None:
    group = ParallelGroup()
    embedding = VocabParallelEmbedding(24, 10, target=BF16, group=group).allocate()
    linear = HeadProjection(10, 24, bias=False, target=BF16, group=group).allocate()
    embedding.load("weight", None, TABLE)
    linear.load("weight", None, TABLE)
    embedding.finish()
    linear.finish()
    projection = TiedProjection(embedding) if tied else linear
    plain = LMHead(projection, logit_divisor=None, logit_soft_cap=None, target=BF16, group=group)(HIDDEN.bfloat16())
    assert plain.dtype == torch.bfloat16
    assert plain.is_contiguous()
    torch.testing.assert_close(plain.float(), HIDDEN @ TABLE.t(), atol=0.1, rtol=0.02)
    shaped = LMHead(projection, logit_divisor=2.0, logit_soft_cap=3.0, target=BF16, group=group)(HIDDEN.bfloat16())
    assert shaped.dtype == torch.bfloat16
    torch.testing.assert_close(shaped.float(), 3.0 * torch.tanh(plain.float() / 2.0 / 3.0), atol=0.02, rtol=0)


def test_tied_head_holds_no_second_table() -> None:
    embedding = VocabParallelEmbedding(24, 10, target=F32, group=ParallelGroup()).allocate()
    head = LMHead(
        TiedProjection(embedding), logit_divisor=None, logit_soft_cap=None, target=F32, group=ParallelGroup()
    )
    assert [id(parameter) for parameter in head.parameters()] == [
        id(parameter) for parameter in embedding.parameters()
    ]
