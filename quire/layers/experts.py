"""Router and grouped linear layers of a mixture of experts, whole or sharded over a parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, Self, TypedDict, Unpack

import torch
from torch import Tensor

from quire.layers.adapters import AdapterSizes, ExpertAdapters, LoraPair, TokenTiles
from quire.layers.fusion import ROWS, Forms, Passed, RankSum, whole
from quire.layers.linear import Linear, MatrixLayer, Piece
from quire.layers.quant.base import GroupedMethod, MatrixSpec
from quire.layers.quant.plain import PlainLinear
from quire.layers.quant.registry import choose_grouped
from quire.layers.scheme import F32, Scheme, Weight, as_tensor, matrix_of, part_of, part_scheme, rows_of
from quire.layers.weights import NO_SCHEMES, Filling, Schemes, empty_parameter
from quire.ops.base import Target
from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.routing import ROUTE, ROUTER_LOGITS, Routing, weigh
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError
from quire.utils.expert_placement import place_experts

Layout = Literal["rows", "columns", "interleaved_columns"]
"""How a checkpoint tensor with all experts lies: [experts, out, in], or [experts, in, out] with the outputs of its
two pieces one after the other or taking turns."""


class RoutingTape:
    """Sees what a router chooses, and may say what is done instead."""

    def __call__(self, logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return ids, weights


class Recording(RoutingTape):
    """Keeps the choices of one forward pass."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []  # [n, k] int32 each

    def __call__(self, logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        self.ids.append(ids)
        return ids, weights


class Replay(RoutingTape):
    """Sends the tokens of each forward pass where the next of a recording went, weighted by the router's logits."""

    def __init__(self, ids: Tensor, routing: Routing) -> None:
        self._ids, self._routing, self._start = ids, routing, 0  # ids: [tokens, k], in the order of computation

    def __call__(self, logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        given = self._ids[self._start : self._start + ids.shape[0]].to(ids.device)
        self._start += ids.shape[0]
        return given.to(torch.int32), weigh(logits, given.long(), self._routing)


NO_TAPE = RoutingTape()


class Router(Linear):
    """Which experts each token goes to, and with which weights. Every rank computes all of it, in float32."""

    role = "router"

    def __init__(
        self, hidden_size: int, num_experts: int, routing: Routing, *, bias: bool, choice_bias: bool, target: Target
    ) -> None:
        target = replace(target, dtype=torch.float32)
        super().__init__(hidden_size, (Piece(None, num_experts, 0, num_experts),), bias=bias, target=target)
        self.routing, self.tape = routing, NO_TAPE
        self.choice_bias = empty_parameter(num_experts, dtype=torch.float32) if choice_bias else None
        self._route, self._logits = ROUTE.bind(target), ROUTER_LOGITS.bind(target)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden] -> (expert ids [n, k] int32, weights [n, k] float32)."""
        logits = self._scored(x)
        return self.tape(logits, *self._route(logits, self.choice_bias, self.routing))

    def choose_one(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for one expert a token, and a weight of 1 for each; ids, weights and ones [n, 1]."""
        logits = self._scored(x)
        _, ones = self._route(logits, None, Routing(1, score="logits", weighting="softmax"))
        return *self.tape(logits, *self._route(logits, self.choice_bias, self.routing)), ones

    def _scored(self, x: Tensor) -> Tensor:
        method = self.method
        if self._logits is ROUTER_LOGITS.reference or not isinstance(method, PlainLinear):
            return whole(self(x.float()))
        return self._logits(x, method.weight, method.bias)

    def weight_names(self) -> tuple[str, ...]:
        return super().weight_names() + (() if self.choice_bias is None else ("choice_bias",))

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        found = super().filling(parameter, piece)
        if parameter != "choice_bias" or found is None:
            return found
        return Filling((*found.shapes, (1, *found.shapes[0])), found.pieces)

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        if parameter == "choice_bias":
            assert self.choice_bias is not None
            self.choice_bias.data.copy_(as_tensor(weight).flatten())
        else:
            super().load(parameter, piece, weight)

    def planned_bytes(self, schemes: Schemes) -> int:
        return super().planned_bytes(schemes) + (0 if self.choice_bias is None else self.choice_bias.nbytes)


class TokenGate(Linear):
    """One number for each token, by which what a shared expert gives is weighed; each rank computes it."""

    def __init__(self, hidden_size: int, *, target: Target) -> None:
        super().__init__(hidden_size, (Piece(None, 1, 0, 1),), bias=False, target=target)

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        return Filling(((1, self.full_in_features), (self.full_in_features,)), (None,))

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        super().load(parameter, piece, as_tensor(weight).view(1, -1))


class GroupedKind(TypedDict):
    bias: bool
    layout: Layout
    target: Target
    group: ParallelGroup


class GroupedLinear(MatrixLayer):
    """A matrix for each expert, built from pieces one above the other.

    A checkpoint has a tensor for each piece of each expert ("7.up_proj"), one for a piece of all experts
    ("all.up_proj", [experts, out, in]), or one for everything, in the given layout.
    """

    method: GroupedMethod
    adapters: ExpertAdapters | None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        pieces: tuple[Piece, ...],
        in_slice: tuple[int, int] | None = None,
        held: Sequence[int] | None = None,
        **kind: Unpack[GroupedKind],
    ) -> None:
        """`held`: the experts whose matrices are here; None: all."""
        super().__init__(bias=kind["bias"], target=kind["target"])
        self.num_experts = self.num_matrices = num_experts
        self.full_in_features = in_features
        self.held = held or range(num_experts)
        self.in_start, self.in_features = in_slice or (0, in_features)
        self._pieces, self._layout, self._group = pieces, kind["layout"], kind["group"]
        self.itemsize = self._target.dtype.itemsize  # of activations

    def takes(self, sizes: AdapterSizes) -> bool:
        return sizes.on_experts

    def adapt(self, sizes: AdapterSizes) -> None:
        widths = [piece.size for piece in self._pieces]
        with self._device:
            self.adapters = ExpertAdapters(len(self.held), self.in_features, widths, sizes, self._target)

    def adapter_shape(self, piece: str | None) -> tuple[int, int] | None:
        """With piece None, of a matrix that holds all pieces of an expert."""
        found = [part.full_size for part in self._pieces if piece is None or part.name == piece.partition(".")[2]]
        return (sum(found), self.full_in_features) if found else None

    def adapter_parts(self, piece: str | None, pair: LoraPair) -> dict[int, LoraPair]:
        """piece "7.up_proj"; "7." is all pieces of an expert."""
        number, _, name = (piece or "").partition(".")
        if int(number) not in self.held:
            return {}
        down = pair.down[:, self.in_start : self.in_start + self.in_features]
        first = self.held.index(int(number)) * len(self._pieces)
        return {
            first + index: LoraPair(down, as_tensor(part_of(rows, 0, part.start, part.size)).T)
            for index, rows in self._parts(pair.up.T.contiguous(), name or None, stored="rows")
            for part in (self._pieces[index],)
        }

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        sizes = tuple(piece.size for piece in self._pieces)
        spec = MatrixSpec(self.in_features, sizes, self._bias, self._target, path, "grouped", len(self.held))
        with self._device:
            self.method = choose_grouped(spec, self._loaded_schemes(schemes))
        return self

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {
            f"{expert}.{piece.name}": self._shape(parameter, piece.full_size)
            for expert in range(self.num_experts)
            for piece in self._pieces
        }

    def whole_shape(self, parameter: str) -> tuple[int, ...]:
        shape = self._shape(parameter, sum(piece.full_size for piece in self._pieces))
        return (self.num_experts, *(shape if self._layout == "rows" else shape[::-1]))

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        if piece is None:
            rows = self._shape(parameter, sum(part.full_size for part in self._pieces))
            shapes = dict.fromkeys((self.whole_shape(parameter), (self.num_experts, *rows)))  # stored ones are rows
            return Filling(tuple(shapes), tuple(self.pieces(parameter)))
        number, _, name = piece.partition(".")
        found = next((part for part in self._pieces if part.name == name), None)
        if found is None or (number != "all" and int(number) >= self.num_experts):
            return None
        shape = self._shape(parameter, found.full_size)
        if number != "all":
            return Filling((shape,), (piece,))
        experts = range(self.num_experts)
        return Filling(((self.num_experts, *shape),), tuple(f"{expert}.{name}" for expert in experts))

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        for expert, index, rows in self._split(piece, weight, self.held):
            self._load_part(parameter, self.held.index(expert), index, rows)

    def split(self, piece: str | None, weight: Weight) -> Iterator[tuple[str, Weight]]:
        """What a checkpoint tensor for `piece` holds, one piece of one expert ("7.up_proj") at a time."""
        for expert, index, rows in self._split(piece, weight, range(self.num_experts)):
            yield f"{expert}.{self._pieces[index].name}", rows

    def _split(self, piece: str | None, weight: Weight, wanted: Sequence[int]) -> Iterator[tuple[int, int, Weight]]:
        number, _, name = ("all." if piece is None else piece).partition(".")
        for expert in wanted if number == "all" else {int(number)}.intersection(wanted):
            matrix = matrix_of(weight, expert) if number == "all" else weight
            for index, rows in self._parts(matrix, name or None):
                yield expert, index, rows

    def _shape(self, parameter: str, outputs: int) -> tuple[int, ...]:
        return (outputs, self.full_in_features) if parameter == "weight" else (outputs,)

    def _parts(self, matrix: Weight, name: str | None, stored: Layout | None = None) -> Iterator[tuple[int, Weight]]:
        """(index of a piece, its rows in the checkpoint) of one expert; `name` None: the matrix holds all pieces."""
        if name is None and (stored or self._layout) != "rows" and isinstance(matrix, Tensor):
            matrix = matrix.t()
        start = 0
        for index, piece in enumerate(self._pieces):
            if name is None and self._layout == "interleaved_columns" and len(self._pieces) == 2:
                yield index, rows_of(matrix, torch.arange(index, 2 * piece.full_size, 2))
            elif name in (None, piece.name):
                yield index, part_of(matrix, 0, start, piece.full_size)
                start += piece.full_size

    def _load_part(self, parameter: str, expert: int, index: int, rows: Weight) -> None:
        piece = self._pieces[index]
        rows = part_of(rows, 0, piece.start, piece.size)
        if parameter == "weight":
            self.method.load(expert, index, part_of(rows, 1, self.in_start, self.in_features))
        else:
            self.method.load_bias(expert, sum(part.size for part in self._pieces[:index]), as_tensor(rows))

    def _loaded_schemes(self, schemes: Schemes) -> list[Scheme]:
        return [self._loaded_scheme(schemes, expert, piece) for expert in self.held for piece in self._pieces]

    def _loaded_scheme(self, schemes: Schemes, expert: int, piece: Piece) -> Scheme:
        names = (f"{expert}.{piece.name}", f"all.{piece.name}", None)
        stored = next((schemes["weight", name] for name in names if ("weight", name) in schemes), F32)
        rows = part_scheme(stored, 0, piece.start, piece.size, piece.full_size)
        return part_scheme(rows, 1, self.in_start, self.in_features, self.full_in_features)


def each_slot(method: GroupedMethod, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """rows [n * k, in], each times the matrix of its own expert of expert_ids [n, k]: [n * k, out]; 0 elsewhere."""
    return GroupedMethod.slots(method, rows.view(*expert_ids.shape, -1), expert_ids).flatten(0, 1)


def expert_slots(num_experts: int, group: ParallelGroup) -> Sequence[int]:
    """The expert of each slot of all ranks, when the model is loaded; each rank has a share of the slots."""
    if not group.num_redundant_experts:
        return range(num_experts)
    total = num_experts + group.num_redundant_experts
    if total % group.size or total > num_experts * group.size:
        most = num_experts * (group.size - 1)
        raise ConfigError(
            f"num_redundant_experts is {group.num_redundant_experts}, but {num_experts} experts and the copies must"
            f" be a multiple of {group.size} ranks, with no expert twice on one; set"
            f" {min(most, group.num_redundant_experts + -total % group.size)}"
        )
    return place_experts([1] * num_experts, total, group.size)


def held_experts(num_experts: int, group: ParallelGroup) -> Sequence[int] | None:
    """Those that a rank holds whole; None: it holds a slice of every one, or there is one rank."""
    if not group.splits_experts or group.size == 1:
        return None
    slots = expert_slots(num_experts, group)
    start, count = group.share_of(len(slots), "experts")
    return slots[start : start + count]


class GroupedGateUp(GroupedLinear):
    """Each rank holds a slice of the outputs of every expert's gate and up matrices, or some experts whole."""

    def __init__(
        self, num_experts: int, in_features: int, width: int, activation: str, **kind: Unpack[GroupedKind]
    ) -> None:
        group = kind["group"]
        held = held_experts(num_experts, group)
        slices = ((0, width) if held else group.slice_of(width, name) for name in ("gate_proj", "up_proj"))
        named = zip(("gate_proj", "up_proj"), slices, strict=True)
        pieces = tuple(Piece(name, width, *part) for name, part in named)
        super().__init__(num_experts, in_features, pieces, held=held, **kind)
        self._activation = activation

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """x [n, in_features], expert_ids [n, k] -> [n, k, width]."""
        return self.method.gate_up(x, expert_ids, self._activation)

    def adapted(self, x: Tensor, expert_ids: Tensor, tiles: list[TokenTiles]) -> Tensor:
        """The same with what adapters add before the activation; tiles: of rows, one for each slot of a token."""
        assert self.adapters is not None
        rows = x.repeat_interleave(expert_ids.shape[1], 0)
        gate_up = self.adapters.add(each_slot(self.method, rows, expert_ids), rows, tiles)
        return ACTIVATIONS[self._activation](gate_up).view(*expert_ids.shape, -1)


class GroupedUp(GroupedLinear):
    """Each rank holds a slice of the outputs of every expert's up matrix, of experts without gates."""

    def __init__(
        self, num_experts: int, in_features: int, width: int, *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        if group.splits_experts:
            raise ConfigError("enable_expert_parallel does not take experts without gates; leave it out")
        piece = Piece("up_proj", width, *group.slice_of(width, "up_proj"))
        super().__init__(num_experts, in_features, (piece,), bias=bias, layout="rows", target=target, group=group)

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """x [n, in_features], expert_ids [n, k] -> [n, k, width]: each slot as a token with one expert."""
        rows = x.repeat_interleave(expert_ids.shape[1], 0)
        return each_slot(self.method, rows, expert_ids).view(*expert_ids.shape, -1)


class GroupedDown(GroupedLinear):
    """Each rank holds a slice of the inputs of every expert's down matrix, or some experts; results are summed."""

    __call__: Callable[..., Passed]

    def __init__(self, num_experts: int, width: int, out_features: int, **kind: Unpack[GroupedKind]) -> None:
        group = kind["group"]
        if group.exact and group.size > 1 and not (group.splits_experts and group.expert_exchange != "all_reduce"):
            raise ConfigError(
                "tp_exact takes models with experts if these are added up as one rank does it; set"
                " --enable-expert-parallel and --all2all-backend all_to_all or allgather_reducescatter,"
                " or leave --tp-exact out"
            )
        pieces = (Piece("down_proj", out_features, 0, out_features),)
        held = held_experts(num_experts, group)
        in_slice = None if held else group.slice_of(width, "input features")
        super().__init__(num_experts, width, pieces, in_slice=in_slice, held=held, **kind)
        self.summed = RankSum(group, by_shares=group.expert_exchange == "allgather_reducescatter")

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes all of the result."""
        return self._group.size == 1

    def feed(self, accepted: Forms) -> None:
        """See Stage.feed."""
        self.summed.feed(accepted & ROWS, deterministic=True)

    def forward(self, a: Tensor, expert_ids: Tensor, weights: Tensor) -> Passed:
        """a [n, k, width], expert_ids and weights [n, k] -> [n, out_features]."""
        return self.summed(self.method.down(a, expert_ids, weights))

    def adapted(self, a: Tensor, expert_ids: Tensor, weights: Tensor, tiles: list[TokenTiles]) -> Tensor:
        """The same with what adapters add, before the ranks' results are summed."""
        assert self.adapters is not None
        n, k, width = a.shape
        out = self.method.down(a, expert_ids, weights)
        added = torch.zeros(n * k, out.shape[1], dtype=torch.float32, device=a.device)
        self.adapters.add(added, a.reshape(n * k, width), tiles)
        total = out.float()
        for slot, part in enumerate(added.view(n, k, -1).unbind(1)):
            total = total + part * weights[:, slot : slot + 1]
        return total.to(out.dtype)

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        if parameter == "bias" and self._group.rank and not self._group.splits_experts:
            weight = torch.zeros_like(as_tensor(weight))  # the sum over ranks must contain the bias once
        super().load(parameter, piece, weight)
