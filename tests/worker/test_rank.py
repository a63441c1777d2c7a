"""A rank by itself: what it says of its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.platform.base import Platform
from quire.worker.description import WorkerDescription
from quire.worker.rank import Rank, RankChannel
from quire.worker.rank_messages import Died, FromRank, Prepare, ToRank


def test_what_ends_a_rank_outside_of_a_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[FromRank] = []

    class Channel(RankChannel):
        def connect(self, platform: Platform) -> tuple[ParallelGroup, Pipeline]:
            raise AssertionError("it has started")

        def has_order(self) -> bool:
            return True

        def take_order(self, obey: Callable[[ToRank, NDArray[np.uint8]], None]) -> None:
            obey(Prepare(), np.empty(0, np.uint8))

        def send(self, message: FromRank) -> None:
            said.append(message)

    class Executor:
        description = cast(WorkerDescription, None)

        def capture_next(self) -> bool:
            raise OSError("no space left on device")

    monkeypatch.setattr(Rank, "_start", lambda self: Executor())
    assert Rank(EngineConfig.from_flat(model="m"), 1, 2, Channel()).run() == 1
    assert said[1:] == [Died("OSError: no space left on device", is_permanent=False)]
