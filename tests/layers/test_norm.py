from __future__ import annotations

import torch

from quire.layers.norm import ParallelRMSNorm, RMSNorm
from quire.ops.base import Target
from quire.ops.norm import rms_norm
from quire.parallel.collectives import NullCollectives
from quire.parallel.groups import ParallelGroup

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(-1, 1, 8)


def test_offset_is_added_to_the_stored_weight() -> None:
    layer = RMSNorm(8, eps=1e-5, target=Target("elsewhere"), weight_offset=1.0)
    layer.load("weight", None, WEIGHT)
    assert torch.equal(layer.weight, WEIGHT)
    torch.testing.assert_close(layer(X), rms_norm(X, WEIGHT + 1.0, 1e-5))


def test_split_features_are_normalized_together() -> None:
    class Gathered(NullCollectives):
        def all_gather(self, x: torch.Tensor, total: int) -> torch.Tensor:
            return X

    for rank in range(2):
        layer = ParallelRMSNorm(8, eps=1e-5, target=Target("elsewhere"), group=ParallelGroup(rank, 2, Gathered()))
        layer.load("weight", None, WEIGHT)
        part = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(layer(X[:, part]), rms_norm(X, WEIGHT, 1e-5)[:, part])
