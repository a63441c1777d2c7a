"""Where the states of recurrent layers lie in a step, and how a row goes on from one: token by token, in float32.

A block is one state: a ring of the convolution's last inputs, then the recurrence as it was after some number of
tokens (which is the block's first value), and a ring of the inputs of the tokens after those. Only tokens that a
later step cannot take back are folded into the recurrence, so a row may go on from any of the last ROLLBACK tokens.
Tokens are folded one after the other, so that no bit depends on how a sequence was cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.types.cache import STATE_ROLLBACK

ROLLBACK = STATE_ROLLBACK


class StatePlaces(NamedTuple):
    """The rows of a step and their tables of states; see AttentionBatch."""

    tables: Tensor  # [max_rows, max_blocks] int32
    rows: Tensor  # [num_rows] int64
    contexts: Tensor  # [num_rows] int32
    starts: Tensor  # [num_rows + 1] int32
    block_size: int
    has_long: bool = True  # whether rows may have more than STATE_SHORT tokens


@dataclass(frozen=True)
class StateShape:
    """Sizes of one layer's state. A recurrence has a matrix [key_dim, value_dim] for each of its heads."""

    conv_channels: int
    conv_width: int  # tokens that a convolution reads, its own among them
    num_heads: int = 0
    num_key_heads: int = 0  # heads of keys and queries, each shared by as many heads
    key_dim: int = 0
    value_dim: int = 0
    decay_dim: int = 1  # key_dim: each row of the matrix decays by itself
    waiting: int = 4  # tokens after which a state's matrix may stay as it was: they wait in the ring; 1: none

    @property
    def rollback(self) -> int:
        return ROLLBACK

    @property
    def conv_slots(self) -> int:
        return self.conv_width - 1 + ROLLBACK

    @property
    def conv_size(self) -> int:
        return self.conv_slots * self.conv_channels

    @property
    def matrix_size(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim

    @property
    def input_sizes(self) -> tuple[int, int, int, int]:
        """Of what is kept of a token: keys, values, decays and the strengths of the delta rule."""
        heads = self.num_heads
        return self.num_key_heads * self.key_dim, heads * self.value_dim, heads * self.decay_dim, heads

    @property
    def size(self) -> int:
        """Values of one state."""
        if not self.num_heads:
            return self.conv_size
        return self.conv_size + 1 + self.matrix_size + ROLLBACK * sum(self.input_sizes)


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one row in a step."""

    begin: int  # index of its first token
    first: int  # how many tokens of the row come before
    count: int
    read: int  # block of the state that it goes on from; 0: it begins
    writes: list[tuple[int, int]]  # blocks to leave a state in, each with the number of tokens that it is after


def spans(places: StatePlaces) -> Iterator[Span]:
    size, starts = places.block_size, places.starts.tolist()
    rows = zip(places.rows.tolist(), places.contexts.tolist(), pairwise(starts), strict=True)
    for row, context, (begin, end) in rows:
        if end > begin:
            table, first = places.tables[row].tolist(), context - (end - begin)
            entries = range(first // size, (context - 1) // size + 1)
            writes = [(min((entry + 1) * size, context), table[entry]) for entry in entries if table[entry]]
            yield Span(begin, first, end - begin, table[(first - 1) // size] if first else 0, writes)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cache: Tensor, places: StatePlaces, shape: StateShape
) -> Tensor:
    """Each channel's weighted sum of its last inputs, x [n, channels] with weight [channels, width]; float32 inside.

    Mutates the states in cache [num_blocks, size]; rows that `places` does not name are zero in the result.
    """
    wide, taps = x.float(), weight.float().T.contiguous()
    rings = cache[:, : shape.conv_size].unflatten(1, (shape.conv_slots, shape.conv_channels))
    before, slots = shape.conv_width - 1, shape.conv_slots
    out = torch.zeros_like(wide)
    for span in spans(places):
        kept = torch.arange(max(0, span.first - slots), span.first)
        past = wide.new_zeros(slots, shape.conv_channels)
        if span.first:
            past[slots - len(kept) :] = rings[span.read, kept % slots]
        line = torch.cat((past, wide[span.begin : span.begin + span.count]))
        total = line.new_zeros(span.count, shape.conv_channels)
        for tap in range(shape.conv_width):
            start = slots - before + tap
            total = total + line[start : start + span.count] * taps[tap]
        out[span.begin : span.begin + span.count] = total if bias is None else total + bias.float()
        for end, block in span.writes:
            held = torch.arange(max(0, end - slots), end)
            rings[block, held % slots] = line[held - span.first + slots]
    return silu_of(out).to(x.dtype) if silu else out.to(x.dtype)


def gated_conv(
    bcx: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, places: StatePlaces, shape: StateShape
) -> Tensor:
    """c * conv(b * x) of bcx [n, 3 * channels]."""
    b, c, x = bcx.float().chunk(3, dim=-1)
    mixed: Tensor = c * short_conv(b * x, weight, bias, False, cache, places, shape)
    return mixed.to(bcx.dtype)


def recur(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    cache: Tensor,
    places: StatePlaces,
    shape: StateShape,
) -> Tensor:
    """What queries read of each head's matrix after their own token: [n, heads, value_dim] float32.

    queries, keys: [n, key_heads, key_dim]; values [n, heads, value_dim]; decays [n, heads, decay_dim], by which the
    matrix is multiplied before a token adds key x value. With strengths [n, heads] it is the delta rule: of the
    value, only its difference from what the matrix has for that key is added, times the strength. Mutates the cache.
    """
    heads, width = shape.num_heads, shape.matrix_size
    given = torch.ones_like(values[:, :, 0]) if strengths is None else strengths
    inputs = torch.cat([part.flatten(1).float() for part in (keys, values, decays, given)], dim=1)
    repeats = heads // shape.num_key_heads
    asked = queries.float().repeat_interleave(repeats, dim=1)[..., None]

    def fold(matrix: Tensor, token: Tensor) -> Tensor:
        k, v, decay, strength = token.split(shape.input_sizes)
        k = k.view(shape.num_key_heads, -1, 1).repeat_interleave(repeats, dim=0)
        v, matrix = v.view(heads, -1), matrix * decay.view(heads, -1, 1)
        if strengths is not None:
            v = (v - (matrix * k).sum(1)) * strength[:, None]
        added: Tensor = matrix + k * v[:, None]
        return added

    out = torch.zeros(values.shape, device=values.device)
    for span in spans(places):
        matrix = torch.zeros(heads, shape.key_dim, shape.value_dim, device=cache.device)
        if span.first:
            state = cache[span.read, shape.conv_size :]
            matrix, ring = state[1 : 1 + width].view_as(matrix).clone(), state[1 + width :].view(ROLLBACK, -1)
            for position in range(int(state[0]), span.first):
                matrix = fold(matrix, ring[position % ROLLBACK])
        folded_to = {end: max(span.first, end - ROLLBACK) for end, _ in span.writes}
        kept: dict[int, Tensor] = {}
        for index in range(span.begin, span.begin + span.count):
            position = span.first + index - span.begin
            if position in folded_to.values():
                kept[position] = matrix
            matrix = fold(matrix, inputs[index])
            out[index] = (matrix * asked[index]).sum(1)
        for end, block in span.writes:
            state, base = cache[block, shape.conv_size :], folded_to[end]
            state[0], state[1 : 1 + width] = base, kept[base].flatten()
            held = torch.arange(base, end)
            state[1 + width :].view(ROLLBACK, -1)[held % ROLLBACK] = inputs[held - span.first + span.begin]
    return out


def silu_of(x: Tensor) -> Tensor:
    factor: Tensor = 1.0 / (1.0 + torch.exp(-x))
    return x * factor
