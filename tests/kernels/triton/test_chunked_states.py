"""Long rows of recurrent layers in chunks: the recurrence of its definition in float64, and states that go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.recurrent import GATED_DELTA, LINEAR_ATTENTION, SELECTIVE_SCAN, STATE_SPACE
from quire.ops.states import StatePlaces, StateShape
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.ops.chunked_states import by_token, in_chunks

pytestmark = needs_triton
BLOCK = 16
SHAPES = {
    "gated_delta": StateShape(8, 2, 2, 1, 16, 24),
    "kimi_delta": StateShape(8, 2, 2, 2, 16, 24, decay_dim=16),
    "state_space": StateShape(8, 2, 2, 1, 32, 16),
    "linear_attention": StateShape(0, 1, 1, 1, 16, 16),
}
KINDS = list(SHAPES)


def given(kind: str, count: int, seed: int = 0) -> tuple[Any, ...]:
    """An op's arguments for `count` tokens of one sequence, without those of states. Keys resemble each other."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    if kind == "linear_attention":
        return numbers(count, 48) * 0.3, torch.tensor([0.9])
    a = -torch.rand(2, generator=generator)
    if kind == "state_space":
        vectors = torch.rand(2, 2, generator=generator)
        return numbers(count, 32 + 64), numbers(count, 2), vectors[0], a, vectors[1], (0.0, 1.5)
    keys, decays = (64, 32) if kind == "kimi_delta" else (32, 2)
    return (
        numbers(count, keys + 48) + 0.5,
        numbers(count, decays) - 2.0,
        numbers(count, 2) + 1.0,
        a,
        numbers(decays),
    )


def of_tokens(kind: str, arguments: tuple[Any, ...], tokens: slice) -> tuple[Any, ...]:
    per_token = {"gated_delta": 3, "kimi_delta": 3, "state_space": 2, "linear_attention": 1}[kind]
    return tuple(x[tokens] if index < per_token else x for index, x in enumerate(arguments))


def places_of(rows: list[tuple[int, int]], tables: Tensor) -> StatePlaces:
    """Rows as (tokens before, tokens of this step)."""
    counts = torch.tensor([0, *(count for _, count in rows)])
    contexts = torch.tensor([first + count for first, count in rows], dtype=torch.int32)
    parts = (tables, torch.arange(len(rows)), contexts, counts.cumsum(0).int())
    return StatePlaces(*(part.to(DEVICE) for part in parts), BLOCK)


def run(kind: str, arguments: tuple[Any, ...], cache: Tensor, places: StatePlaces, *, chunked: bool = True) -> Tensor:
    from quire.kernels.triton import chunked_states, states

    placed = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments]
    function = getattr(chunked_states if chunked else states, "gated_delta" if kind == "kimi_delta" else kind)
    return function(*placed, cache, places, SHAPES[kind]).cpu()


def expected(kind: str, arguments: tuple[Any, ...], form: Any = by_token) -> Tensor:
    """All results of a sequence from its beginning, in float64."""
    shape, wide = SHAPES[kind], [x.double() if isinstance(x, Tensor) else x for x in arguments]
    count, repeats = len(wide[0]), shape.num_heads // shape.num_key_heads
    sizes = [shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim]
    softplus = torch.nn.functional.softplus
    strengths, skipped = None, 0.0
    if kind.endswith("_delta"):
        q, k, v = wide[0].split([sizes[0], sizes[0], sizes[1]], dim=1)
        q, k = (x.view(count, -1, shape.key_dim) for x in (q, k))
        q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, strengths = q * shape.key_dim**-0.5, wide[2].sigmoid()
        decays = softplus(wide[1] + wide[4]).view(count, shape.num_heads, -1) * wide[3][:, None]
        decays = decays.exp() if shape.decay_dim > 1 else decays.exp()[..., 0]
    elif kind == "state_space":
        x, k, q = wide[0].split([sizes[1], *sizes[:1] * 2], dim=1)
        step = softplus(wide[1] + wide[2]).clamp(*wide[5])
        v, decays = x.view(count, shape.num_heads, -1), torch.exp(step * wide[3])
        skipped, v = v * wide[4][:, None], v * step[..., None]
    else:
        q, k, v = wide[0].view(count, shape.num_heads, 3, -1).unbind(2)
        decays = wide[1].expand(count, -1)
    q, k = (x.reshape(count, -1, shape.key_dim).repeat_interleave(repeats, dim=1) for x in (q, k))
    matrix = torch.zeros(shape.num_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    out, _ = form(q, k, v.reshape(count, shape.num_heads, -1), decays, strengths, matrix)
    return (out + skipped).flatten(1)


def new_cache(kind: str, blocks: int = 40) -> Tensor:
    return torch.full((blocks, SHAPES[kind].size), float("nan"), device=DEVICE)


TABLE = 1 + torch.arange(36, dtype=torch.int32).view(2, 18)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_recurrence(kind: str) -> None:
    """The form that kernels take, in float64."""
    arguments = given(kind, 200)
    torch.testing.assert_close(
        expected(kind, arguments, in_chunks), expected(kind, arguments), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[140], [70, 1, 35, 34]], ids=["one step", "several"])
def test_steps_are_the_recurrence(kind: str, steps: list[int]) -> None:
    """Steps begin within chunks, and short ones between long ones go on from the states of those."""
    arguments, cache, found, first = given(kind, 140), new_cache(kind), [], 0
    for count in steps:
        part = of_tokens(kind, arguments, slice(first, first + count))
        found.append(run(kind, part, cache, places_of([(first, count)], TABLE)))
        first += count
    wide = expected(kind, arguments)
    torch.testing.assert_close(torch.cat(found).double(), wide, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta", "state_space"])
def test_states_are_those_of_single_tokens(kind: str) -> None:
    """Of entries that lie within, at the ends of and across chunks; entries without a block are left out."""
    table = TABLE.clone()
    table[:, ::3] = 0
    arguments, rows = given(kind, 90), [(0, 90)]
    mine, theirs = new_cache(kind), new_cache(kind)
    run(kind, arguments, mine, places_of(rows, table[:1]))
    run(kind, arguments, theirs, places_of(rows, table[:1]), chunked=False)
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5, equal_nan=True)
    assert int(mine.isfinite().any(1).sum()) == sum(bool(block) for block in table[0, :6])


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta", "state_space"])
def test_rows_of_all_lengths_in_one_step(kind: str) -> None:
    """Long and short rows, in chunks and token by token, each as if it were alone, up to rounding."""
    arguments, rows = given(kind, 120), [(0, 1), (0, 33), (0, 2), (0, 66), (0, 0), (0, 5), (0, 0)]
    tables = 1 + torch.arange(7 * 5, dtype=torch.int32).view(7, 5)
    together = run(kind, arguments, new_cache(kind), places_of(rows, tables))
    begin = 0
    for _, count in rows:
        if count:
            part = of_tokens(kind, arguments, slice(begin, begin + count))
            alone = run(kind, part, new_cache(kind), places_of([(0, count)], TABLE))
            torch.testing.assert_close(together[begin : begin + count], alone, atol=2e-5, rtol=2e-5)
        begin += count
    assert not together[begin:].any()


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_a_decay_to_nothing_and_keys_all_alike(kind: str) -> None:
    """Where sums of log decays and the inverse would overflow in a form that multiplies them out."""
    arguments = given(kind, 130)
    arguments[0][:, : 64 if kind == "kimi_delta" else 32] = 1.0  # each key is that of all others
    arguments[2][:] = 30.0  # and replaces what was there
    arguments[1][70:72] = 500.0
    if kind == "kimi_delta":
        arguments[1][20:24, ::3] = 500.0  # some channels are forgotten, the others stay
    found = run(kind, arguments, new_cache(kind), places_of([(0, 130)], TABLE))
    torch.testing.assert_close(found.double(), expected(kind, arguments), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_half_precision_stays_near(kind: str) -> None:
    from tests.kernels.device import HALF

    arguments = given(kind, 100)
    wide = expected(kind, arguments)
    half = tuple(x.to(HALF) if index < 3 else x for index, x in enumerate(arguments))
    found = run(kind, half, new_cache(kind), places_of([(0, 100)], TABLE))
    assert found.dtype == HALF
    assert float((found.double() - wide).norm() / wide.norm()) < 0.02


def test_only_the_fast_mode_cuts_rows_into_chunks() -> None:
    for op in (GATED_DELTA, STATE_SPACE, LINEAR_ATTENTION):
        assert op.choose(Target("cuda", torch.bfloat16))[1].startswith("chunked")
        assert op.choose(Target("cuda", torch.bfloat16, deterministic=True))[1].startswith("triton")
    assert SELECTIVE_SCAN.choose(Target("cuda", torch.bfloat16))[1].startswith("triton")


def test_drafts_that_do_not_hold_leave_no_trace() -> None:
    """A long step, then drafts that are all taken back: as if they had never been."""
    arguments, cache = given("gated_delta", 70), new_cache("gated_delta")
    run("gated_delta", of_tokens("gated_delta", arguments, slice(0, 50)), cache, places_of([(0, 50)], TABLE))
    wrong = given("gated_delta", 70, seed=1)
    run("gated_delta", of_tokens("gated_delta", wrong, slice(50, 58)), cache, places_of([(50, 8)], TABLE))
    part = of_tokens("gated_delta", arguments, slice(50, 70))
    found = run("gated_delta", part, cache, places_of([(50, 20)], TABLE))
    wide = expected("gated_delta", arguments)[50:]
    torch.testing.assert_close(found.double(), wide, atol=2e-5, rtol=2e-5)
