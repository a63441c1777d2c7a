"""Expert load and recorded routing: how often each expert is chosen, and the experts of requests that ask."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from quire.layers.experts import NO_TAPE, Recording, Router
from quire.models.base import Model
from quire.models.experts import Experts
from quire.platform.transfer import Download
from quire.types.sampling import SamplingParams
from quire.types.step import RoutedExperts, RowStart, StepPlan

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
        reading, self._reading = self._reading, None
        if self._steps % EVERY == 0:
            self._reading = Download(torch.cat([*self._layers.values()]))
        self._steps += 1
        return {} if reading is None else self._since(reading.get())

    def _since(self, counts: Tensor) -> dict[int, list[int]]:
        now = dict(zip(self._told, counts.split([len(told) for told in self._told.values()]), strict=True))
        before, self._told = self._told, now
        return {layer: (now[layer] - before[layer]).tolist() for layer in now}


class RoutedRows:
    """What a step's rows that ask for it were routed to. The device may still be computing it."""

    def __init__(self, ids: Tensor, places: list[tuple[int, int, int, int]]) -> None:
        self._ids = Download(ids)  # [num_tokens, layers, k] int16
        self._places = places  # (index of a row, its first token in the step, number of tokens, position)

    def get(self) -> dict[int, RoutedExperts]:
        ids = self._ids.get()
        return {
            index: RoutedExperts(position, ids[first : first + count].numpy().tobytes(), (count, *ids.shape[1:]))
            for index, first, count, position in self._places
        }


class RoutedExpertsRecorder:
    def __init__(self, model: Model) -> None:
        drafter = set() if model.drafter is None else set(model.drafter.modules())
        self._routers = [each for each in model.modules() if isinstance(each, Router) and each not in drafter]
        self._wanted: set[int] = set()  # rows

    @property
    def can_record(self) -> bool:
        """Whether the model has experts."""
        return bool(self._routers)

    def add_request(self, start: RowStart) -> None:
        if isinstance(start.params, SamplingParams) and start.params.return_routed_experts:
            self._wanted.add(start.row)

    def remove_request(self, row: int) -> None:
        self._wanted.discard(row)

    def wants(self, rows: list[int]) -> bool:
        """Whether one of these rows asks for it."""
        return bool(self._wanted) and not self._wanted.isdisjoint(rows)

    def begin(self) -> None:
        for router in self._routers:
            router.tape = Recording()

    def end(self, plan: StepPlan, num_computed: list[int]) -> RoutedRows:
        """What the step since `begin` chose; `num_computed` of each row is of before the step."""
        layers: list[Tensor] = []
        for router in self._routers:
            assert isinstance(router.tape, Recording)
            layers.append(torch.cat(router.tape.ids).to(torch.int16))
            router.tape = NO_TAPE
        places, first = [], 0
        for index, (row, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            if row in self._wanted:
                places.append((index, first, count, num_computed[row]))
            first += count
        return RoutedRows(torch.stack(layers, dim=1)[:first], places)
