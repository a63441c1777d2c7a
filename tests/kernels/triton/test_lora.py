"""LoRA on the GPU: a token's bits beside any others, tokens without an adapter, and many tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.lora import expand_lora, gather_adapters, shrink_lora, tile_adapters
from tests.kernels.device import DEVICE, HALF, HAS_TRITON
from tests.kernels.triton.paged import needs_triton
from tests.ops.inputs.lora import generate_rows

if HAS_TRITON:
    from quire.kernels.triton import lora

pytestmark = needs_triton
WIDTHS, RANK, SLOTS = (130, 16, 16), 16, 3
RANKS = torch.tensor([16, 5, 0], dtype=torch.int32)


class Layer:
    def __init__(self, count: int, inner: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(inner)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        self.x, self.out = drawn(count, inner), drawn(count, sum(WIDTHS))
        self.down = drawn(SLOTS, len(WIDTHS), RANK, inner) * inner**-0.5
        self.up = drawn(SLOTS, RANK, sum(WIDTHS))
        self.slots = torch.randint(-1, SLOTS, (count,), generator=generator, dtype=torch.int32).to(DEVICE)

    def run(self, tokens: Tensor) -> Tensor:
        """Of these tokens, in this order."""
        tiles, ranks = lora.tile_adapters(self.slots[tokens], SLOTS), RANKS.to(DEVICE)
        shrunk = lora.shrink_lora(self.x[tokens], self.down, tiles, ranks)
        return lora.expand_lora(self.out[tokens], shrunk, self.up, tiles, ranks, WIDTHS)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_token_has_the_bits_that_it_has_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its neighbours, in another order, and among enough that programs add up their splits themselves."""
    layer = Layer(40, 1100, dtype)
    everyone = torch.arange(40, device=DEVICE)
    together = layer.run(everyone)
    for token in range(0, 40, 7):
        assert torch.equal(layer.run(everyone[token : token + 1])[0], together[token])
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(layer.run(shuffled), together[shuffled])
    monkeypatch.setattr(lora, "_MANY", 2)
    assert torch.equal(layer.run(everyone), together)
    untouched = layer.slots < 0
    assert torch.equal(together[untouched], layer.out[untouched])
    assert torch.equal(together[layer.slots == 2], layer.out[layer.slots == 2]), "its rank is 0"


def test_it_is_the_reference() -> None:
    layer = Layer(40, 1100, torch.float32)
    tiles = tile_adapters(layer.slots.cpu(), SLOTS)
    shrunk = shrink_lora(layer.x.cpu(), layer.down.cpu(), tiles, RANKS)
    expected = expand_lora(layer.out.cpu().clone(), shrunk, layer.up.cpu(), tiles, RANKS, WIDTHS)
    found = layer.run(torch.arange(40, device=DEVICE)).cpu()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_activation_in_the_same_kernel_changes_no_bit(dtype: torch.dtype) -> None:
    """Also for tokens without an adapter, and where columns end within a program."""
    from quire.kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul

    layer, generator = Layer(40, 600, dtype), torch.Generator().manual_seed(3)
    out = torch.randn(40, 2 * 150, generator=generator).to(DEVICE, dtype)
    up = torch.randn(SLOTS, RANK, 2 * 150, generator=generator).to(DEVICE, dtype)
    tiles, ranks = lora.tile_adapters(layer.slots, SLOTS), RANKS.to(DEVICE)
    shrunk = lora.shrink_lora(layer.x, layer.down[:, :2].contiguous(), tiles, ranks)
    added = lora.expand_lora(out.clone(), shrunk, up, tiles, ranks, (150, 150))
    for name, activation in (("silu", silu_and_mul), ("gelu_tanh", gelu_tanh_and_mul)):
        found = lora.expand_lora_gated(out, shrunk, up, tiles, ranks, name)
        assert torch.equal(found, activation(added))


@pytest.mark.parametrize(("count", "in_parts"), [(1, True), (5, False), (5, True), (20, True)])
def test_shrinking_beside_a_matmul(count: int, in_parts: bool) -> None:
    """The matmul keeps its bits, and each token gets what its own adapter shrinks it to."""
    from quire.kernels.triton import matmul

    layer, generator = Layer(count, 1024, HALF), torch.Generator().manual_seed(count)
    weight = torch.randn(256, 1024, generator=generator).to(DEVICE, HALF)
    layer.slots[0] = 1
    tiles, ranks = lora.tile_adapters(layer.slots, SLOTS), RANKS.to(DEVICE)
    adapters = (layer.down, layer.slots, tiles, ranks)
    out, found = matmul.linear_shrinking(layer.x, weight, None, *adapters, in_parts)
    alone = (
        matmul.linear_split_k(layer.x, weight, None) if in_parts else matmul.linear_transposed(layer.x, weight)[None]
    )
    assert torch.equal(out, alone)
    expected = shrink_lora(layer.x.cpu(), layer.down.cpu(), tiles.cpu(), RANKS)[0].view(count, len(WIDTHS), RANK)
    for token, slot in enumerate(layer.slots.tolist()):
        rank = int(RANKS[slot]) if slot >= 0 else 0
        mine = found.sum(0).view(count, len(WIDTHS), RANK)[token, :, :rank].cpu()
        torch.testing.assert_close(mine, expected[token, :, :rank], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("count", [1, 16, 17, 2100])
def test_tiles_of_any_number_of_tokens(count: int) -> None:
    for num_slots, share in ((1, 1.0), (3, 0.5), (12, 1.0), (3, 0.0)):
        generator = torch.Generator().manual_seed(count)
        slots = torch.randint(0, num_slots, (count,), generator=generator, dtype=torch.int32)
        slots[torch.rand(count, generator=generator) >= share] = -1
        found = lora.tile_adapters(slots.to(DEVICE), num_slots).cpu()
        assert torch.equal(found, tile_adapters(slots, num_slots))
        assert (found[:, 0] >= 0).sum() <= lora._num_tiles(count, num_slots)


@pytest.mark.parametrize("seed", range(8))
def test_tokens_have_the_slots_of_their_rows(seed: int) -> None:
    """Rows without tokens among them, padding behind them."""
    row_slots, rows, starts, size = generate_rows(seed)
    found = lora.gather_adapters(row_slots.to(DEVICE), rows.to(DEVICE), starts.to(DEVICE), size)
    assert torch.equal(found.cpu(), gather_adapters(row_slots, rows, starts, size))
