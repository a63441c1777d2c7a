"""Scheme: how a checkpoint stores a matrix, and a matrix in that form. Knows tensors, not files or formats' names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

# ordered_index: a group index that has to be column // group, so that nobody needs it.
Role = Literal[
    "weight", "scales", "zeros", "minima", "second_scale", "group_index", "ordered_index", "input_scale", "shape"
]
GRIDS: tuple[Role, ...] = ("weight", "scales", "zeros", "minima")  # what has rows and columns as the matrix has
ActivationRule = Literal["none", "static", "per_token", "per_group"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of a normal distribution, and a 4-bit float whose values are 12ths; the last one is 1.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
# Elements that are places in a table of values.
TABLES: dict[str, tuple[float, ...]] = {
    "E2M1": (*_E2M1, *(-value for value in _E2M1)),
    "NF4": _NF4,
    "FP4": (*_FP4, *(-value for value in _FP4)),
}


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once, because a CUDA graph cannot be captured while the host's numbers are copied."""
    return torch.tensor(values, dtype=dtype, device=device)


def element_values(element: str, codes: Tensor) -> Tensor:
    """Codes [..] of any integer type, or numbers of a type that torch has -> float32."""
    if element in TABLES:
        return _constant(TABLES[element], torch.float32, codes.device)[codes.long()]
    if element == "INT4":  # two's complement; other integers are unsigned, or bytes of their own
        return ((codes.int() ^ 8) - 8).float()
    return codes.float()


@dataclass(frozen=True)
class Block:
    """Values that lie beside their own scales, a block after the other: only its decoder looks inside."""

    values: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor] = field(repr=False)  # uint8 [rows, bytes] -> float32 [rows, values]
    plain: Scheme
    """How the same values are stored when codes, scales and minima lie apart, none of them changed."""
    split: Callable[[Tensor], dict[Role, Tensor]] = field(repr=False)  # uint8 [rows, bytes] -> the tensors of `plain`


@dataclass(frozen=True)
class Packing:
    """Several elements in a word, or 32 of them in `bits` words of 32 bits, where some straddle two."""

    word: torch.dtype
    order: tuple[int, ...]  # for each of the elements in a unit its place, counted from the low bits
    axis: int = 1  # of the matrix along which neighbours share a word
    words: int = 1  # in a unit

    @property
    def bits(self) -> int:
        return 8 * self.word.itemsize * self.words // len(self.order)

    def unpack(self, words: Tensor) -> Tensor:
        """The codes of the elements, as many along `axis` as all words hold."""
        wide = 8 * self.word.itemsize
        starts = _constant(tuple(self.bits * place for place in self.order), torch.int64, words.device)
        if self.words == 1:
            codes = words.unsqueeze(self.axis + 1) >> starts.to(words.dtype).view(-1, *[1] * (1 - self.axis))
        else:
            words = words.movedim(self.axis, -1).long() & ((1 << wide) - 1)
            units = torch.nn.functional.pad(words, (0, -words.shape[-1] % self.words + 1))
            first = torch.arange(0, units.shape[-1] - 1, self.words, device=words.device)[:, None] + starts // wide
            pairs = units[..., first] | units[..., first + 1] << wide
            codes = (pairs >> starts % wide).movedim((-2, -1), (self.axis, self.axis + 1))
        return (codes & ((1 << self.bits) - 1)).flatten(self.axis, self.axis + 1)

    def unit(self, axis: int) -> int:
        """Elements along an axis that cannot be separated without cutting a word."""
        return len(self.order) if axis == self.axis else 1

    def num_words(self, axis: int, count: int) -> int:
        """Return the words that `count` elements along an axis take."""
        return count if axis != self.axis else -(-count * self.bits // (8 * self.word.itemsize))


def in_words(bits: int, axis: int = 1) -> Packing:
    """Unsigned integers one after the other in 32-bit words, the first in the low bits."""
    if 32 % bits:
        return Packing(torch.int32, tuple(range(32)), axis, words=bits)
    return Packing(torch.int32, tuple(range(32 // bits)), axis)


@dataclass(frozen=True)
class ScaleGrid:
    """How many rows and columns of the matrix share a scale; None: all of them."""

    rows: int | None
    columns: int | None
    dtype: torch.dtype

    def side(self, axis: int) -> int | None:
        return (self.rows, self.columns)[axis]


@dataclass(frozen=True)
class ZeroPoints:
    """Which code stands for 0: one for all, or one stored beside each scale."""

    implied: float | None = None
    packing: Packing | None = None  # of stored ones; they are of the matrix's element
    offset: float = 0.0  # what is added to stored ones


@dataclass(frozen=True)
class Scheme:
    """How a matrix [rows, columns] is stored: its values are (element - zero point) * scale, plus a minimum."""

    element: str  # such as "BF16", "INT4", "E2M1", or a type of blocks such as "Q4_K"
    block: Block | None = None
    packing: Packing | None = None  # None: each element is a number of its tensor's own type
    scales: ScaleGrid | None = None
    zeros: ZeroPoints | None = None
    second_scale: Literal["none", "multiplies", "divides"] = "none"  # what one number does to all scales
    activations: ActivationRule = "none"  # how what is multiplied with the matrix is to be quantized
    roles: tuple[tuple[Role, str], ...] = (("weight", "weight"),)
    """What each tensor of the matrix is, and the last part of its name in a checkpoint."""
    transposed: bool = False
    """Whether a checkpoint has the transposes of weight, scales and zeros; a StoredMatrix has them as views."""

    def __post_init__(self) -> None:
        has = dict(self.roles)
        stores_zeros = self.zeros is not None and self.zeros.implied is None
        assert ("scales" in has) == (self.scales is not None), "a scale grid has a tensor of scales"
        assert ("zeros" in has) == stores_zeros, "zero points that are not implied have a tensor"
        assert ("second_scale" in has) == (self.second_scale != "none")
        assert ("input_scale" in has) <= (self.activations != "none"), "it scales activations that are quantized"
        assert ("input_scale" in has) or self.activations != "static"

    @property
    def is_float(self) -> bool:
        """Whether it is plain numbers of a float type."""
        quantized = self.block is not None or self.packing is not None or self.scales is not None
        return not quantized and self.element.startswith(("F", "BF"))

    @property
    def has_single_rows(self) -> bool:
        """Whether each row has words and scales of its own."""
        packings = (self.packing, None if self.zeros is None else self.zeros.packing)
        return (self.scales is None or self.scales.rows == 1) and not any(p and p.axis == 0 for p in packings)

    def splits(self, axis: int, *places: int) -> bool:
        """Whether the matrix can be cut there without cutting a block, a word or a group that shares a scale."""
        if axis == 1 and "group_index" in dict(self.roles):
            return False  # a group's columns are anywhere
        units = [self.block.values if self.block is not None and axis == 1 else 1]
        units += [self.packing.unit(axis)] if self.packing is not None else []
        if self.scales is not None:
            packing = None if self.zeros is None else self.zeros.packing
            units.append((self.scales.side(axis) or 1) * (1 if packing is None else packing.unit(axis)))
        unit = math.lcm(*units)
        return not any(place % unit for place in places)

    def stored_count(self, axis: int, role: Role, count: int) -> int:
        """Return the numbers of a role's tensor that `count` rows or columns of the matrix take."""
        if role == "weight":
            if self.block is not None and axis == 1:
                return count // self.block.values * self.block.num_bytes
            return count if self.packing is None else self.packing.num_words(axis, count)
        groups = self._groups(axis, count) if count else 0
        packing = self.zeros.packing if role == "zeros" and self.zeros is not None else None
        return groups if packing is None else packing.num_words(axis, groups)

    def cut(self, role: Role, tensor: Tensor, axis: int, start: int, size: int) -> Tensor:
        """The part of a role's tensor that belongs to rows or columns [start, start + size)."""
        if role not in GRIDS:
            return tensor
        if role != "weight":
            assert self.scales is not None
            if self.scales.side(axis) is None:
                return tensor
            tensor = tensor if tensor.ndim == 2 else tensor.unsqueeze(1 - axis)
        first = self.stored_count(axis, role, start)
        return tensor.narrow(axis, first, self.stored_count(axis, role, start + size) - first)

    def dequantize(self, tensors: Mapping[Role, Tensor], shape: tuple[int, int]) -> Tensor:
        """The values as float32 [rows, columns], a new tensor where they are not float32 already."""
        if self.block is not None:
            return self.block.decode(tensors["weight"])
        values = element_values(self.element, self.codes(tensors, shape))
        index = tensors.get("group_index")
        if self.zeros is not None:
            zeros = self.zero_values(tensors)
            values = values - (zeros if isinstance(zeros, float) else self._spread(zeros, shape, index))
        if self.scales is None:
            return values
        values = values * self._spread(self.scale_values(tensors), shape, index)
        return values + self._spread(tensors["minima"], shape, index) if "minima" in tensors else values

    def scale_values(self, tensors: Mapping[Role, Tensor]) -> Tensor:
        """The scales as float32, the second-level one applied."""
        assert self.scales is not None
        scales = tensors["scales"]
        if self.scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(self.scales.dtype)  # some files have them as plain bytes
        scales = scales.float()
        if self.second_scale == "none":
            return scales
        second = tensors["second_scale"].float()
        return scales * second if self.second_scale == "multiplies" else scales / second

    def zero_values(self, tensors: Mapping[Role, Tensor]) -> Tensor | float:
        """The codes that stand for 0: one for all, or float32 beside each scale."""
        if self.zeros is None or self.zeros.implied is not None:
            return 0.0 if self.zeros is None or self.zeros.implied is None else self.zeros.implied
        stored, packing = tensors["zeros"], self.zeros.packing
        return element_values(self.element, stored if packing is None else packing.unpack(stored)) + self.zeros.offset

    def codes(self, tensors: Mapping[Role, Tensor], shape: tuple[int, int]) -> Tensor:
        """Unpacked elements [rows, columns], each an integer or a number of its tensor's type."""
        stored = tensors["weight"]
        return (stored if self.packing is None else self.packing.unpack(stored))[: shape[0], : shape[1]]

    def per_columns(self, grid: Tensor, shape: tuple[int, int], columns: int) -> Tensor:
        """A number for each group -> [rows, parts], one for every `columns` columns, which divide a group."""
        assert self.scales is not None
        rows, grid = self.scales.rows, self._grid(grid, shape)[:, : self._groups(1, shape[1])]
        grid = grid.expand(shape[0], -1) if rows is None else grid.repeat_interleave(rows, 0)[: shape[0]]
        count = -(-shape[1] // columns)
        if self.scales.columns is None:
            return grid.expand(-1, count)
        return grid.repeat_interleave(self.scales.columns // columns, 1)[:, :count]

    def _spread(self, grid: Tensor, shape: tuple[int, int], group_index: Tensor | None) -> Tensor:
        """A number for each group -> one for each element of the matrix, or what broadcasts to that."""
        assert self.scales is not None
        grid = self._grid(grid, shape)
        if self.scales.rows is not None:
            grid = grid.repeat_interleave(self.scales.rows, 0)[: shape[0]]
        if group_index is not None:
            return grid[:, group_index.long()]
        grid = grid[:, : self._groups(1, shape[1])]
        columns = self.scales.columns
        return grid if columns is None else grid.repeat_interleave(columns, 1)[:, : shape[1]]

    def _grid(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """[groups of rows, groups of columns]; where they were packed, more columns may follow."""
        groups = [self._groups(axis, shape[axis]) for axis in (0, 1)]
        return values.reshape(-1)[: math.prod(groups)].view(groups) if values.ndim < 2 else values[: groups[0]]

    def _groups(self, axis: int, count: int) -> int:
        assert self.scales is not None
        side = self.scales.side(axis)
        return 1 if side is None else -(-count // side)


_FLOAT_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
F32 = Scheme("F32")


def float_scheme(dtype: torch.dtype) -> Scheme:
    """The scheme of plain numbers of a type, named as checkpoints name it."""
    return Scheme(_FLOAT_NAMES.get(dtype, str(dtype).removeprefix("torch.").upper()))


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as it is stored, or several of them: then shape and all tensors have a dimension more in front.

    Its tensors may alias a mapped file: copy before writing.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    tensors: Mapping[Role, Tensor]

    def part(self, axis: int, start: int, size: int) -> Weight:
        """Rows or columns [start, start + size): still in its scheme if that can be cut there, else decoded."""
        assert len(self.shape) == 2
        if not self.scheme.splits(axis, start, size):
            return self.tensor().narrow(axis, start, size)
        tensors = {role: self.scheme.cut(role, tensor, axis, start, size) for role, tensor in self.tensors.items()}
        shape = (size, self.shape[1]) if axis == 0 else (self.shape[0], size)
        return StoredMatrix(self.scheme, shape, tensors)

    def plain(self) -> StoredMatrix:
        """The same matrix without blocks."""
        block = self.scheme.block
        return self if block is None else StoredMatrix(block.plain, self.shape, block.split(self.tensors["weight"]))

    def matrix(self, index: int) -> StoredMatrix:
        """One of several."""
        return StoredMatrix(
            self.scheme, self.shape[1:], {role: tensor[index] for role, tensor in self.tensors.items()}
        )

    def tensor(self) -> Tensor:
        """The values in float32."""
        if len(self.shape) == 3:
            return torch.stack([self.matrix(index).tensor() for index in range(self.shape[0])])
        rows, columns = self.shape
        return self.scheme.dequantize(self.tensors, (rows, columns))


Weight = Tensor | StoredMatrix


def as_tensor(weight: Weight) -> Tensor:
    return weight.tensor() if isinstance(weight, StoredMatrix) else weight


def scheme_of(weight: Weight) -> Scheme:
    return weight.scheme if isinstance(weight, StoredMatrix) else float_scheme(weight.dtype)


def part_of(weight: Weight, axis: int, start: int, size: int) -> Weight:
    """Rows or columns [start, start + size) of a weight, without a copy where it need not be decoded."""
    if size == weight.shape[axis]:
        return weight
    return weight.part(axis, start, size) if isinstance(weight, StoredMatrix) else weight.narrow(axis, start, size)


def matrix_of(weight: Weight, index: int) -> Weight:
    """One matrix of a three-dimensional weight."""
    return weight.matrix(index) if isinstance(weight, StoredMatrix) else weight[index]


def rows_of(weight: Weight, rows: Tensor) -> Weight:
    """A copy of some rows of a matrix, or elements of a vector, in its scheme if no two rows share anything in it."""
    if isinstance(weight, Tensor):
        return weight[rows.to(weight.device)]
    grid = weight.scheme.scales
    if grid is not None and grid.rows != 1 and weight.scheme.zeros is None:  # each row gets its own scales
        shape, columns = (weight.shape[0], weight.shape[1]), grid.columns or weight.shape[1]
        scales = weight.scheme.per_columns(weight.tensors["scales"], shape, columns)
        scheme = replace(weight.scheme, scales=replace(grid, rows=1))
        weight = StoredMatrix(scheme, weight.shape, {**weight.tensors, "scales": scales})
    if not weight.scheme.has_single_rows:
        return weight.tensor()[rows]
    tensors = {role: tensor[rows] if role in GRIDS else tensor for role, tensor in weight.tensors.items()}
    return StoredMatrix(weight.scheme, (len(rows), weight.shape[1]), tensors)


def part_scheme(scheme: Scheme, axis: int, start: int, size: int, full_size: int) -> Scheme:
    """The scheme in which `part_of` returns rows or columns of a weight that has `full_size` of them."""
    return scheme if size == full_size or scheme.is_float or scheme.splits(axis, start, size) else F32
