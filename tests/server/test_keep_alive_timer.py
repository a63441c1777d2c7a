"""KeepAlive: an idle engine sleeps after its time, also one whose waking request was over before it was awake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from quire.server.admission import Admission
from quire.server.control.keep_alive import KeepAlive
from quire.server.control.operator import SleepWanted


class Engine:
    def __init__(self) -> None:
        self.is_asleep = False
        self.may_wake = asyncio.Event()
        self.slept = asyncio.Event()

    async def sleep(self, wanted: SleepWanted) -> Any:
        self.is_asleep = True
        self.slept.set()

    async def wake(self) -> Any:
        await self.may_wake.wait()
        self.is_asleep = False


async def fall_asleep() -> tuple[SimpleNamespace, Engine, KeepAlive]:
    admission, engine = SimpleNamespace(num_open=0, watchers=[]), Engine()
    keep_alive = KeepAlive(cast(Admission, admission), engine)
    keep_alive.want(0.001, from_now=True)
    await engine.slept.wait()
    return admission, engine, keep_alive


async def test_sleeps_again_when_the_waking_request_is_over_first() -> None:
    async with asyncio.timeout(20):
        admission, engine, keep_alive = await fall_asleep()
        engine.slept.clear()
        admission.num_open = 1
        admission.watchers[0]()
        await asyncio.sleep(0)
        admission.num_open = 0
        admission.watchers[0]()
        engine.may_wake.set()
        await engine.slept.wait()
    assert keep_alive.is_asleep


async def test_counts_as_awake_while_it_wakes() -> None:
    """The engine answers as soon as it is awake, which its answer to the call that woke it may follow."""
    async with asyncio.timeout(20):
        admission, engine, keep_alive = await fall_asleep()
        assert keep_alive.is_asleep
        admission.num_open = 1
        admission.watchers[0]()
        await asyncio.sleep(0)
        assert not keep_alive.is_asleep
        engine.may_wake.set()
        while engine.is_asleep:
            await asyncio.sleep(0)
    assert not keep_alive.is_asleep
