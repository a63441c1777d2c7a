"""AdapterReader: how many adapters stay in host memory, whoever asks for them; no files."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest

from quire.engine import adapters
from quire.engine.adapters import AdapterReader
from quire.engine.replicas import one_reply
from quire.types.control import AdapterState
from quire.types.errors import AdapterError, RequestError
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from quire.worker.executor import Executor


class Reads:
    """The part of an executor that adapters need: it reads when it is told to."""

    def __init__(self) -> None:
        self.host: dict[str, Future[int]] = {}

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        self.host[ref.digest] = Future()
        return self.host[ref.digest]

    def forget_adapter(self, digest: str) -> None:
        del self.host[digest]


def ref(name: int) -> AdapterRef:
    return AdapterRef(f"name {name}", f"digest {name}", "")


@pytest.mark.parametrize("polls", [True, False], ids=["polled", "cancelled"])
def test_what_nobody_asks_for_any_more_leaves(monkeypatch: pytest.MonkeyPatch, polls: bool) -> None:
    now = 0.0
    monkeypatch.setattr(adapters.time, "monotonic", lambda: now)
    executor = Reads()
    reader = AdapterReader(cast(Executor, executor), max_kept=2)
    for name in range(8):
        now += 100.0
        assert reader.state(ref(name)) == AdapterState(is_read=False)
        executor.host[ref(name).digest].set_result(7)
        if polls:
            assert reader.state(ref(name)).is_read
    assert len(executor.host) == 2
    reader.forget_adapter(ref(6))
    assert list(executor.host) == [ref(7).digest]


def test_one_that_is_still_read_leaves_later() -> None:
    executor = Reads()
    reader = AdapterReader(cast(Executor, executor), max_kept=1)
    for name in range(3):
        reader.read(ref(name))
    reader.forget_adapter(ref(0))  # nobody may touch it while it is read
    assert len(executor.host) == 3
    executor.host[ref(0).digest].set_result(7)
    executor.host[ref(1).digest].set_exception(AdapterError("no"))
    reader.read(ref(2))
    assert list(executor.host) == [ref(2).digest]


def request(name: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(name), token_ids=[1], params=SamplingParams(), max_tokens=1, adapter=ref(name)
    )


def test_adapters_of_waiting_requests_take_no_more_than_is_kept() -> None:
    executor = Reads()
    reader = AdapterReader(cast(Executor, executor), max_kept=2)
    found = [reader.begin(request(name)) for name in range(5)]
    assert list(executor.host) == [ref(0).digest, ref(1).digest]
    for name in (0, 1):
        executor.host[ref(name).digest].set_result(7)
    reader.forget("2")  # it never had a turn
    assert list(executor.host) == [ref(0).digest, ref(1).digest]
    reader.forget("1")
    assert list(executor.host) == [ref(0).digest, ref(3).digest]
    executor.host[ref(3).digest].set_exception(AdapterError("no"))
    with pytest.raises(RequestError, match="no"):
        found[3].result(0)
    reader.forget("3")  # which makes room again
    assert list(executor.host) == [ref(0).digest, ref(4).digest]
    reader.state(ref(5))  # an operator's does not wait for requests to end
    assert ref(5).digest in executor.host
    assert not found[4].done()


def test_replicas_have_read_an_adapter_when_all_have() -> None:
    done, not_yet = AdapterState(is_read=True), AdapterState(is_read=False)
    away, wrong = AdapterState(is_read=False, is_away=True), AdapterState(is_read=False, error="no")
    assert one_reply("read_adapter", [done, done]) == done
    assert one_reply("read_adapter", [done, not_yet]) == not_yet
    assert one_reply("read_adapter", [not_yet, away, done]) == away
    assert one_reply("read_adapter", [done, not_yet, away, wrong]) == wrong
