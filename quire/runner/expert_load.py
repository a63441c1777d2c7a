"""How often the experts of each layer were chosen: counted on the device, and read now and then."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from quire.models.experts import Experts
from quire.platform.transfer import Download

EVERY = 32  # steps between two readings


class ExpertLoads:
    """Of all layers that count; of none it says nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Counts begin here: what was tried before the first step is no load."""
        found = ((re.search(r"layers\.(\d+)\.", path), each) for path, each in model.named_modules())
        self._layers = {
            int(at[1]): each.load for at, each in found if at and isinstance(each, Experts) and each.counts
        }
        for load in self._layers.values():
            load.zero_()
        self._told = {layer: torch.zeros(len(load), dtype=torch.int64) for layer, load in self._layers.items()}
        self._steps = 0
        self._reading: Download | None = None

    @torch.inference_mode()
    def read(self) -> dict[int, list[int]]:
        """After a step: what came to each expert of a layer since the last reading; nothing after most steps.

        The counts are copied after one step and read after the next, so that nobody waits for the device.
        """
        if not self._layers:
            return {}
        self._steps += 1
        reading, self._reading = self._reading, None
        if self._steps % EVERY == 1:
            self._reading = Download(torch.cat([*self._layers.values()]))
        return {} if reading is None else self._since(reading.get())

    def _since(self, counts: Tensor) -> dict[int, list[int]]:
        now = dict(zip(self._told, counts.split([len(told) for told in self._told.values()]), strict=True))
        before, self._told = self._told, now
        return {layer: (now[layer] - before[layer]).tolist() for layer in now}
