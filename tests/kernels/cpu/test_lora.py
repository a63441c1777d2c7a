"""LoRA on the CPU: odd sizes, extreme values, and a token's bits beside any others."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import lora, ops
from quire.ops.lora import (
    expand_lora,
    expand_lora_gated,
    gather_adapters,
    look_up_lora,
    pick_adapters,
    select_adapters,
    shrink_lora,
    tile_adapters,
)
from tests.kernels.cpu.test_extremes import (
    WIDTHS,
    assert_bits,
    assert_same_kind,
    each_instruction_set,
    rows_with_special,
    using,
)
from tests.ops.inputs.lora import generate_look_ups, generate_picks, generate_rows, generate_slots, generate_tokens


@each_instruction_set
@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", WIDTHS)
def test_adapters_are_added_token_by_token(isa: str, inner: int, kept: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner)
    widths, rank = (inner, 1, 19), 5
    x, out = rows_with_special(40, inner), torch.randn(40, sum(widths), generator=generator)
    down = torch.randn(3, len(widths), rank, inner, generator=generator).to(kept)
    up = torch.randn(3, rank, sum(widths), generator=generator).to(kept)
    slots = torch.randint(-1, 3, (40,), generator=generator, dtype=torch.int32)
    ranks = torch.tensor([5, 0, 3], dtype=torch.int32)

    def run(start: int, end: int) -> torch.Tensor:
        tiles = lora.tile_adapters(slots[start:end], 3)
        shrunk = lora.shrink_lora(x[start:end], down, tiles, ranks)
        return lora.expand_lora(out[start:end].clone(), shrunk, up, tiles, ranks, widths)

    with using(isa):
        found = run(0, 40)
        for start, end in ((0, 1), (7, 9), (11, 40)):
            assert_bits(run(start, end), found[start:end])
    assert_bits(found[slots < 0], out[slots < 0])
    tiles = tile_adapters(slots, 3)
    expected = expand_lora(out.clone(), shrink_lora(x, down, tiles, ranks), up, tiles, ranks, widths)
    assert_same_kind(found, expected, 1e-4)


@each_instruction_set
@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_adapters_are_added_before_an_activation(isa: str, width: int, kept: torch.dtype) -> None:
    """Tokens without an adapter, or with one of no rank, have the bits of the activation alone."""
    generator = torch.Generator().manual_seed(width)
    x, shrunk = rows_with_special(40, 2 * width), torch.randn(1, 40, 10, generator=generator)
    up = torch.randn(3, 5, 2 * width, generator=generator).to(kept)
    slots = torch.randint(-1, 3, (40,), generator=generator, dtype=torch.int32)
    ranks = torch.tensor([5, 0, 3], dtype=torch.int32)

    def run(start: int, end: int) -> torch.Tensor:
        tiles = lora.tile_adapters(slots[start:end], 3)
        return lora.expand_lora_gated(x[start:end], shrunk[:, start:end].contiguous(), up, tiles, ranks, "silu")

    with using(isa):
        found, plain = run(0, 40), ops.silu_and_mul(x)
        for start, end in ((0, 1), (7, 9), (11, 40)):
            assert_bits(run(start, end), found[start:end])
    unchanged = (slots < 0) | (slots == 1)
    assert_bits(found[unchanged], plain[unchanged])
    expected = expand_lora_gated(x, shrunk, up, tile_adapters(slots, 3), ranks, "silu")
    assert_same_kind(found, expected, 1e-4)


@each_instruction_set
@pytest.mark.parametrize("seed", range(12))
def test_tokens_have_the_slots_of_their_rows(isa: str, seed: int) -> None:
    """Rows without tokens among them, padding behind them."""
    rows, tokens, slots = generate_rows(seed), generate_tokens(seed), generate_slots(seed)
    picks, columns = generate_picks(seed), generate_look_ups(seed)
    with using(isa):
        assert_bits(lora.gather_adapters(*rows), gather_adapters(*rows))
        assert_bits(lora.select_adapters(*tokens), select_adapters(*tokens))
        assert_bits(lora.tile_adapters(*slots), tile_adapters(*slots))
        assert_bits(lora.pick_adapters(*picks), pick_adapters(*picks))
        assert_bits(lora.look_up_lora(*columns), look_up_lora(*columns))
        halves = columns[0], columns[1].half(), columns[2]
        assert_bits(lora.look_up_lora(*halves), look_up_lora(*halves))
