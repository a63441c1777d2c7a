"""Inputs of the ops in quire/ops/recurrent.py. No token waits to be folded: implementations leave equal states."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.states import ROLLBACK, StatePlaces, StateShape


def _places(seed: int, generator: torch.Generator) -> tuple[StatePlaces, int]:
    """Three rows of which the first begins, in blocks of 4 tokens, and the number of their tokens."""
    counts = [1 + (seed + 5) % 9, 1, 1 + seed % 3]
    contexts = torch.tensor([counts[0], 6, 17])
    starts = torch.tensor([0, *counts]).cumsum(0)
    tables = 1 + torch.randperm(24, generator=generator).view(3, 8)
    tables[0, 0] = 0 if counts[0] > 4 else tables[0, 0]  # an entry without a block
    return StatePlaces(tables.int(), torch.arange(3), contexts.int(), starts.int(), 4), sum(counts)


def generate_conv(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    places, count = _places(seed, generator)
    shape = StateShape(16 * (1 + seed % 3), 3 + seed % 2)
    x, bias = (torch.randn(*size, shape.conv_channels, generator=generator) for size in ((count,), ()))
    weight = torch.randn(shape.conv_channels, shape.conv_width, generator=generator)
    cache = torch.randn(25, shape.size, generator=generator)
    return x, weight, bias if seed % 2 else None, bool(seed % 3), cache, places, shape


def generate_gated_conv(seed: int) -> tuple[object, ...]:
    x, weight, bias, _, cache, places, shape = generate_conv(seed)
    assert isinstance(x, Tensor)
    return torch.cat((x, x.flip(0), 1.0 - x), dim=1), weight, bias, cache, places, shape


def _recurrent(seed: int, shape: StateShape) -> tuple[torch.Generator, StatePlaces, int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places, count = _places(seed, generator)
    cache = torch.randn(25, shape.size, generator=generator) * 0.3
    firsts = (places.contexts - torch.diff(places.starts)).tolist()
    for row, first in enumerate(firsts):  # a state holds how many tokens it is after
        if first:
            block = int(places.tables[row, (first - 1) // 4])
            cache[block, shape.conv_size] = max(0, first - 1 - seed % ROLLBACK)
            cache[block, shape.conv_size + 1 + shape.matrix_size :].abs_()
    return generator, places, count, cache


def generate_delta(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 4, 2, 16, 16 * (1 + seed % 2), 16 if seed % 3 == 0 else 1, waiting=1)
    generator, places, count, cache = _recurrent(seed, shape)
    sizes = (2 * 32 + 4 * shape.value_dim, 4 * shape.decay_dim, 4)
    qkv, decay, strength = (torch.randn(count, size, generator=generator) for size in sizes)
    a, bias = -torch.rand(4, generator=generator), torch.randn(4 * shape.decay_dim, generator=generator)
    return qkv, decay, strength, a, bias, cache, places, shape, -5.0 if seed % 4 == 3 else 0.0


def generate_state_space(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 4, 1 + seed % 2, 16 * (1 + seed % 2), 8 * (1 + seed // 2 % 2), waiting=1)
    generator, places, count, cache = _recurrent(seed, shape)
    xbc = torch.randn(count, 4 * shape.value_dim + 2 * shape.num_key_heads * shape.key_dim, generator=generator)
    dt, vectors = torch.randn(count, 4, generator=generator), torch.rand(3, 4, generator=generator)
    return xbc, dt, vectors[0], -vectors[1], vectors[2], (0.0, 1.5), cache, places, shape


def generate_scan(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 24, 1, 16, 1, 16, waiting=1)
    generator, places, count, cache = _recurrent(seed, shape)
    x, dt = torch.randn(2, count, 24, generator=generator).unbind(0)
    b, c = torch.randn(2, count, 16, generator=generator).unbind(0)
    a, skip = -torch.rand(24, 16, generator=generator), torch.rand(24, generator=generator)
    return x, dt, b, c, a, skip, cache, places, shape


def generate_linear(seed: int) -> tuple[object, ...]:
    shape = StateShape(0, 1, 4, 4, 16, 16, waiting=1)
    generator, places, count, cache = _recurrent(seed, shape)
    qkv = torch.randn(count, 4 * 48, generator=generator)
    return qkv, torch.rand(4, generator=generator), cache, places, shape


def generate_norm(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 + seed % 3
    x, gate = torch.randn(2, 5, 32 * groups, generator=generator).unbind(0)
    weight = torch.randn(32 * (groups if seed % 2 else 1), generator=generator)
    return x, gate, weight, 1e-6, groups, bool(seed % 2), bool(seed % 5 == 0)


def generate_gate(seed: int) -> tuple[Tensor, Tensor, bool]:
    x, gates = torch.randn(
        2, 1 + seed % 5, 16 * (1 + seed % 3), generator=torch.Generator().manual_seed(seed)
    ).unbind(0)
    return x, gates, bool(seed % 2)


def generate_columns(seed: int) -> tuple[Tensor]:
    wide = torch.randn(1 + seed % 5, 40, generator=torch.Generator().manual_seed(seed))
    return (wide[:, seed % 7 : 16 + seed % 7],)


INPUTS = {
    "short_conv": generate_conv,
    "gated_conv": generate_gated_conv,
    "gated_delta": generate_delta,
    "state_space": generate_state_space,
    "selective_scan": generate_scan,
    "linear_attention": generate_linear,
    "gated_norm": generate_norm,
    "gate": generate_gate,
    "compact": generate_columns,
}
