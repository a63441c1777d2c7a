from __future__ import annotations

import torch

from quire.attention.base import AttentionSpec
from quire.attention.state import StateBackend
from quire.attention.torch_ref import TorchAttention
from quire.layers.attention import Attention
from quire.layers.state import StateCache
from quire.ops.base import Target
from quire.ops.recurrent import linear_attention
from quire.ops.states import StatePlaces, StateShape
from quire.runner.containment import Containment
from quire.runner.request_rows import BlockTables

CPU = torch.device("cpu")


def test_a_row_is_healed_in_every_pool_at_the_blocks_of_its_groups() -> None:
    """Two groups share a cache of 4 blocks, a third has one of 9: ids of the one mean nothing in the other."""
    backend = TorchAttention()
    layers = [
        Attention(AttentionSpec(2, 1, head_dim, 0.1), index, Target()) for index, head_dim in enumerate((4, 4, 8))
    ]
    shared, other = (
        torch.full(layer.cache_shape(backend, count, 2, torch.float32), torch.nan)
        for layer, count in ((layers[0], 4), (layers[2], 9))
    )
    for group, (layer, cache) in enumerate(zip(layers, (shared, shared, other), strict=True)):
        layer.bind(backend, cache, group)
    tables = BlockTables(3, 2, 6, 2, CPU)
    tables.tables[:, 1, :2] = torch.tensor([[1, 0], [3, 0], [8, 5]])
    Containment([*layers], tables).heal(1, 3)
    healed = [
        [bool(cache[:, :, block].isfinite().all()) for block in range(cache.shape[2])] for cache in (shared, other)
    ]
    assert [[index for index, good in enumerate(one) if good] for one in healed] == [[0, 1, 3], [5, 8]]


def test_a_poisoned_state_is_healed_and_its_row_goes_on() -> None:
    shape = StateShape(0, 1, 2, 2, 4, 4)
    layer, backend = StateCache(shape, Target()), TorchAttention()
    cache = torch.full(layer.cache_shape(backend, 5, 2, torch.float32), torch.nan)
    layer.bind(StateBackend(backend), cache, 0)
    tables = BlockTables(1, 2, 6, 2, CPU)
    tables.tables[0, 1, :2] = torch.tensor([3, 4])
    Containment([layer], tables).heal(1, 3)
    assert [index for index in range(5) if cache[index].isfinite().all()] == [3, 4]
    row, context, starts = torch.tensor([1]), torch.tensor([4]).int(), torch.tensor([0, 1]).int()
    places = StatePlaces(tables.tables[0], row, context, starts, 2)
    mixed = linear_attention(torch.ones(1, 24), torch.tensor([0.9, 0.5]), cache, places, shape)
    assert mixed.isfinite().all()
    assert cache[4].isfinite().all()
