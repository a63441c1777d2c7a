"""PTX of a few instructions, interpreted: a register is an array with a number for each thread, or for each case."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

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


def either(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    assert int(table) == 0xEA, "the one that is used: a & b | c"
    return a & b | c


def by_halves(a: np.ndarray, b: np.ndarray, compute: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
    low, high = (
        bits_of(compute(floats((a >> part & 0xFFFF) << 16), floats((b >> part & 0xFFFF) << 16)).to(torch.bfloat16))
        for part in (0, 16)
    )
    return two(low, high)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "cvt.f32.f16": from_half,
    "cvt.rn.bf16x2.f32": to_bfloat16,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "lop3.b32": either,
    "sub.bf16x2": lambda a, b: by_halves(a, b, torch.sub),
    "mul.bf16x2": lambda a, b: by_halves(a, b, torch.mul),
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "prmt.b32": permute,
    "sub.f32": lambda a, b: bits_of(floats(a) - floats(b)),
}


def multiply_matrices(registers: Registers, names: list[str]) -> None:
    """mma.m16n8k16: 16 lines by 8 tokens, of a warp's 32 threads."""
    out, a, b, c = names[:4], names[4:8], names[8:10], names[10:]
    lane = np.arange(32)
    line, quarter = lane // 4, lane % 4
    lines, tokens = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for place, name in enumerate(a):
        for half in range(2):
            at = (line + 8 * (place % 2), 2 * quarter + 8 * (place // 2) + half)
            lines[at] = floats((registers[name] >> 16 * half & 0xFFFF) << 16).numpy()
    for place, name in enumerate(b):
        for half in range(2):
            tokens[2 * quarter + 8 * place + half, line] = floats(
                (registers[name] >> 16 * half & 0xFFFF) << 16
            ).numpy()
    product = torch.from_numpy((lines.astype(np.float64) @ tokens).astype(np.float32))
    for place, name in enumerate(out):
        part = product[line + 8 * (place // 2), 2 * quarter + place % 2]
        registers[name] = bits_of(part + floats(registers[c[place]]))


def run(code: str, operands: dict[str, np.ndarray], outputs: int) -> list[np.ndarray]:
    """What a block of assembly leaves in registers $0 on."""
    registers: Registers = {name: value.astype(np.uint32) for name, value in operands.items()}
    shape = next(iter(operands.values())).shape

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.broadcast_to(np.uint32(int(name[2:], 16)), shape)
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in code.strip(" {}\n").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        names = re.findall(r"[$\w]+", rest)
        if instruction in ("", ".reg"):
            continue
        if instruction.startswith("mma.sync.aligned.m16n8k16"):
            multiply_matrices(registers, names)
        elif instruction == "mov.b32" and rest.startswith("{"):
            registers[names[0]], registers[names[1]] = value(names[2]) & 0xFFFF, value(names[2]) >> 16
        elif instruction == "mov.b32":
            registers[names[0]] = value(names[1])
        else:
            target, *given = names
            registers[target] = OPERATIONS[instruction](*map(value, given)).astype(np.uint32)
    return [registers[f"${place}"] for place in range(outputs)]
