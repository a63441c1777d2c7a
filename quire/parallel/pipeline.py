"""Pipeline: which layers of a model this process holds, and its links to the stages beside it, in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.parallel.collectives import Collectives, NullCollectives
from quire.types.errors import ConfigError


class Link:
    """What stages hand on to each other, the last one to the first too. The null version moves nothing."""

    def send(self, x: Tensor) -> None:
        """Give `x` to the next stage. Waits for room, not for the reader; `x` may be overwritten afterwards."""
        return None

    def receive(self, out: Tensor) -> bool:
        """Fill `out`, which is contiguous, with what the stage before sent; it sends tensors of the same size.

        Once a rank has failed it does not wait, and fills less than `out` or nothing. False if that may be so.
        """
        return True


@dataclass(frozen=True)
class Pipeline:
    """A stage of several that run one after the other; the default is the only one, which has all layers."""

    stage: int = 0
    size: int = 1
    layers: tuple[int, int] | None = None  # [first, last) that this stage holds; None: all
    link: Link = field(default_factory=Link)
    world: Collectives = field(default_factory=NullCollectives)  # of all ranks of all stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def holds(self, layer: int) -> bool:
        return self.layers is None or self.layers[0] <= layer < self.layers[1]


def split_layers(layers: Sequence[int], first: int, last: int, stages: int) -> list[tuple[int, int]]:
    """[start, end) of the layers of each stage, so that the largest stage takes as little memory as possible.

    `layers` are bytes of each layer, `first` and `last` those that the first and the last stage have besides. Of
    splits that are equally good it is the most even one.
    """
    count = len(layers)
    if stages > count:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but the model has {count} layers; it takes 1 to {count} stages"
        )
    # best[n]: where the stages so far hold the first n layers: bytes of the largest, the sum of squares, their ends.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(stages):
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        found: dict[int, tuple[int, int, list[int]]] = {}
        for start, (most, squares, ends) in best.items():
            size = extra
            for end in range(start + 1, count - (stages - 1 - stage) + 1):
                size += layers[end - 1]
                cost = max(most, size), squares + size * size
                if end not in found or cost <= found[end][:2]:
                    found[end] = (*cost, [*ends, end])
        best = found
    ends = best[count][2]
    return list(zip([0, *ends[:-1]], ends, strict=True))
