"""Conversions: what Triton's interpreter does of them, and their PTX, whose few instructions are interpreted here."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.kernels.triton.ptx import floats, run

pytestmark = needs_triton


def code_of(function: str) -> str:
    """The assembly of a function of widen.py."""
    from quire.kernels.triton import widen

    source = Path(widen.__file__).read_text(encoding="utf-8")
    (code,) = re.findall(rf'def {function}\(.*?"""\n( *{{.*?}})\n *"""', source, flags=re.DOTALL)
    return code


def run_on(code: str, *operands: np.ndarray, outputs: int) -> list[np.ndarray]:
    """Registers $0 on are what comes out, those behind them the operands."""
    return run(code, {f"${outputs + place}": operand for place, operand in enumerate(operands)}, outputs)


def words_of_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Words in which each byte is each of 256 values at each of the four places; the bytes [words, 4]."""
    each = np.arange(256)
    codes = np.stack([each, (each * 7 + 3) % 256, (each * 29 + 5) % 256, 255 - each], axis=1).astype(np.uint8)
    return codes.view(np.uint32)[:, 0], codes


@pytest.mark.parametrize(("name", "kind"), [("_E4M3", torch.float8_e4m3fn), ("_INT8", torch.int8)])
def test_the_bytes_of_a_word_become_four_bfloat16(name: str, kind: torch.dtype) -> None:
    from quire.kernels.triton import widen

    words, codes = words_of_bytes()
    first, second = run_on(getattr(widen, name).value, words, outputs=2)
    found = np.stack([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16], axis=1)
    expected = torch.from_numpy(codes).view(kind).to(torch.bfloat16)
    values = torch.from_numpy(found.astype(np.uint16)).view(torch.bfloat16)
    assert torch.equal(values.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_the_bytes_of_a_word_become_four_floats() -> None:
    words, codes = words_of_bytes()
    found = torch.stack([floats(value) for value in run_on(code_of("four_floats"), words, outputs=4)], dim=1)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_pairs_are_rounded_to_the_nearest() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    numbers[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x00018000, 0x7F7FFFFF]
    first, second = run_on(code_of("rounded"), numbers, numbers[::-1].copy(), outputs=2)
    for found, given in ((first, numbers), (second, numbers[::-1].copy())):
        expected = floats(given).to(torch.bfloat16).float()
        assert torch.equal(floats(found).nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_in_a_kernel(kind: str, dtype: torch.dtype) -> None:
    """By the interpreter as processors without such instructions do it, on a GPU by the PTX."""
    from quire.kernels.packed import E4M3, PackedWeight
    from quire.kernels.triton.packed_matmul import unpack

    codes = torch.arange(256, dtype=torch.uint8).repeat(32).view(1, 32, 256)
    codes[codes.bitwise_and(0x7F) == 0x7F] = 0  # NaN
    values = codes.view(E4M3 if kind == "e4m3" else torch.int8)
    weight = PackedWeight(values.to(DEVICE), torch.ones(1, 32, 2, device=DEVICE))
    assert torch.equal(unpack(weight, dtype).cpu(), values[0].to(dtype))
