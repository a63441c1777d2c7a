"""GgufCheckpoint: a GGUF file with Hugging Face's config keys, tensor names and value conventions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.layers.scheme import Scheme, StoredMatrix, Weight
from quire.loader.checkpoint import Checkpoint, TensorInfo, natural_key
from quire.loader.gguf_config import architecture_of, config_from_gguf
from quire.loader.gguf_file import GgufFile, GgufTensor
from quire.loader.gguf_names import ROPE_TABLES, hf_tensor_name
from quire.loader.gguf_quants import SCHEMES, SUPPORTED_TYPES, decoded_dtype, dequantize
from quire.types.errors import CheckpointError


class GgufCheckpoint(Checkpoint):
    """Reads one GGUF file; block formats are dequantized by `get` and handed out as they are by `stored`."""

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path, string_arrays=False)
        _, self._architecture = architecture_of(self.file)
        self.config = config_from_gguf(self.file)
        stored = self._stored_by_hf_name()
        self._stored = {name: stored[name] for name in sorted(stored, key=natural_key)}
        self._infos = {
            name: TensorInfo(
                self._shape(tensor), decoded_dtype(tensor.type), tensor.num_bytes, self._scheme(name, tensor)
            )
            for name, tensor in self._stored.items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def get(self, name: str) -> Tensor:
        tensor = self._find(name)
        value = dequantize(self.file.data(tensor), tensor.type, tensor.shape)
        if self._architecture.norms_plus_one and name.endswith("norm.weight") and ".linear_attn." not in name:
            value -= 1
        if name.endswith(".A_log"):  # stored as what decays are made with
            value = value.double().neg().log()
        if self._is_tiled(name, ".out_proj."):
            return value[:, self._grouped(value.shape[1], 0)]
        if self._is_flat(tensor):
            hidden = int(self.config["hidden_size"])
            return (value if value.shape[-1] == hidden else value.transpose(1, 2)).reshape(-1, hidden)
        order = self._row_order(name)
        return value if order is None else value[order]

    def stored(self, name: str) -> Weight:
        """A block-quantized matrix as it is, rows in Hugging Face's order; anything else as `get` has it."""
        tensor, scheme = self._find(name), self._infos[name].quantized
        if scheme is None:
            return self.get(name)
        blocks = torch.from_numpy(self.file.data(tensor)).view(*tensor.shape[:-1], -1)
        order = self._row_order(name)
        return StoredMatrix(scheme, tensor.shape, {"weight": blocks if order is None else blocks[order]})

    def release(self, name: str) -> None:
        self.file.release(self._find(name))

    def release_all(self) -> None:
        self.file.release_all()

    def _find(self, name: str) -> GgufTensor:
        if name not in self._stored:
            raise CheckpointError(f"{self.file.path} has no tensor {name!r}")
        return self._stored[name]

    def _scheme(self, name: str, tensor: GgufTensor) -> Scheme | None:
        """Of a block-quantized matrix, or of those of all experts; None for what is handed out as a tensor."""
        if self._is_flat(tensor):  # the rows of some are columns, which are no whole blocks
            return None
        if self._is_tiled(name, ".out_proj."):  # columns of heads, which are no whole blocks, are in another order
            return None
        return SCHEMES.get(tensor.type) if len(tensor.shape) in (2, 3) else None

    def _is_flat(self, tensor: GgufTensor) -> bool:
        return self._architecture.flat_experts and len(tensor.shape) == 3

    def _shape(self, tensor: GgufTensor) -> tuple[int, ...]:
        """Of Hugging Face's tensor."""
        if not self._is_flat(tensor):
            return tensor.shape
        hidden = int(self.config["hidden_size"])
        return (math.prod(tensor.shape) // hidden, hidden)

    def _row_order(self, name: str) -> Tensor | None:
        """The order that rows have in Hugging Face's tensor, if it is another."""
        rows = self._infos[name].shape[0]
        if heads := self._interleaved_heads(name):
            return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
        if self._is_tiled(name, ".in_proj_qkv.") or self._is_tiled(name, ".conv1d."):
            keys = 2 * int(self.config["linear_num_key_heads"]) * int(self.config["linear_key_head_dim"])
            return self._grouped(rows, keys)
        if any(self._is_tiled(name, part) for part in (".in_proj_", ".A_log", ".dt_bias")):
            return self._grouped(rows, 0)
        return None

    def _is_tiled(self, name: str, part: str) -> bool:
        return self._architecture.tiled_values and f".linear_attn{part}" in name

    def _grouped(self, size: int, begin: int) -> Tensor:
        """Places in a file of what belongs to heads of values, grouped by heads of keys, from `begin` on."""
        keys, values = int(self.config["linear_num_key_heads"]), int(self.config["linear_num_value_heads"])
        places = torch.arange(begin, size).view(values // keys, keys, -1).transpose(0, 1).flatten()
        return torch.cat((torch.arange(begin), places))

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows are stored as interleaved rope pairs; 0 if they are not."""
        if not self._architecture.interleaved_qk or not (".q_proj." in name or ".k_proj." in name):
            return 0
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        heads, rows = int(self.config[key]), self._infos[name].shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.file.path}: tensor {name!r} has {rows} rows, which {heads} heads cannot share; convert the "
                f"model again"
            )
        return heads

    def _stored_by_hf_name(self) -> dict[str, GgufTensor]:
        stored = {}
        for tensor in self.file.tensors.values():
            if tensor.name in ROPE_TABLES:
                continue
            name = hf_tensor_name(self._architecture, tensor.name)
            if name is None:
                raise CheckpointError(
                    f"{self.file.path}: tensor {tensor.name!r} has no place in a {self.config['model_type']} "
                    f"model; the file is of a variant that is not supported"
                )
            if tensor.type not in SUPPORTED_TYPES:
                raise CheckpointError(
                    f"{self.file.path}: tensor {tensor.name!r} has type {tensor.type}; supported types: "
                    f"{', '.join(SUPPORTED_TYPES)}. Quantize the model to one of them"
                )
            stored[name] = tensor
        return stored
