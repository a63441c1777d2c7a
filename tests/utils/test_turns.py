"""Turns: between the pieces of other work a step can always run."""

from __future__ import annotations

import pytest

from quire.utils import turns
from quire.utils.turns import Turns


def test_a_step_can_run_between_any_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = [0.0], list[float]()
    taken = Turns()

    def sleep(seconds: float) -> None:
        assert taken.step.acquire(blocking=False), "whoever rests has let go"
        ran.append(now[0])
        taken.step.release()

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turns.time, "sleep", sleep)
    with taken.other():
        for _ in range(9):
            assert not taken.step.acquire(blocking=False)
            now[0] += 0.0015
            taken.rest()
    assert ran == pytest.approx([0.003, 0.006, 0.009, 0.012]), "after each piece of two milliseconds or more"
    assert taken.step.acquire(blocking=False)


def test_work_that_fails_lets_go() -> None:
    taken = Turns()
    with pytest.raises(ValueError, match="bad"), taken.other():
        raise ValueError("bad")
    assert taken.step.acquire(blocking=False)
