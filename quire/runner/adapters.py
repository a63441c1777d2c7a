"""RowAdapters: which LoRA adapter each row has, and the adapters in host memory that slots are filled from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from quire.config.groups import LoRAConfig
from quire.layers.adapters import Adaptable, AdapterSizes, AdapterTokens, LinearAdapters
from quire.loader.peft import AdapterLayers, read_adapter
from quire.models.base import Model
from quire.types.errors import EngineError
from quire.types.ledger import LedgerLine
from quire.types.request import AdapterRef
from quire.types.step import AdapterLoad, RowStart
from quire.utils.turns import no_rest


class NoAdapters:
    """No request has one."""

    def __init__(self) -> None:
        self.host: dict[str, AdapterLayers] = {}  # adapters in host memory, by digest

    def are_in(self, rows: list[int]) -> bool:
        return False

    def load(self, load: AdapterLoad) -> None:
        raise EngineError(f"adapter {load.digest} has no slot; start the engine with --enable-lora")

    def read(self, ref: AdapterRef, rest: Callable[[], None] = no_rest) -> int:
        raise EngineError("adapters are not enabled; start the engine with --enable-lora")

    def add_request(self, start: RowStart) -> None:
        return None

    def remove_request(self, row: int) -> None:
        return None


class RowAdapters(NoAdapters):
    """`read` may be called on any thread; everything else belongs to the steps."""

    def __init__(self, model: Model, tokens: AdapterTokens, dtype: torch.dtype) -> None:
        super().__init__()
        self._model, self._tokens, self._dtype = model, tokens, dtype
        self._rows: set[int] = set()  # that have one
        self._layers = adapted_layers(model)
        for adapters in self._layers.values():
            adapters.tokens = tokens

    def are_in(self, rows: list[int]) -> bool:
        return bool(self._rows) and not self._rows.isdisjoint(rows)

    def read(self, ref: AdapterRef, rest: Callable[[], None] = no_rest) -> int:
        """Bring an adapter into host memory, checked whole, and say how many bytes it takes there."""
        if ref.digest not in self.host:
            found = read_adapter(Path(ref.path), self._model, self._tokens.sizes.max_rank, self._dtype, rest)
            if found.digest != ref.digest:
                raise EngineError(f"the files of adapter {ref.name!r} in {ref.path} have changed; load it again")
            self.host[ref.digest] = found
        return self.host[ref.digest].num_bytes

    def load(self, load: AdapterLoad) -> None:
        if load.digest not in self.host:
            raise EngineError(f"adapter {load.digest} is to go into slot {load.slot}, but was not read")
        layers = self.host[load.digest].layers
        for name, adapters in self._layers.items():
            adapters.load(load.slot, layers.get(name))

    def add_request(self, start: RowStart) -> None:
        if start.adapter_slot >= 0:
            self._rows.add(start.row)
            self._tokens.row_slots[start.row] = start.adapter_slot

    def remove_request(self, row: int) -> None:
        if row in self._rows:
            self._rows.remove(row)
            self._tokens.row_slots[row] = -1


def adapted_layers(model: Model) -> dict[str, LinearAdapters]:
    """The slots of each layer that has some, by its name."""
    found = ((name, layer.adapters) for name, layer in model.named_modules() if isinstance(layer, Adaptable))
    return {name: adapters for name, adapters in found if adapters is not None}


def make_room(model: Model, sizes: AdapterSizes | None) -> None:
    """Give every layer its slots, before its weights are allocated."""
    if sizes is not None:
        for layer in list(model.modules()):
            if isinstance(layer, Adaptable) and layer.takes(sizes):
                layer.adapt(sizes)


def slot_buffers(model: Model) -> list[torch.Tensor]:
    return [buffer for adapters in adapted_layers(model).values() for buffer in adapters.buffers()]


def host_line(model: Model, lora: LoRAConfig) -> LedgerLine:
    """What adapters take in host memory, each as large as the largest slot."""
    count = lora.buckets[-1][1]
    slots = [buffer for adapters in adapted_layers(model).values() for buffer in adapters.buckets[-1].buffers()]
    kept = lora.num_in_host_memory
    num_bytes = kept * sum(buffer.nbytes for buffer in slots) // count
    return LedgerLine("adapters in host memory", num_bytes, f"{kept} of them; --max-cpu-loras for more")


def slots_line(model: Model) -> Iterable[LedgerLine]:
    """What the slots take."""
    num_bytes = sum(buffer.nbytes for buffer in slot_buffers(model))
    return (LedgerLine("adapters", num_bytes, "slots of LoRA adapters"),) if num_bytes else ()
