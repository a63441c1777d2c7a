"""How weights find their parameters: a model declares a WeightMap, and layers write what they are handed.

Knows checkpoint names and shapes, not files: reading is the loader's work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from quire.layers.scheme import Scheme, Weight, as_tensor, rows_of

Schemes = Mapping[tuple[str, str | None], Scheme]  # of each (parameter, piece)
NO_SCHEMES: Schemes = {}


@dataclass(frozen=True)
class Destination:
    """Where one checkpoint tensor goes. No piece: the tensor holds the whole parameter."""

    module: str
    parameter: str
    piece: str | None = None


@dataclass(frozen=True)
class WeightMap:
    """Checkpoint names to parameters. Anything it does not name keeps its own name."""

    rename: dict[str, str] = field(default_factory=dict)
    """Whole dotted segments (one or a run of them) of a checkpoint's name, and what they are called here. Both sides
    of an entry may end in $: it is for the end of names alone."""
    stack: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A merged layer, and the checkpoint layers it is made of; {i} stands for any number ("{i}.gate_proj")."""
    ignore: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns (fnmatch) of checkpoint names that have no destination on purpose."""

    def resolve(self, name: str) -> Destination | None:
        """The destination of a checkpoint tensor, or None when it is ignored."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return None
        for old, new in self.rename.items():
            name = _replace_segments(name, old, new)
        path, _, parameter = name.rpartition(".")
        segments = path.split(".")
        for merged, patterns in self.stack.items():
            for pattern in sorted(patterns, key=_num_segments, reverse=True):
                size = _num_segments(pattern)
                piece = ".".join(segments[-size:])
                if _matches(piece, pattern):
                    return Destination(".".join((*segments[:-size], merged)), parameter, piece)
        return Destination(path, parameter)

    def checkpoint_name(self, destination: Destination) -> str:
        """The name under which a checkpoint holds what goes to `destination`; the inverse of `resolve`."""
        path = destination.module
        if destination.piece is not None:
            path = path.rpartition(".")[0] + "." + destination.piece
        name = f"{path}.{destination.parameter}"
        for old, new in reversed(self.rename.items()):
            name = _replace_segments(name, new, old)
        return name

    def renaming(self, *pairs: tuple[str, str]) -> WeightMap:
        return replace(self, rename={**self.rename, **dict(pairs)})

    def renaming_first(self, *pairs: tuple[str, str]) -> WeightMap:
        """The same names, replaced before all others."""
        return replace(self, rename={**dict(pairs), **self.rename})

    def ignoring(self, *patterns: str) -> WeightMap:
        return replace(self, ignore=(*self.ignore, *patterns))

    def reading(self, *layers: str) -> WeightMap:
        """Without the patterns that would ignore the weights of these layers."""
        kept = (
            pattern
            for pattern in self.ignore
            if not any(fnmatchcase(f"{layer}.{name}", pattern) for layer in layers for name in ("weight", "bias"))
        )
        return replace(self, ignore=tuple(kept))


def _num_segments(pattern: str) -> int:
    return pattern.count(".") + 1


def _matches(piece: str, pattern: str) -> bool:
    return piece == pattern or ("{i}" in pattern and re.fullmatch(_numbered(pattern), piece) is not None)


@cache
def _numbered(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(re.escape("{i}"), r"\d+"))


def _replace_segments(name: str, old: str, new: str) -> str:
    end = r"\Z" if old.endswith("$") else r"(?![^.])"
    return re.sub(rf"(?<![^.]){re.escape(old.removesuffix('$'))}{end}", new.removesuffix("$"), name)


class MappedModule(nn.Module):
    """A module tree that a checkpoint can be loaded into."""

    weight_map: WeightMap
    absent: tuple[str, ...] = ()
    """Paths of modules that other processes hold; weights that would go there are ignored."""

    def is_elsewhere(self, destination: Destination) -> bool:
        return any(f"{destination.module}.".startswith(f"{path}.") for path in self.absent)


class Filling(NamedTuple):
    """What a checkpoint tensor fills: the shapes that it may have, and the pieces that are there afterwards."""

    shapes: tuple[tuple[int, ...], ...]
    pieces: tuple[str | None, ...]


class WeightedLayer(nn.Module):
    """A layer with weights. It says what a checkpoint must hold for it and keeps that in its own layout."""

    def weight_names(self) -> tuple[str, ...]:
        """What a checkpoint calls this layer's weights, such as ("weight", "bias")."""
        return tuple(name for name, _ in self.named_parameters(recurse=False))

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        """The checkpoint shape of each piece of `parameter`; the key None stands for a parameter of one piece."""
        return {None: tuple(self.get_parameter(parameter).shape)}

    def whole_shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a checkpoint tensor that holds all pieces at once: one after the other along dimension 0."""
        shapes = list(self.pieces(parameter).values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        """What a tensor for `piece` fills, None being the whole; None if there is no such piece."""
        pieces = self.pieces(parameter)
        if piece is None:
            return Filling((self.whole_shape(parameter),), tuple(pieces))
        return Filling((pieces[piece],), (piece,)) if piece in pieces else None

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        """Choose how the weights are kept, and take their storage; called once, before `load`.

        `path` is the layer's place in the model, `schemes` are those in which a checkpoint stores them; what is not
        among them comes as float32. Most layers have nothing to choose.
        """
        return self

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        """Take one piece, or with piece None the whole, and keep it in this layer's own form.

        `weight` has the checkpoint's shape and may alias a read-only mapping.
        """
        order = self.kept_order(piece)
        self.get_parameter(parameter).data.copy_(as_tensor(weight if order is None else rows_of(weight, order)))

    def kept_order(self, piece: str | None) -> Tensor | None:
        """Of each output of a piece as it is kept, its row in the checkpoint; None: the rows are in that order."""
        return None

    def finish(self) -> None:
        """All weights are there; called once before the first forward. Most layers have nothing left to do."""
        return None

    def planned_bytes(self, schemes: Schemes) -> int:
        """Bytes this layer's weights take when the checkpoint stores (parameter, piece) in these schemes."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


def weighted_layers(model: nn.Module) -> list[tuple[str, WeightedLayer]]:
    """Every layer with weights and its path, each once; parameters that belong to no such layer are a mistake."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, WeightedLayer)}
    owned = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    stray = [name for name, parameter in model.named_parameters() if id(parameter) not in owned]
    assert not stray, f"{', '.join(stray)} belong to no WeightedLayer"
    return list(layers.items())


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Unfilled storage on the current default device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
