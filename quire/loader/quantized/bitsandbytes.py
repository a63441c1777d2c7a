"""Checkpoints of bitsandbytes: 4-bit codes in blocks of the flattened matrix, or bytes with a scale per output."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from quire.layers.scheme import TABLES, Packing, Role, ScaleGrid, Scheme
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint
from quire.types.errors import CheckpointError
from quire.utils.schema import decode_json

_HIGH_FIRST = Packing(torch.uint8, (1, 0))
_STATE = "weight.quant_state.bitsandbytes__"
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class _State(msgspec.Struct):
    """What a quantized matrix says of itself."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: _Size
    shape: tuple[_Size, _Size]
    nested_blocksize: _Size | None = None  # of scales that are quantized themselves
    nested_offset: float = 0.0


class BitsAndBytes(QuantizedCheckpoint):
    reads = "nf4 and fp4, their scales quantized or not, and int8 with a scale per output"
    beside = ("weight.*", "weight_format")
    flat = True

    def configure(self) -> None:
        self._states: dict[str, _State] = {}

    def split(self, name: str) -> tuple[str, str]:
        path, weight, rest = name.partition(".weight.")
        return (path, f"weight.{rest}") if weight else super().split(name)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        if "SCB" in leaves:
            roles: tuple[tuple[Role, str], ...] = (("weight", "weight"), ("scales", "SCB"))
            return Scheme("INT8", scales=ScaleGrid(1, None, torch.float32), activations="per_token", roles=roles)
        state_name = next((leaf for leaf in leaves if leaf.startswith(_STATE)), None)
        if state_name is None:
            return None
        state = self._states[path] = self._state(f"{path}.{state_name}")
        if state.shape[1] % state.blocksize:
            raise CheckpointError(
                f"{path}.weight has {state.shape[1]} inputs in blocks of {state.blocksize}, which go on in the next"
                " row: quantize the model with a block size that divides them"
            )
        return Scheme(
            state.quant_type.upper(),
            packing=_HIGH_FIRST,
            scales=ScaleGrid(1, state.blocksize, torch.float32),
            roles=(("weight", "weight"), ("scales", "weight.absmax")),
        )

    def shape(self, path: str, scheme: Scheme, leaves: Leaves) -> tuple[int, int] | None:
        return self._states[path].shape if path in self._states else None

    def dtypes(self, scheme: Scheme, role: Role) -> tuple[torch.dtype, ...]:
        dtypes = super().dtypes(scheme, role)
        return (*dtypes, torch.uint8) if role == "scales" and scheme.packing is not None else dtypes

    def present(self, path: str, tensors: dict[Role, Tensor]) -> None:
        state = self._states.get(path)
        if state is None:
            self._check_order(path)
            tensors["scales"] = tensors["scales"] / 127
            return
        self._check_table(path, state)
        if state.nested_blocksize is not None:
            if tensors["scales"].dtype != torch.uint8:
                raise CheckpointError(
                    f"{path}.weight.absmax is not of torch.uint8, as nested ones are; download it again"
                )
            codes = tensors["scales"].flatten().long()
            table, largest = (self._stored.get(f"{path}.weight.nested_{name}") for name in ("quant_map", "absmax"))
            largest = largest.float().flatten()
            if table.shape != (256,) or len(largest) * state.nested_blocksize < len(codes):
                raise CheckpointError(
                    f"{path}.weight.nested_quant_map or nested_absmax is cut; download the file again"
                )
            each = largest[torch.arange(len(codes)) // state.nested_blocksize]
            tensors["scales"] = table.float()[codes] * each + state.nested_offset

    def _state(self, name: str) -> _State:
        try:
            return msgspec.convert(decode_json(bytes(self._stored.get(name).tolist())), _State)
        except (ValueError, TypeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{name} is damaged or of a kind that cannot be read ({error})") from error

    def _check_order(self, path: str) -> None:
        name = f"{path}.weight_format"
        if name in self._stored.tensors() and bool(self._stored.get(name).any()):
            raise CheckpointError(
                f"{name} says that bytes of {path} are in the order of one kernel, not by rows; save the model with"
                " bitsandbytes 0.45 or later"
            )

    def _check_table(self, path: str, state: _State) -> None:
        name = f"{path}.weight.quant_map"
        if name in self._stored.tensors():
            table = torch.tensor(TABLES[state.quant_type.upper()])
            if not torch.equal(self._stored.get(name).float(), table):
                raise CheckpointError(f"{name} is not the table of {state.quant_type}; download the file again")
