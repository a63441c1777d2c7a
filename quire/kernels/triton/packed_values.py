"""What packed codes stand for, in registers: bytes, words of four columns, and the scales that go with them."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.widen import byte_values, small_integers


@triton.jit
def scale_of(scale_ptr, at, mask):
    """Scales as float32; int8 are exponents of two, uint8 8-bit floats."""
    if scale_ptr.dtype.element_ty == tl.uint8:
        return byte_values(tl.load(scale_ptr + at, mask=mask, other=0), tl.float32, "e4m3")
    if scale_ptr.dtype.element_ty == tl.int8:
        exponent = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32) & 255
        return (exponent << 23).to(tl.float32, bitcast=True)
    return tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def zero_of(zero_ptr, at, mask, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """128 more than the zero point of each line, which is 8 where none are stored, as bfloat16 [LINES, COLUMNS]."""
    if zero_ptr is None:
        zeros = tl.full([LINES, COLUMNS], 136.0, tl.bfloat16)
    else:
        zero = tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32) + 128.0
        zeros = tl.broadcast_to(zero.to(tl.bfloat16)[:, None], [LINES, COLUMNS])
    return zeros


@triton.jit
def power_of(scale_ptr, at, mask, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """2 ** 63 times the scales of lines, which are powers of two up to 2 ** 64, as bfloat16 [LINES, COLUMNS].

    Halfway to the 2 ** 126 that `float_slices` lacks: neither overflows; sums are multiplied with the other half.
    """
    exponent = tl.broadcast_to(tl.load(scale_ptr + at, mask=mask, other=0)[:, None], [LINES, COLUMNS]).to(tl.int16)
    return (((exponent & 255) + 63) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def float_slices(words, low, high):
    """Words of E2M1 -> their four columns as bfloat16, the first two times `low` and the others times `high`.

    Shifted to where exponent and mantissa of a bfloat16 begin, E2M1 is 2 ** -126 of what it means.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sign, part;
        shl.b32 sign, $4, 12;
        and.b32 sign, sign, 0x80008000;
        shl.b32 part, $4, 6;
        lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $0, part, $5;
        shl.b32 sign, $4, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 part, $4, 2;
        lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $1, part, $5;
        shl.b32 sign, $4, 4;
        and.b32 sign, sign, 0x80008000;
        shr.b32 part, $4, 2;
        lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $2, part, $6;
        and.b32 sign, $4, 0x80008000;
        shr.b32 part, $4, 6;
        lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $3, part, $6;
        }
        """,
        "=r,=r,=r,=r,r,r,r",
        [words, low, high],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _integer_slices(words, low, high):
    """Words -> their four columns as bfloat16, the first two less `low` and the others less `high`, all plus 128.

    128 has a bfloat16 whose last bits count ones: a code in them is 128 more than itself.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 part;
        lop3.b32 part, $4, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 $0, part, $5;
        shr.b32 part, $4, 4;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 $1, part, $5;
        shr.b32 part, $4, 8;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 $2, part, $6;
        shr.b32 part, $4, 12;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 $3, part, $6;
        }
        """,
        "=r,=r,=r,=r,r,r,r",
        [words, low, high],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def slice_of(words, zero, SLICE: tl.constexpr, IS_FLOAT: tl.constexpr):
    """What one of a word's codes stands for, float32; `zero` is 128 more than the zero point."""
    codes = (words >> (4 * SLICE)) & 15
    if IS_FLOAT:  # shifted to where exponent and mantissa of a float16 begin, it is 2 ** -14 of what it means
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return small_integers(codes) + 128.0 - zero.to(tl.float32)


@triton.jit
def slices_of(
    words,
    low,
    high,
    kind: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ASM: tl.constexpr,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Words and, as bfloat16, 128 more than the zero points of their first and last two codes -> four columns."""
    if ASM and IS_FLOAT:
        power = tl.full([LINES, WORDS], 85070591730234615865843651857942052864.0, tl.bfloat16)  # 2 ** 126
        w0, w1, w2, w3 = float_slices(words, power, power)
    elif ASM:
        w0, w1, w2, w3 = _integer_slices(words, low, high)
    else:
        w0, w1 = slice_of(words, low, 0, IS_FLOAT).to(kind), slice_of(words, low, 1, IS_FLOAT).to(kind)
        w2, w3 = slice_of(words, high, 2, IS_FLOAT).to(kind), slice_of(words, high, 3, IS_FLOAT).to(kind)
    return w0, w1, w2, w3


@triton.jit
def _spread(grid, LINES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """A number for each group [LINES, GROUPS] -> one for each column."""
    return tl.reshape(tl.broadcast_to(grid[:, :, None], [LINES, GROUPS, GROUP]), [LINES, GROUPS * GROUP])


@triton.jit
def fine_values(
    values,  # [LINES, columns] float32
    scale_ptr,
    minimum_ptr,
    at,  # [LINES, COUNT]: where the scales of each SPAN columns are
    mask,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Codes times the scales of their groups, plus minima; float32."""
    values *= _spread(scale_of(scale_ptr, at, mask), LINES, COUNT, SPAN)
    if minimum_ptr is not None:
        values += _spread(tl.load(minimum_ptr + at, mask=mask, other=0.0), LINES, COUNT, SPAN)
    return values


@triton.jit
def fine_bytes(
    codes,  # [LINES, COLUMNS]
    scale_ptr,
    minimum_ptr,
    at,  # [LINES]: where the scale of the first column is
    mask,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of bytes, float32."""
    SPAN: tl.constexpr = GROUP if GROUP < COLUMNS else COLUMNS
    COUNT: tl.constexpr = COLUMNS // SPAN
    values = byte_values(codes, tl.float32, KIND)
    each = at[:, None] + tl.arange(0, COUNT)[None, :]
    return fine_values(values, scale_ptr, minimum_ptr, each, mask[:, None], LINES, COUNT, SPAN)


@triton.jit
def fine_slice(
    words,  # [LINES, WORDS]
    scale_ptr,
    minimum_ptr,
    groups,  # [LINES]: where the scales of the lines begin
    start,
    mask,
    SLICE: tl.constexpr,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of one slice of the chunks from column `start` on, float32."""
    COUNT: tl.constexpr = WORDS // 16
    first = start + tl.arange(0, COUNT) * 64 + 16 * SLICE
    zero = tl.full([LINES, WORDS], 136.0 if minimum_ptr is None else 128.0, tl.float32)
    values = slice_of(words, zero, SLICE, KIND == "e2m1")
    at = groups[:, None] + (first // GROUP)[None, :]
    return fine_values(values, scale_ptr, minimum_ptr, at, mask[:, None], LINES, COUNT, 16)


@triton.jit
def fine_slices(
    words,
    scale_ptr,
    minimum_ptr,
    groups,
    start,
    mask,
    kind: tl.constexpr,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of all four slices, rounded to `kind`."""
    w0 = fine_slice(words, scale_ptr, minimum_ptr, groups, start, mask, 0, KIND, LINES, WORDS, GROUP).to(kind)
    w1 = fine_slice(words, scale_ptr, minimum_ptr, groups, start, mask, 1, KIND, LINES, WORDS, GROUP).to(kind)
    w2 = fine_slice(words, scale_ptr, minimum_ptr, groups, start, mask, 2, KIND, LINES, WORDS, GROUP).to(kind)
    w3 = fine_slice(words, scale_ptr, minimum_ptr, groups, start, mask, 3, KIND, LINES, WORDS, GROUP).to(kind)
    return w0, w1, w2, w3
