"""Weights of LoRA adapters as PEFT stores them, checked against the model that they are served on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quire.layers.adapters import LoraPair, PackedAdapter
from quire.layers.linear import Linear
from quire.layers.weights import MappedModule
from quire.loader.adapter_files import WEIGHTS_FILE, digest_of, existing, read_peft_config
from quire.loader.checkpoint import TensorInfo
from quire.loader.mapped import MappedFile
from quire.loader.safetensors import read_header
from quire.types.errors import AdapterError

_LISTED = 8  # names in an error message
_PREFIX = "base_model.model."
_SIDES: dict[str, Literal["down", "up"]] = {"lora_A": "down", "lora_B": "up"}


@dataclass(frozen=True)
class AdapterLayers:
    """An adapter in host memory: for each linear layer that it is on, what goes into a slot."""

    digest: str
    rank: int  # the highest
    layers: Mapping[str, PackedAdapter]  # by the layer's name, so that it fits a model that is loaded again

    @property
    def num_bytes(self) -> int:
        return sum(packed.down.nbytes + packed.up.nbytes for packed in self.layers.values())


def read_adapter(folder: Path, model: MappedModule, max_rank: int, dtype: torch.dtype) -> AdapterLayers:
    """Read and check everything: each tensor fits a matrix of the model, each of a pair is there.

    AdapterError names the first thing that does not fit.
    """
    config, path = read_peft_config(folder), existing(folder, WEIGHTS_FILE)
    infos, starts = read_header(path)
    file = MappedFile(path)
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    layers: dict[str, dict[int, LoraPair]] = {}
    highest = 0
    for module, sides in _by_module(path, infos).items():
        found = model.weight_map.resolve(f"{module}.weight")
        if found is not None and model.is_elsewhere(found):
            continue  # another stage of a pipeline serves it
        name, piece = _destination(path, model, linears, module)
        layer = linears[name]
        shapes = {side: infos[name].shape for side, name in sides.items()}
        _check_shapes(path, module, shapes, config.rank(module), max_rank, layer, piece)

        def tensor(name: str) -> Tensor:
            stored = file.view(starts[name], infos[name].num_bytes)
            return torch.from_numpy(stored.copy()).view(infos[name].dtype).view(infos[name].shape).float()

        down, up = tensor(sides["down"]), tensor(sides["up"])
        rank = len(down)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise AdapterError(f"{path}: {module} has values that are not finite")
        pair = LoraPair(down.to(dtype), (up.T * config.scale(module, rank)).to(dtype).contiguous())
        layers.setdefault(name, {}).update(layer.adapter_parts(piece, pair))
        highest = max(highest, rank)
    packed = {
        name: adapters.pack(parts)
        for name, parts in layers.items()
        if (adapters := linears[name].adapters) is not None
    }
    return AdapterLayers(digest_of(folder), highest, packed)


def _by_module(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
    """Module -> "down" and "up" -> the tensor that holds it."""
    found: dict[str, dict[str, str]] = {}
    strangers = []
    for name in infos:
        match = re.fullmatch(r"(.+)\.(lora_A|lora_B)(?:\.default)?\.weight", name)
        if match is None:
            strangers.append(name)
        else:
            found.setdefault(match[1].removeprefix(_PREFIX), {})[_SIDES[match[2]]] = name
    if strangers:
        raise AdapterError(
            f"{path}: {', '.join(sorted(strangers)[:_LISTED])} ({len(strangers)} in all) are no LoRA matrices of"
            f" linear layers; {_fix(strangers)}"
        )
    halves = sorted(module for module, sides in found.items() if len(sides) < 2)
    if halves or not found:
        what = f"{', '.join(halves[:_LISTED])} has lora_A or lora_B alone" if halves else "it has no LoRA matrices"
        raise AdapterError(f"{path}: {what}; save the adapter again")
    return found


def _fix(names: Sequence[str]) -> str:
    """What to do about tensors that cannot be served."""
    if any(".lora_embedding_" in name for name in names):
        return "train it without the embeddings among its target_modules, or serve the model with it merged"
    if any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in names):
        return (
            "save it with save_embedding_layers=False if it trained no embeddings, or serve the model with it merged"
        )
    return "only those can be served"


def _destination(
    path: Path, model: MappedModule, linears: Mapping[str, Linear], module: str
) -> tuple[str, str | None]:
    """The name of the layer that an adapter of a module is on, and the piece of it."""
    destination = model.weight_map.resolve(f"{module}.weight")
    layer = None if destination is None else linears.get(destination.module)
    if destination is None or layer is None or layer.adapters is None:
        if "experts" in module.split("."):
            why = "holds experts, on which adapters are not served; train one on attention and dense layers"
        elif layer is not None:
            why = f"is no layer that adapters are served on (its role is {layer.role!r}); do not target it"
        else:
            why = f"is no linear layer of {type(model).__name__}; was the adapter trained on this model?"
        raise AdapterError(f"{path}: {module} {why}")
    if layer.filling("weight", destination.piece) is None or destination.piece not in layer.pieces("weight"):
        raise AdapterError(f"{path}: {module} holds several matrices of the model at once; adapt each by itself")
    return destination.module, destination.piece


def _check_shapes(
    path: Path,
    module: str,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    max_rank: int,
    layer: Linear,
    piece: str | None,
) -> None:
    outputs, inputs = layer.pieces("weight")[piece]
    expected = {"down": (rank, inputs), "up": (outputs, rank)}
    for side, shape in shapes.items():
        if shape != expected[side]:
            raise AdapterError(
                f"{path}: {module} has a lora_{'A' if side == 'down' else 'B'} of {list(shape)}, but the model and"
                f" rank {rank} take {list(expected[side])}; was the adapter trained on this model?"
            )
    if rank > max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank} but --max-lora-rank is {max_rank}; raise it")
