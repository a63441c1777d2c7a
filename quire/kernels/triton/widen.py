"""Conversions of numbers for which the compiler takes slow instructions.

Hopper converts float16 to bfloat16, bytes to floats and a single float32 to bfloat16 at an eighth of the rate of most
instructions: an fp8 matmul of few rows took as long as that. Pairs of float32, and integers, have faster ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def widened(values, kind: tl.constexpr):
    """Values in the type `kind`, which holds each of them; fp8 numbers or any others."""
    if values.dtype == tl.float8e4nv and kind == tl.bfloat16 and cuda_capability_geq(8, 9):
        return _e4m3_as_bfloat16(values.to(tl.uint8, bitcast=True))
    return values.to(kind)


@triton.jit
def rounded(values, kind: tl.constexpr):
    """float32, rounded to what `kind` holds."""
    if kind == tl.bfloat16 and cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
            }
            """,
            "=&r,=&r,r,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return values.to(kind).to(tl.float32)


@triton.jit
def byte_values(codes, kind: tl.constexpr, KIND: tl.constexpr):
    """Bytes that are 8-bit floats or integers -> `kind`."""
    if KIND == "e4m3" and cuda_capability_geq(8, 9):
        return widened(codes.to(tl.float8e4nv, bitcast=True), kind)
    if KIND == "e4m3":  # shifted to where a float16's exponent begins, they are a 256th
        bits = ((codes & 0x80).to(tl.int16) << 8) | ((codes & 0x7F).to(tl.int16) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(kind)
    if kind == tl.bfloat16 and cuda_capability_geq(8, 0):
        return _int8_as_bfloat16(codes)
    return (small_integers(codes.to(tl.int32) + 128) - 128.0).to(kind)


@triton.jit
def small_integers(codes):
    """Integers from 0 to 2 ** 23 - 1 as float32: the last bits of 2 ** 23."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def four_floats(words, KIND: tl.constexpr):
    """The four bytes of words as float32."""
    if KIND == "e4m3" and cuda_capability_geq(8, 9):
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b;
            .reg .b32 both;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 both, low;
            mov.b32 {a, b}, both;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.rn.f16x2.e4m3x2 both, high;
            mov.b32 {a, b}, both;
            cvt.f32.f16 $2, a;
            cvt.f32.f16 $3, b;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    if KIND == "int8":
        codes = words ^ -2139062144  # 0x80808080: 128 more than each
        a0, a1 = small_integers(codes & 255) - 128.0, small_integers((codes >> 8) & 255) - 128.0
        return a0, a1, small_integers((codes >> 16) & 255) - 128.0, small_integers((codes >> 24) & 255) - 128.0
    a0 = byte_values((words & 255).to(tl.uint8), tl.float32, KIND)
    a1 = byte_values(((words >> 8) & 255).to(tl.uint8), tl.float32, KIND)
    a2 = byte_values(((words >> 16) & 255).to(tl.uint8), tl.float32, KIND)
    return a0, a1, a2, byte_values(((words >> 24) & 255).to(tl.uint8), tl.float32, KIND)


def byte_assembly(kind: str, word: str, first: str, second: str) -> list[str]:
    """Four bytes of a word as two pairs of bfloat16; `BYTE_REGISTERS` are to be declared."""
    if kind == "int8":  # as the last bits of 2 ** 23, 128 more than each
        lines = [f"xor.b32 both, {word}, 0x80808080;"]
        for pair, to in enumerate((first, second)):
            lines += [
                f"prmt.b32 left, both, 0x4B000000, 0x744{2 * pair};",
                f"prmt.b32 right, both, 0x4B000000, 0x744{2 * pair + 1};",
                "sub.f32 left, left, 0f4B000080;",
                "sub.f32 right, right, 0f4B000080;",
                f"cvt.rn.bf16x2.f32 {to}, right, left;",
            ]
        return lines
    lines = [f"mov.b32 {{low, high}}, {word};"]
    for half, to in (("low", first), ("high", second)):
        lines += [
            f"cvt.rn.f16x2.e4m3x2 both, {half};",
            "mov.b32 {even, odd}, both;",
            "cvt.f32.f16 left, even;",
            "cvt.f32.f16 right, odd;",
            f"cvt.rn.bf16x2.f32 {to}, right, left;",
        ]
    return lines


BYTE_REGISTERS = ".reg .b16 low, high, even, odd;\n.reg .b32 both, left, right;"


def _four_bytes(kind: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", BYTE_REGISTERS, *byte_assembly(kind, "$2", "$0", "$1"), "}"]))


_E4M3: tl.constexpr = _four_bytes("e4m3")
_INT8: tl.constexpr = _four_bytes("int8")


@triton.jit
def _e4m3_as_bfloat16(codes):
    return tl.inline_asm_elementwise(_E4M3, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _int8_as_bfloat16(codes):
    return tl.inline_asm_elementwise(_INT8, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
