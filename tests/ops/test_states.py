"""Rows go on from states: any chunking gives the same bits, and tokens can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import library, states
from quire.ops import recurrent
from quire.ops.states import ROLLBACK, StatePlaces, StateShape
from tests.ops.inputs.recurrent import generate_delta

LENGTH, BLOCK = 40, 4
DELTA = StateShape(12, 3, 2, 1, 8, 20)
KIMI = StateShape(12, 3, 2, 2, 8, 20, decay_dim=8)  # each channel of a key decays by itself, down to a floor
LINEAR = StateShape(12, 3, 2, 2, 48, 48)  # without the delta rule; two vectors and one of the widest
TABLE = torch.tensor([[7, 3, 0, 9, 1, 5, 2, 0, 8, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]], dtype=torch.int32)
Run = Callable[[Tensor, StatePlaces], Tensor]


def make_run(module: Any, shape: StateShape = DELTA, cache: Tensor | None = None) -> tuple[Run, Tensor]:
    """A convolution and then the delta rule over one sequence's inputs, with states that begin as rubbish."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 3, generator=generator)
    sizes = [16 * shape.num_key_heads + 40, 2 * shape.decay_dim, 2] if shape is not LINEAR else [288]
    more = torch.randn(12, sum(sizes), generator=generator)
    a, bias = -torch.rand(2, generator=generator), torch.randn(2 * shape.decay_dim, generator=generator)
    cache = torch.full((21, shape.size), float("nan")) if cache is None else cache
    floor = 0.0 if shape is DELTA else -5.0

    def run(x: Tensor, places: StatePlaces) -> Tensor:
        conv = module.short_conv(x, weight, None, True, cache, places, shape)
        projected = (conv[:, :, None] * more[None]).sum(1)
        if shape is LINEAR:
            linear: Tensor = module.linear_attention(projected, a.exp(), cache, places, shape)
            return linear
        qkv, decay, strength = projected.split(sizes, dim=1)
        mixed: Tensor = module.gated_delta(qkv, decay, strength, a, bias, cache, places, shape, floor)
        return mixed

    return run, torch.randn(LENGTH, 12, generator=generator)


def step(run: Run, x: Tensor, first: int, end: int, row: int = 0) -> Tensor:
    places = StatePlaces(
        TABLE, torch.tensor([row]), torch.tensor([end]).int(), torch.tensor([0, end - first]).int(), BLOCK
    )
    return run(x[first:end].contiguous(), places)


MODULES = [recurrent, pytest.param(states, marks=pytest.mark.skipif(library.load() is None, reason="no compiler"))]


@pytest.mark.parametrize("shape", [DELTA, KIMI, LINEAR], ids=["delta", "kimi", "linear"])
@pytest.mark.parametrize("module", MODULES, ids=["reference", "native"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_chunks_and_tokens_taken_back_give_the_bits_of_one_chunk(
    module: Any, shape: StateShape, data: st.DataObject
) -> None:
    run, x = make_run(module, shape)
    whole = step(run, x, 0, LENGTH, row=1)
    run, _ = make_run(module, shape)
    at = 0
    while at < LENGTH:
        end = min(LENGTH, at + data.draw(st.one_of(st.integers(1, 2), st.integers(1, LENGTH))))
        while not TABLE[0, (end - 1) // BLOCK]:  # a step leaves a state in its last entry
            end += 1
        wrong = data.draw(st.integers(0, min(ROLLBACK - 1, end - at - 1)))  # drafts that do not hold
        if wrong and not all(TABLE[0, (end - wrong - 1) // BLOCK : (end - 1) // BLOCK + 1]):
            wrong = 0
        given = x.clone()
        given[end - wrong : end] += 1.0
        found = step(run, given, at, end)
        assert torch.equal(found[: end - at - wrong], whole[at : end - wrong])
        at = end - wrong


@pytest.mark.skipif(library.load() is None, reason="no compiler")
@pytest.mark.parametrize("shape", [DELTA, LINEAR], ids=["delta", "linear"])
def test_a_matrix_is_written_after_several_tokens(shape: StateShape) -> None:
    cache = torch.zeros(21, shape.size)
    run, x = make_run(states, shape, cache)
    tables, first = torch.full((1, 1), 7, dtype=torch.int32), shape.conv_size + 1
    matrices = []
    for end in range(1, 17):
        lengths = torch.tensor([end]).int(), torch.tensor([0, 1]).int()
        run(x[end - 1 : end], StatePlaces(tables, torch.tensor([0]), *lengths, 64))
        matrices.append(cache[7, first : first + shape.matrix_size].clone())
    changed = [int(not before.equal(after)) for before, after in pairwise(matrices)]
    assert 16 // shape.waiting - 1 <= sum(changed) <= 16 // shape.waiting


@pytest.mark.parametrize("module", MODULES, ids=["reference", "native"])
def test_a_row_alone_or_among_others(module: Any) -> None:
    run, x = make_run(module)
    whole = step(run, x, 0, LENGTH)
    run, _ = make_run(module)
    contexts, starts = torch.tensor([30, 20]).int(), torch.tensor([0, 30, 50]).int()
    both = run(torch.cat((x[:30], x[:20])), StatePlaces(TABLE, torch.arange(2), contexts, starts, BLOCK))
    assert torch.equal(both[:30], whole[:30])
    assert torch.equal(both[30:], whole[:20])


@pytest.mark.parametrize("module", MODULES, ids=["reference", "native"])
def test_states_beyond_two_to_the_31_elements(module: Any, tmp_path: Path) -> None:
    """In a file with holes, of which only the states that are used take memory."""
    blocks = (1 << 31) // DELTA.size + 8
    kept = np.memmap(tmp_path / "states", np.float32, "w+", shape=(blocks, DELTA.size))
    run, x = make_run(module)
    far, _ = make_run(module, cache=torch.from_numpy(kept))
    tables = TABLE.where(TABLE == 0, TABLE + blocks - 21)
    for first, end in ((0, 14), (14, 15), (15, LENGTH)):
        lengths = torch.tensor([end]).int(), torch.tensor([0, end - first]).int()
        near_places = StatePlaces(TABLE, torch.tensor([1]), *lengths, BLOCK)
        part = x[first:end].contiguous()
        assert torch.equal(far(part, near_places._replace(tables=tables)), run(part, near_places))


def test_chunks_of_tokens_equal_the_recurrence_written_out() -> None:
    """The delta rule token by token, with nothing of the code that keeps states."""
    inputs = generate_delta(1)
    qkv, decay, strength, a, bias = (part[:8] if part.shape[:1] == (10,) else part for part in inputs[:5])
    shape = inputs[7]
    assert isinstance(shape, StateShape)
    count = qkv.shape[0]
    q, k, v = qkv.split([32, 32, 4 * shape.value_dim], dim=1)
    q, k = (torch.nn.functional.normalize(x.view(count, 2, 16), dim=-1).repeat_interleave(2, 1) for x in (q, k))
    v = v.view(count, 4, -1)
    matrix, expected = torch.zeros(4, 16, shape.value_dim), []
    for t in range(count):
        matrix = matrix * torch.exp(a * torch.nn.functional.softplus(decay[t] + bias))[:, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", matrix, k[t])) * strength[t].sigmoid()[:, None]
        matrix = matrix + torch.einsum("hk,hv->hkv", k[t], delta)
        expected.append(torch.einsum("hkv,hk->hv", matrix, q[t]) / 4.0)
    places = StatePlaces(
        TABLE[1:], torch.zeros(1).long(), torch.tensor([count]).int(), torch.tensor([0, count]).int(), 4
    )
    cache = torch.zeros(21, shape.size)
    found = recurrent.gated_delta(qkv, decay, strength, a, bias, cache, places, shape)
    torch.testing.assert_close(found.view(count, 4, -1), torch.stack(expected), atol=1e-5, rtol=1e-5)
