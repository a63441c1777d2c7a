"""Turns: between the pieces of other work a step can always run, and work beside no steps does not rest."""

from __future__ import annotations

import pytest

from quire.utils import turns
from quire.utils.turns import Turns


@pytest.mark.parametrize("busy", ["steps", "waits", "idle"])
def test_a_step_can_run_between_any_two_pieces(monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    now, ran = [1000.0], list[float]()
    taken = Turns()

    def sleep(seconds: float) -> None:
        assert taken.step.lock.acquire(blocking=False), "whoever rests has let go"
        ran.append(now[0] - 1000.0)
        taken.step.lock.release()

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turns.time, "sleep", sleep)
    if busy == "steps":
        with taken.step:
            assert not taken.step.is_waiting
    with taken.other():
        taken.step.is_waiting = busy == "waits"
        for _ in range(9):
            assert not taken.step.lock.acquire(blocking=False)
            now[0] += 0.0015
            taken.rest()
    assert ran == ([] if busy == "idle" else pytest.approx([0.003, 0.006, 0.009, 0.012])), "after each whole piece"
    assert taken.step.lock.acquire(blocking=False)


def test_work_that_fails_lets_go() -> None:
    taken = Turns()
    with pytest.raises(ValueError, match="bad"), taken.other():
        raise ValueError("bad")
    assert taken.step.lock.acquire(blocking=False)
