"""RanksExecutor: what becomes of a change that ranks do not all make, and of steps that fail. No processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, EngineDeadError, EngineError
from quire.types.step import StepPlan
from quire.utils.phases import ignore_phase
from quire.worker.rank_messages import (
    Changed,
    CheckWeights,
    Execute,
    Failed,
    FromRank,
    Pause,
    Paused,
    Sleep,
    ToRank,
    UpdateWeights,
    decode_order,
)
from quire.worker.ranks import RanksExecutor

FAILED = Changed("", "no such folder")


class TwoRanks(RanksExecutor):
    """Ranks that a test speaks for."""

    def __init__(self) -> None:
        super().__init__(EngineConfig.from_flat(model="m", tensor_parallel_size=2), ignore_phase)
        self.told: list[ToRank] = []

    def _post(self, header: bytes, payload: NDArray[np.uint8]) -> None:
        self.told.append(decode_order(header))

    def _receive(self, limit: float) -> Iterator[tuple[int, FromRank]]:
        return iter([(0, Paused()), (1, Paused())] if self.told[-1:] == [Pause()] else [])

    def _look(self) -> None: ...

    def _end_ranks(self, reason: str) -> None: ...

    def _start_over(self) -> None: ...

    def _close(self) -> None: ...

    def say(self, *answers: FromRank) -> None:
        for rank, answer in enumerate(answers):
            self._take(rank, answer)


def test_no_rank_lets_its_weights_go_before_all_have_checked_the_others() -> None:
    ranks = TwoRanks()
    for answers, words in [
        ((Changed("a"), FAILED), "rank 1: no such folder"),
        ((Changed("a"), Changed("b")), "diff"),
    ]:
        update = ranks.update_weights("new")
        ranks.say(*answers)
        assert words in str(update.exception())
    assert ranks.told == [CheckWeights("new")] * 2
    update = ranks.update_weights("new")
    ranks.say(Changed("a"), Changed("a"))
    assert not update.done()
    assert ranks.told[-1] == UpdateWeights("new")
    ranks.say(Changed("a"), Changed("a"))
    assert update.result() == "a"
    assert ranks.failure is None


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((FAILED, FAILED), EngineError),
        ((Changed("a"), FAILED), EngineDeadError),
        ((Changed("a"), Changed("b")), EngineDeadError),
        ((FAILED, Changed("", "gone", is_fatal=True)), EngineDeadError),
    ],
    ids=["all undone", "one failed", "different weights", "one cannot go on"],
)
def test_an_update_that_fails_is_undone_by_all_or_ends_the_engine(
    answers: tuple[Changed, Changed], error: type[EngineError]
) -> None:
    ranks = TwoRanks()
    update = ranks.update_weights("new")
    ranks.say(Changed("a"), Changed("a"))
    ranks.say(*answers)
    assert type(update.exception()) is error
    assert (ranks.failure is None) == (error is EngineError)


def test_a_rank_that_does_not_sleep_ends_the_engine() -> None:
    ranks = TwoRanks()
    sleep = ranks.sleep(1)
    assert ranks.told == [Sleep(1)]
    ranks.say(FAILED, FAILED)
    assert isinstance(sleep.exception(), EngineDeadError)
    assert isinstance(ranks.wake().exception(), EngineDeadError)


def test_a_step_planned_behind_one_that_failed_is_void_until_the_engine_knows() -> None:
    """Ranks come to rest once it does; before, that would lose the answer that the engine is about to ask for."""
    ranks, plans = TwoRanks(), [StepPlan(number, [0], [1]) for number in range(3)]
    failed = ranks.execute(plans[0])
    ranks.say(Failed(0, "by hand", is_sticky=False, is_echo=False))
    void = ranks.execute(plans[1])
    assert ranks.told == [Execute(plans[0])]
    assert str(void.exception()) == "a step before it failed"
    assert str(failed.exception()) == "rank 0: by hand"
    ranks.execute(plans[2])
    assert ranks.told == [Execute(plans[0]), Pause(), Execute(plans[2])]


def test_no_callable_is_sent_to_ranks() -> None:
    with pytest.raises(ConfigError, match="never pickled code"):
        TwoRanks().call_workers(lambda worker: worker)
