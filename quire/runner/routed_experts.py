"""Which experts each token of a request went to, for requests that ask; steps with such a row run eagerly."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.experts import NO_TAPE, Recording, Router
from quire.models.base import Model
from quire.platform.transfer import Download
from quire.types.sampling import SamplingParams
from quire.types.step import RoutedExperts, RowStart, StepPlan


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

    def add_request(self, row: int, start: RowStart) -> None:
        if isinstance(start.params, SamplingParams) and start.params.return_routed_experts:
            self._wanted.add(row)

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
