"""Loading as a checked bijection: every checkpoint tensor has one destination or is ignored by name, and every
parameter is filled exactly once. Everything is checked before the first tensor is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quire.layers.fusion import settle
from quire.layers.quant.base import LinearMethod, MatrixMethod
from quire.layers.scheme import F32, Scheme
from quire.layers.weights import (
    NO_SCHEMES,
    Destination,
    Filling,
    MappedModule,
    Schemes,
    WeightedLayer,
    weighted_layers,
)
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.types.errors import WeightMismatchError

# Types of weights that only quantized checkpoints have.
_PACKED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
LISTED = 20  # names per kind in an error message

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all), after each tensor


@dataclass(frozen=True)
class LoadReport:
    num_tensors: int
    num_bytes: int  # as stored in the checkpoint
    ignored: list[str]
    weight_only: list[str]
    """What weights are stored as that ask for quantized activations and are multiplied by others."""


@dataclass(frozen=True)
class _Target:
    layer: WeightedLayer
    path: str  # of the layer
    parameter: str

    def pieces(self) -> list[str | None]:
        """All that must arrive."""
        return list(self.layer.pieces(self.parameter))

    def filling(self, piece: str | None) -> Filling | None:
        return self.layer.filling(self.parameter, piece)


@dataclass
class _Plan:
    writes: dict[str, tuple[_Target, Destination]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    quantized: str = ""
    """A tensor that only quantized checkpoints have, in one that nothing says is quantized."""

    def schemes(self, tensors: Mapping[str, TensorInfo]) -> dict[WeightedLayer, dict[tuple[str, str | None], Scheme]]:
        """In which the tensors of each layer are stored."""
        found: dict[WeightedLayer, dict[tuple[str, str | None], Scheme]] = {}
        for name, (target, destination) in self.writes.items():
            found.setdefault(target.layer, {})[(destination.parameter, destination.piece)] = tensors[name].scheme
        return found

    def check(self, model: MappedModule) -> None:
        problems = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "misshapen": self.misshapen,
            "given twice": self.duplicate,
        }
        if any(problems.values()):
            lines = [f"{kind} ({len(names)}): {_listing(names)}" for kind, names in problems.items() if names]
            hint = (
                f"\ntensors such as {self.quantized} are those of a quantized checkpoint, and its config.json has no"
                " quantization_config: copy it from where the model was quantized"
            )
            raise WeightMismatchError(
                f"the checkpoint does not fit {type(model).__name__}; is it complete and of the architecture its"
                " config names?\n" + "\n".join(lines) + (hint if self.quantized else "")
            )


def load_weights(model: MappedModule, checkpoint: Checkpoint, progress: Progress | None = None) -> LoadReport:
    """Fill every layer of `model`, each in its own form. Reads each tensor once, in the checkpoint's order."""
    tensors = checkpoint.tensors()
    plan = _make_plan(model, tensors)
    plan.check(model)
    schemes = plan.schemes(tensors)
    allocate(model, schemes)
    total = sum(tensors[name].num_bytes for name in plan.writes)
    done, still_open = 0, Counter(target.layer for target, _ in plan.writes.values())
    for name, (target, destination) in plan.writes.items():
        weight = checkpoint.stored(name)
        if tuple(weight.shape) != tensors[name].shape:
            raise WeightMismatchError(
                f"{name} was announced as {list(tensors[name].shape)} but holds {list(weight.shape)}"
            )
        target.layer.load(destination.parameter, destination.piece, weight)
        del weight
        checkpoint.release(name)
        still_open[target.layer] -= 1
        if not still_open[target.layer]:
            target.layer.finish()
        done += tensors[name].num_bytes
        if progress is not None:
            progress(done, total)
    checkpoint.release_all()
    settle(model)
    weight_only = {
        scheme.element
        for layer, stored in schemes.items()
        for method in layer.children()
        for scheme in stored.values()
        if isinstance(method, MatrixMethod) and scheme.activations != "none" and not method.quantizes(scheme)
    }
    return LoadReport(len(plan.writes), total, plan.ignored, sorted(weight_only))


def allocate(model: nn.Module, schemes: Mapping[WeightedLayer, Schemes] | None = None) -> None:
    """Choose how each layer keeps its weights and take their storage, where the layers were built.

    `schemes` are those in which a checkpoint stores what each layer has; None: all is float32.
    """
    for path, layer in weighted_layers(model):
        layer.allocate(path, NO_SCHEMES if schemes is None else schemes.get(layer, NO_SCHEMES))


def stored_schemes(
    model: MappedModule, tensors: Mapping[str, TensorInfo] | None, otherwise: Scheme = F32
) -> Mapping[WeightedLayer, Schemes]:
    """In which these tensors are stored, by layer (None: all would be `otherwise`); checked as by `load_weights`."""
    if tensors is None:
        return {
            layer: dict.fromkeys(((name, None) for name in layer.weight_names()), otherwise)
            for _, layer in weighted_layers(model)
        }
    plan = _make_plan(model, tensors)
    plan.check(model)
    return plan.schemes(tensors)


def planned_bytes(model: MappedModule, tensors: Mapping[str, TensorInfo] | None, otherwise: Scheme = F32) -> int:
    """Bytes that the weights take once they are loaded from these tensors (None: all would be `otherwise`).

    Checks what `load_weights` checks, and allocates the weights; on any device, which may be "meta".
    """
    return bytes_in(model, stored_schemes(model, tensors, otherwise))


def bytes_in(model: nn.Module, schemes: Mapping[WeightedLayer, Schemes]) -> int:
    """Bytes that the weights take once they are loaded from such ones. Allocates them."""
    allocate(model, schemes)
    return sum(layer.planned_bytes(stored) for layer, stored in schemes.items())


def decoded_elements(model: MappedModule, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What quantized weights are stored as that become plain floats when they are loaded, after `allocate`."""
    stored = _make_plan(model, tensors).schemes(tensors)
    return sorted(
        {
            scheme.element
            for layer, schemes in stored.items()
            for method in layer.children()
            for scheme in schemes.values()
            if isinstance(method, LinearMethod) and not scheme.is_float and method.decodes(scheme)
        }
    )


def destinations_of(
    model: MappedModule, tensors: Mapping[str, TensorInfo]
) -> dict[str, tuple[WeightedLayer, Destination]]:
    """Where each tensor of a checkpoint goes, once what `load_weights` checks was checked."""
    plan = _make_plan(model, tensors)
    plan.check(model)
    return {name: (target.layer, destination) for name, (target, destination) in plan.writes.items()}


def count_parameters(model: MappedModule) -> int:
    """Numbers in the checkpoint that the model takes, whatever part of them this rank holds."""
    return sum(
        math.prod(shape)
        for _, layer in weighted_layers(model)
        for name in layer.weight_names()
        for shape in layer.pieces(name).values()
    )


def _make_plan(model: MappedModule, tensors: Mapping[str, TensorInfo]) -> _Plan:
    plan, targets = _Plan(), _targets(model)
    open_pieces = {path: dict.fromkeys(target.pieces()) for path, target in targets.items()}
    for name, info in tensors.items():
        destination = model.weight_map.resolve(name)
        if destination is None or model.is_elsewhere(destination):
            plan.ignored.append(name)
            continue
        path = f"{destination.module}.{destination.parameter}"
        filling = targets[path].filling(destination.piece) if path in targets else None
        if filling is None:
            plan.unexpected.append(name)
            continue
        if any(piece not in open_pieces[path] for piece in filling.pieces):
            plan.duplicate.append(name)
            continue
        for piece in filling.pieces:
            del open_pieces[path][piece]
        if info.shape not in filling.shapes:
            expected = " or ".join(str(list(shape)) for shape in filling.shapes)
            plan.misshapen.append(f"{name} (expected {expected}, found {list(info.shape)})")
        plan.writes[name] = (targets[path], destination)
    if not any(info.quantized for info in tensors.values()):
        packed = (f"{name} ({info.dtype})" for name, info in tensors.items() if info.dtype in _PACKED)
        plan.quantized = next(packed, "")
    for path, pieces in open_pieces.items():
        module, _, parameter = path.rpartition(".")
        plan.missing += [model.weight_map.checkpoint_name(Destination(module, parameter, piece)) for piece in pieces]
    return plan


def _targets(model: MappedModule) -> dict[str, _Target]:
    """Every weight by its path. Shared layers appear once, under their first path."""
    return {
        f"{path}.{name}": _Target(layer, path, name)
        for path, layer in weighted_layers(model)
        for name in layer.weight_names()
    }


def _listing(names: list[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
