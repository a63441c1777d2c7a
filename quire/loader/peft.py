"""Weights of LoRA adapters as PEFT stores them, checked against the model that they are served on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.layers.adapters import Adaptable, LoraPair, PackedAdapter
from quire.layers.weights import Destination, MappedModule
from quire.loader.adapter_files import WEIGHTS_FILE, digest_of, existing, read_peft_config
from quire.loader.checkpoint import TensorInfo
from quire.loader.mapped import MappedFile
from quire.loader.safetensors import read_header
from quire.types.errors import AdapterError
from quire.utils.turns import no_rest

_LISTED = 8  # names in an error message
_PREFIX = "base_model.model."
_INNER = ".base_layer"  # a module inside that of another adapter
_EXPERTS = ("gate_up_proj", "down_proj")
_TIED_HEAD = "lm_head.projection"
_SIDES = {"A": "down", "B": "up"}
_MATRIX = r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight(?:_scale)?"
_TABLE = r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.default)?"


@dataclass(frozen=True)
class AdapterLayers:
    """An adapter in host memory: for each linear layer that it is on, what goes into a slot."""

    digest: str
    rank: int  # the highest
    layers: Mapping[str, PackedAdapter]  # by the layer's name, so that it fits a model that is loaded again

    @property
    def num_bytes(self) -> int:
        return sum(packed.down.nbytes + packed.up.nbytes for packed in self.layers.values())


def read_adapter(
    folder: Path,
    model: MappedModule,
    max_rank: int,
    dtype: torch.dtype,
    rest: Callable[[], None] = no_rest,
) -> AdapterLayers:
    """Read and check everything: each tensor fits a matrix of the model, each of a pair is there.

    AdapterError names the first thing that does not fit. `rest` is called often.
    """
    config, path = read_peft_config(folder), existing(folder, WEIGHTS_FILE)
    file = _AdapterFile(path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Adaptable)}
    found: dict[str, dict[int, LoraPair]] = {}
    highest = 0
    for module, sides in _by_module(path, file.infos).items():
        rest()
        destination = model.weight_map.resolve(f"{module}.weight")
        if (destination is not None and model.is_elsewhere(destination)) or _is_elsewhere(model, module, layers):
            continue  # another stage of a pipeline serves it
        shapes = {side: file.infos[sides[side]].shape for side in ("down", "up")}
        grouped = _grouped(model, layers, module, shapes)
        if grouped is not None:
            name, piece, count = grouped, None, layers[grouped].num_matrices
        else:
            (name, piece), count = _destination(path, model, layers, module, destination), 1
        # PEFT's patterns name the parameter of all experts, not the module that holds it.
        named = module if grouped is None else f"{module.removesuffix(_INNER)}.{name.rpartition('.')[2]}"
        rank = config.rank(named)
        _check_shapes(path, module, shapes, rank, max_rank, layers[name], piece, count)
        down, up = (file.read(sides[side], sides.get(f"{side} scale")) for side in ("down", "up"))
        if not (down.isfinite().all() and up.isfinite().all()):
            raise AdapterError(f"{path}: {module} has values that are not finite")
        up = up.T * config.scale(named, rank)
        if grouped is None:
            pairs = {piece: LoraPair(down.to(dtype), up.to(dtype).contiguous())}
        else:  # lora_A has one expert after the other, lora_B has them taking turns
            lines = zip(range(count), down.to(dtype).split(rank), strict=True)
            pairs = {f"{expert}.": LoraPair(mine, up[expert::count].to(dtype).contiguous()) for expert, mine in lines}
        for part, pair in pairs.items():
            found.setdefault(name, {}).update(layers[name].adapter_parts(part, pair))
        highest = max(highest, rank)
    packed = {}
    for name, parts in found.items():
        rest()
        if (adapters := layers[name].adapters) is not None:
            packed[name] = adapters.pack(parts)
            if not (packed[name].down.isfinite().all() and packed[name].up.isfinite().all()):
                raise AdapterError(
                    f"{path}: {name} has values too large for {adapters.dtype}; set --lora-dtype float32 on a CPU,"
                    " --dtype bfloat16 elsewhere"
                )
    return AdapterLayers(digest_of(folder, rest), highest, packed)


class _AdapterFile:
    """The tensors of a safetensors file as float32."""

    def __init__(self, path: Path) -> None:
        self._path, (self.infos, self._starts) = path, read_header(path)
        self._file = MappedFile(path)

    def read(self, name: str, scale: str | None) -> Tensor:
        """One matrix; with a scale of its own, or one for each of its rows, where it is stored in eight bits."""
        matrix = self._stored(name)
        if scale is None:
            if matrix.dtype == torch.int8:
                raise AdapterError(f"{self._path}: {name} is int8 but has no {name}_scale; save it with its scales")
            return matrix.float()
        factors = self._stored(scale).float()
        if factors.numel() not in (1, len(matrix)):
            raise AdapterError(
                f"{self._path}: {scale} has {factors.numel()} scales; a matrix of {list(matrix.shape)} takes 1 or"
                f" {len(matrix)}"
            )
        return matrix.float() * factors.view(-1, 1)

    def _stored(self, name: str) -> Tensor:
        info = self.infos[name]
        stored = self._file.view(self._starts[name], info.num_bytes)
        return torch.from_numpy(stored.copy()).view(info.dtype).view(info.shape)


def _by_module(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
    """Module -> "down" and "up", "down scale" and "up scale" -> the tensor that holds it."""
    found: dict[str, dict[str, str]] = {}
    strangers = []
    for name in infos:
        match = re.fullmatch(_MATRIX, name) or re.fullmatch(_TABLE, name)
        if match is None:
            strangers.append(name)
        else:
            side = _SIDES[match["side"]] + (" scale" if name.endswith("_scale") else "")
            found.setdefault(match["module"].removeprefix(_PREFIX), {})[side] = name
    if strangers:
        raise AdapterError(
            f"{path}: {', '.join(sorted(strangers)[:_LISTED])} ({len(strangers)} in all) are no LoRA matrices of"
            f" linear layers; {_fix(strangers)}"
        )
    halves = sorted(module for module, sides in found.items() if not {"down", "up"} <= sides.keys())
    if halves or not found:
        what = f"{', '.join(halves[:_LISTED])} has lora_A or lora_B alone" if halves else "it has no LoRA matrices"
        raise AdapterError(f"{path}: {what}; save the adapter again")
    return found


def _fix(names: Sequence[str]) -> str:
    """What to do about tensors that cannot be served."""
    if any(name.endswith(("embed_tokens.weight", "lm_head.weight", ".base_layer.weight")) for name in names):
        return "whole embeddings are not served beside an adapter: save it with save_embedding_layers=False"
    return "only those can be served"


def _grouped(
    model: MappedModule, layers: Mapping[str, Adaptable], module: str, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The layer with all experts' matrices that an adapter is on whose module is called "experts"; None: not that.

    PEFT wraps one parameter of such a module after the other, so that names do not tell them apart; shapes do.
    """
    name = module.removesuffix(_INNER)
    destination = model.weight_map.resolve(f"{name}.{_EXPERTS[0]}")
    if not name.endswith("experts") or destination is None:
        return None
    for parameter in _EXPERTS:
        path = f"{destination.module}.{parameter}"
        layer = layers.get(path)
        shape = None if layer is None or layer.adapters is None else layer.adapter_shape(None)
        if shape is not None and (shapes["up"][0], shapes["down"][-1]) == shape:
            return path
    return None


def _is_elsewhere(model: MappedModule, module: str, layers: Mapping[str, Adaptable]) -> bool:
    """Whether this is a tied head, and not the last stage of a pipeline."""
    return module == "lm_head" and bool(model.absent) and _TIED_HEAD not in layers


def _destination(
    path: Path,
    model: MappedModule,
    layers: Mapping[str, Adaptable],
    module: str,
    destination: Destination | None,
) -> tuple[str, str | None]:
    """The name of the layer that an adapter of a module is on, and the piece of it."""
    if destination is None and module == "lm_head" and _TIED_HEAD in layers:
        return _TIED_HEAD, None
    layer = None if destination is None else layers.get(destination.module)
    if destination is None or layer is None or layer.adapters is None:
        if "experts" in module.split("."):
            why = "holds experts: start the engine with --lora-experts, which takes memory for each of them"
        elif layer is not None:
            why = "is no layer that adapters are served on; do not target it"
        else:
            why = f"is no linear layer of {type(model).__name__}; was the adapter trained on this model?"
        raise AdapterError(f"{path}: {module} {why}")
    if layer.adapter_shape(destination.piece) is None:
        raise AdapterError(f"{path}: {module} holds several matrices of the model at once; adapt each by itself")
    return destination.module, destination.piece


def _check_shapes(
    path: Path,
    module: str,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    max_rank: int,
    layer: Adaptable,
    piece: str | None,
    count: int,
) -> None:
    """`count`: matrices of that rank that are stored as one."""
    found = layer.adapter_shape(piece)
    assert found is not None
    outputs, inputs = found
    expected = {"down": (count * rank, inputs), "up": (outputs, count * rank)}
    for side, shape in shapes.items():
        if shape != expected[side]:
            raise AdapterError(
                f"{path}: {module} has a lora_{'A' if side == 'down' else 'B'} of {list(shape)}, but the model and"
                f" rank {rank} take {list(expected[side])}; was the adapter trained on this model?"
            )
    if rank > max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank} but --max-lora-rank is {max_rank}; raise it")
