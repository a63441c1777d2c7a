from __future__ import annotations

import signal
import threading

import pytest

from quire.frontend.interrupts import interrupt_afterwards


def interrupted(times: int) -> list[str]:
    """What happens to a block that is interrupted so many times in its middle."""
    events: list[str] = []
    try:
        with interrupt_afterwards():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            events.append("finished")
    except KeyboardInterrupt:
        events.append("raised")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return events


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    assert interrupted(0) == ["finished"]
    assert interrupted(1) == ["finished", "raised"]


def test_a_second_interrupt_does_not_wait() -> None:
    assert interrupted(2) == ["raised"]


def test_a_block_of_many_steps_ends_after_the_one_that_was_interrupted() -> None:
    events: list[int] = []

    def work() -> None:
        with interrupt_afterwards() as raise_interrupt:
            for step in range(3):
                with interrupt_afterwards():
                    if step == 1:
                        signal.raise_signal(signal.SIGINT)
                    events.append(step)
                raise_interrupt()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert events == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), interrupt_afterwards():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_left_alone() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        with interrupt_afterwards():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT]


def test_other_threads_are_left_alone() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with interrupt_afterwards():
                pass
        except ValueError as error:  # what signal.signal raises off the main thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert failures == []
