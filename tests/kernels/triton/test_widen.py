"""Conversions: what Triton's interpreter does of them, and their PTX, whose few instructions are interpreted here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton

Registers = dict[str, np.ndarray]


def floats(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def bits_of(values: Tensor) -> np.ndarray:
    unsigned = {2: torch.uint16, 4: torch.uint32}[values.element_size()]
    return values.contiguous().view(unsigned).numpy().astype(np.uint32)


def two(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low & 0xFFFF | (high & 0xFFFF) << 16


def from_e4m3(pair: np.ndarray) -> np.ndarray:
    low, high = (
        bits_of(torch.from_numpy(part.astype(np.uint8)).view(torch.float8_e4m3fn).to(torch.float16))
        for part in (pair & 255, pair >> 8)
    )
    return two(low, high)


def to_bfloat16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return two(bits_of(floats(low).to(torch.bfloat16)), bits_of(floats(high).to(torch.bfloat16)))


def from_half(half: np.ndarray) -> np.ndarray:
    return bits_of(torch.from_numpy(half.astype(np.uint16)).view(torch.float16).float())


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    chosen = int(selector)
    assert all(chosen >> 4 * place & 15 < 8 for place in range(4)), "no byte's sign is asked for"
    both = [operand >> 8 * place & 255 for operand in np.broadcast_arrays(a, b) for place in range(4)]
    return np.bitwise_or.reduce([both[chosen >> 4 * place & 7] << 8 * place for place in range(4)])


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "cvt.f32.f16": from_half,
    "cvt.rn.bf16x2.f32": to_bfloat16,
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "prmt.b32": permute,
    "sub.f32": lambda a, b: bits_of(floats(a) - floats(b)),
}


def run(function: str, *operands: np.ndarray, outputs: int) -> list[np.ndarray]:
    """The PTX of a function of widen.py: registers $0 on are what comes out, those behind them the operands."""
    from quire.kernels.triton import widen

    source = Path(widen.__file__).read_text(encoding="utf-8")
    (code,) = re.findall(rf'def {function}\(.*?"""\n( *{{.*?}})\n *"""', source, flags=re.DOTALL)
    registers: Registers = {
        f"${outputs + place}": operand.astype(np.uint32) for place, operand in enumerate(operands)
    }

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.broadcast_to(np.uint32(int(name[2:], 16)), operands[0].shape)
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in code.strip(" {}\n").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        if instruction in ("", ".reg"):
            continue
        if instruction == "mov.b32":
            names = re.findall(r"[$\w]+", rest)
            if rest.startswith("{"):
                registers[names[0]], registers[names[1]] = value(names[2]) & 0xFFFF, value(names[2]) >> 16
            else:
                registers[names[0]] = value(names[1])
            continue
        target, *given = re.findall(r"[$\w]+", rest)
        registers[target] = OPERATIONS[instruction](*map(value, given)).astype(np.uint32)
    return [registers[f"${place}"] for place in range(outputs)]


def words_of_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Words in which each byte is each of 256 values at each of the four places; the bytes [words, 4]."""
    each = np.arange(256)
    codes = np.stack([each, (each * 7 + 3) % 256, (each * 29 + 5) % 256, 255 - each], axis=1).astype(np.uint8)
    return codes.view(np.uint32)[:, 0], codes


@pytest.mark.parametrize(
    ("function", "kind"), [("_e4m3_as_bfloat16", torch.float8_e4m3fn), ("_int8_as_bfloat16", torch.int8)]
)
def test_the_bytes_of_a_word_become_four_bfloat16(function: str, kind: torch.dtype) -> None:
    words, codes = words_of_bytes()
    first, second = run(function, words, outputs=2)
    found = np.stack([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16], axis=1)
    expected = torch.from_numpy(codes).view(kind).to(torch.bfloat16)
    values = torch.from_numpy(found.astype(np.uint16)).view(torch.bfloat16)
    assert torch.equal(values.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_the_bytes_of_a_word_become_four_floats() -> None:
    words, codes = words_of_bytes()
    found = torch.stack([floats(value) for value in run("four_floats", words, outputs=4)], dim=1)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_pairs_are_rounded_to_the_nearest() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    numbers[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x00018000, 0x7F7FFFFF]
    first, second = run("rounded", numbers, numbers[::-1].copy(), outputs=2)
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
