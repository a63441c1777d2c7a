"""Moves experts between ranks by load (EPLB), between two steps and a layer at a time.

Ranks all-reduce the counts and each computes the same placement from them, so that none has to be sent. Weights are
copied in place, and so is the table of places: what is captured of steps goes on, and no bit of a result changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.quant.base import GroupedMethod
from quire.models.experts import Experts
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError, EngineDeadError
from quire.utils.expert_placement import place_experts, rank_loads, sources_of
from quire.utils.log import get_logger

logger = get_logger(__name__)

CHUNK = 1 << 18  # float32 values that are moved at a time
_LOST = "a rank failed while experts were moved, so that their weights must be loaded again"
WORTH = 1.05  # times what the busiest rank will have to do: less is left as it is


class NoBalancer:
    def before_step(self, step_id: int) -> None:
        return None


class ExpertBalancer(NoBalancer):
    def __init__(self, model: torch.nn.Module, group: ParallelGroup, interval: int) -> None:
        """Waits for the other ranks, who make theirs. Each layer has its turn once in `interval` steps."""
        self._layers = [module for module in model.modules() if isinstance(module, Experts)]
        self._group, self._interval = group, max(interval, len(self._layers))
        self._num_moved = 0  # layers, in this round
        self._told = [[0] * len(layer.load) for layer in self._layers]
        for layer in self._layers:
            if len(layer.slots) % group.size:
                raise ConfigError(
                    f"enable_eplb moves experts between {group.size} ranks with equal shares, but there are"
                    f" {len(layer.slots)}; set --num-redundant-experts {-len(layer.slots) % group.size}"
                )
            for method in _methods(layer):
                _check_alike(method, group)

    @torch.inference_mode()
    def before_step(self, step_id: int) -> None:
        """Waits for the other ranks when a layer has its turn; EngineDeadError if one fails while weights move."""
        turn = step_id % self._interval
        if turn < len(self._layers) and step_id >= self._interval:
            self._balance(turn)
            if turn == len(self._layers) - 1 and self._num_moved:
                logger.info("experts of %d layers were moved by their load", self._num_moved)
                self._num_moved = 0

    def _balance(self, turn: int) -> None:
        layer, group = self._layers[turn], self._group
        counts = group.collectives.minimum(layer.load.tolist())  # a step that failed may have counted on some ranks
        if group.collectives.is_broken:
            return
        loads = [max(0, now - before) for now, before in zip(counts, self._told[turn], strict=True)]
        self._told[turn] = counts
        after = place_experts(loads, len(layer.slots), group.size, layer.slots)
        now, then = (max(rank_loads(loads, slots, group.size)) for slots in (layer.slots, after))
        if now <= WORTH * then:
            return
        try:
            self._move(layer, after)
        except Exception as error:
            raise EngineDeadError(f"{_LOST}: {error}") from error
        if group.collectives.is_broken:
            raise EngineDeadError(_LOST)
        self._num_moved += 1

    def _move(self, layer: Experts, after: list[int]) -> None:
        group, share = self._group, len(after) // self._group.size
        moves = sources_of(layer.slots, after, group.size)
        routes = [[source // share, 1 << slot // share] for slot, source in moves.items()]
        for method in _methods(layer):
            for parts in zip(*(method.tensors_of(held) for held in range(share)), strict=True):
                self._copy([_bytes(part) for part in parts], moves, torch.tensor(routes, device=parts[0].device))
        layer.slots = after
        layer.places.copy_(layer.places_of(after))

    def _copy(self, held: list[Tensor], moves: dict[int, int], routes: Tensor) -> None:
        """One tensor of each expert. All that is read of a chunk is on its way before the chunk is written."""
        rank, share, most = self._group.rank, len(held), 4 * max(256, CHUNK // len(moves))
        for begin in range(0, len(held[0]), most):
            end = min(begin + most, len(held[0]))
            rows = torch.zeros(len(moves), -(-(end - begin) // 4), dtype=torch.float32, device=routes.device)
            for row, source in zip(rows, moves.values(), strict=True):
                if source // share == rank:
                    _bytes(row)[: end - begin] = held[source % share][begin:end]
            given = self._group.collectives.exchange(rows, routes)
            for row, slot in zip(given, moves, strict=True):
                if slot // share == rank:
                    held[slot % share][begin:end] = _bytes(row)[: end - begin]


def _methods(layer: Experts) -> Sequence[GroupedMethod]:
    return layer.gate_up_proj.method, layer.down_proj.method


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_alike(method: GroupedMethod, group: ParallelGroup) -> None:
    """Whether each expert's weights can take the place of any other's, on all ranks."""
    sizes = {tuple(tensor.nbytes for tensor in method.tensors_of(held)) for held in range(method.spec.count)}
    mark = zlib.crc32(f"{method.kept} {sorted(sizes)}".encode())
    least, most = group.collectives.minimum([mark, -mark])
    if len(sizes) > 1 or " and " in method.kept or least != -most:
        raise ConfigError(
            f"the experts of {method.spec.path} are stored in different formats ({method.kept}), so that they cannot"
            " be moved; leave --enable-eplb out"
        )
