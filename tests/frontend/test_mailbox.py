from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.mailbox import AsyncMailbox, Mailbox
from quire.types.errors import GenerationError
from quire.types.outputs import CompletionOutput, RequestOutput


def delta(step: int, finished: bool = False) -> RequestOutput:
    """Steps alternate between two completions."""
    completion = CompletionOutput(step % 2, f"{step},", [step], finish_reason="stop" if finished else None)
    return RequestOutput("r", "p", [1], [completion], finished)


@given(st.lists(st.integers(0, 50), max_size=10))
def test_any_pace_of_reading_gives_the_same(pauses: list[int]) -> None:
    mailbox, step = Mailbox("delta"), 0
    texts: dict[int, str] = {0: "", 1: ""}
    tokens: list[int] = []
    for pause in [*pauses, 1]:
        for _ in range(pause):
            mailbox.put(delta(step))
            step += 1
        output = mailbox.take()
        for completion in output.outputs if output else ():
            texts[completion.index] += completion.text
            tokens += completion.token_ids
        assert mailbox.take() is None
    assert texts == {i: "".join(f"{s}," for s in range(i, step, 2)) for i in (0, 1)}
    assert sorted(tokens) == list(range(step))


def test_waiting_deltas_are_few() -> None:
    mailbox = Mailbox("delta")
    for step in range(1000):
        mailbox.put(delta(step))
        assert len(mailbox._pending) <= 33
    mailbox.put(delta(1000, finished=True))
    output = mailbox.take()
    assert output is not None
    assert output.finished
    assert [len(c.token_ids) for c in output.outputs] == [501, 500]


def test_an_error_is_raised_after_what_came_before_it() -> None:
    mailbox = Mailbox("delta")
    mailbox.put(delta(0))
    mailbox.fail(GenerationError("r", "boom"))
    assert mailbox.take() is not None
    with pytest.raises(GenerationError, match="boom"):
        mailbox.take()


async def test_a_reader_waits_without_missing_anything() -> None:
    mailbox, chance = AsyncMailbox("delta"), random.Random(1)

    async def write() -> None:
        for step in range(200):
            mailbox.put(delta(step, finished=step == 199))
            for _ in range(chance.randint(0, 2)):
                await asyncio.sleep(0)

    writer = asyncio.create_task(write())
    tokens: list[int] = []
    while True:
        output = await mailbox.get()
        tokens += [token for completion in output.outputs for token in completion.token_ids]
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        if output.finished:
            break
    await writer
    assert sorted(tokens) == list(range(200))
