"""LoRA adapters as PEFT stores them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from quire.layers.adapters import LoraPair
from quire.layers.linear import Linear
from quire.layers.weights import MappedModule
from quire.loader.checkpoint import TensorInfo
from quire.loader.mapped import MappedFile
from quire.loader.safetensors import PICKLED, read_header
from quire.types.errors import AdapterError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_LISTED = 8  # names in an error message
_PREFIX = "base_model.model."
_SIDES: dict[str, Literal["down", "up"]] = {"lora_A": "down", "lora_B": "up"}


class PeftConfig(msgspec.Struct, frozen=True):
    """What adapter_config.json says; other keys are about training."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None

    def scale(self, module: str, rank: int) -> float:
        """The factor on what an adapter of this rank adds to a module."""
        alpha = next((value for key, value in self.alpha_pattern.items() if _names(key, module)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        return next((value for key, value in self.rank_pattern.items() if _names(key, module)), self.r)


def _names(pattern: str, module: str) -> bool:
    """Whether a key of a pattern means this module, as PEFT reads it."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise AdapterError(f"{CONFIG_FILE}: {pattern!r} is no regular expression: {error}") from None


def digest_of(folder: Path) -> str:
    """Of the bytes of an adapter's files."""
    found = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with _existing(folder, name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    pickled = sorted(each.name for each in folder.glob("adapter_model*") if each.suffix in PICKLED)
    hint = f"; {', '.join(pickled)} is pickled (it could run code): save it as safetensors" if pickled else ""
    raise AdapterError(f"{folder} has no {name}{hint or '; give a folder that PEFT has saved an adapter into'}")


def read_peft_config(folder: Path) -> PeftConfig:
    path = _existing(folder, CONFIG_FILE)
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise AdapterError(f"{path} has {path.stat().st_size} bytes; a config has at most {_MOST_CONFIG_BYTES}")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=PeftConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path}: {error}") from None
    refusals = {
        f"peft_type is {config.peft_type!r}; only LORA can be served": config.peft_type.upper() != "LORA",
        "use_dora is set; merge the adapter into its base model (merge_and_unload) and serve that": config.use_dora,
        f"modules_to_save has {config.modules_to_save}: whole modules beside the adapter; merge it into its base model"
        " (merge_and_unload) and serve that": bool(config.modules_to_save),
        "trainable_token_indices is set; merge the adapter into its base model": bool(config.trainable_token_indices),
        f"bias is {config.bias!r}; only adapters that train no biases can be served": config.bias != "none",
        "fan_in_fan_out is set, which no model here has": config.fan_in_fan_out,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise AdapterError(f"{path}: {refusal}")
    return config


@dataclass(frozen=True)
class AdapterLayers:
    """An adapter in host memory: for each linear layer of a model, what is added to each of its pieces."""

    digest: str
    rank: int  # the highest
    layers: Mapping[Linear, Mapping[int, LoraPair]]

    @property
    def num_bytes(self) -> int:
        pairs = (pair for parts in self.layers.values() for pair in parts.values())
        return sum(pair.down.nbytes + pair.up.nbytes for pair in pairs)


def read_adapter(folder: Path, model: MappedModule, max_rank: int, dtype: torch.dtype) -> AdapterLayers:
    """Read and check everything: each tensor fits a matrix of the model, each of a pair is there.

    AdapterError names the first thing that does not fit.
    """
    config, path = read_peft_config(folder), _existing(folder, WEIGHTS_FILE)
    infos, starts = read_header(path)
    file = MappedFile(path)
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    layers: dict[Linear, dict[int, LoraPair]] = {}
    highest = 0
    for module, sides in _by_module(path, infos).items():
        layer, piece = _destination(path, model, linears, module)
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
        parts = layers.setdefault(layer, {})
        parts |= {index: _held(part) for index, part in layer.adapter_parts(piece, pair).items()}
        highest = max(highest, rank)
    return AdapterLayers(digest_of(folder), highest, layers)


def _held(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.down.contiguous(), pair.up.contiguous())


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
            f"{path}: {', '.join(sorted(strangers)[:_LISTED])} ({len(strangers)} in all) are no LoRA matrices of linear"
            " layers; only those can be served"
        )
    halves = sorted(module for module, sides in found.items() if len(sides) < 2)
    if halves or not found:
        what = f"{', '.join(halves[:_LISTED])} has lora_A or lora_B alone" if halves else "it has no LoRA matrices"
        raise AdapterError(f"{path}: {what}; save the adapter again")
    return found


def _destination(
    path: Path, model: MappedModule, linears: Mapping[str, Linear], module: str
) -> tuple[Linear, str | None]:
    destination = model.weight_map.resolve(f"{module}.weight")
    layer = None if destination is None else linears.get(destination.module)
    if destination is None or layer is None or layer.adapters is None:
        raise AdapterError(
            f"{path}: {module} is no linear layer of {type(model).__name__} that adapters are served on; was the adapter"
            " trained on this model?"
        )
    if layer.filling("weight", destination.piece) is None or destination.piece not in layer.pieces("weight"):
        raise AdapterError(f"{path}: {module} holds several matrices of the model at once; adapt each by itself")
    return layer, destination.piece


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
                f"{path}: {module} has a lora_{'A' if side == 'down' else 'B'} of {list(shape)}, but the model and rank"
                f" {rank} take {list(expected[side])}; was the adapter trained on this model?"
            )
    if rank > max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank} but --max-lora-rank is {max_rank}; raise it")
