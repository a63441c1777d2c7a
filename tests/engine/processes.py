"""Helpers for tests with real processes: they wait for an event with a limit, never for a time."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.replicas import ReplicaClient
from quire.engine.zmq_client import ZmqClient
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.engine.fake_engine import COMMAND

LIMIT = 30.0  # seconds


class Watch:
    """Sees the end of any process, child or not, through a descriptor that cannot mean another one."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def has_ended(self, limit: float = 0.0) -> bool:
        return bool(select.select([self._fd], [], [], limit)[0])

    def wait(self) -> None:
        ended = self.has_ended(LIMIT)
        os.close(self._fd)
        assert ended, "the process lives on"


def pids(client: ReplicaClient) -> list[int]:
    """Of the replicas that live."""
    return [part.pid for part in client.parts]


def launch(words: str = "fake", **options: Any) -> ZmqClient:
    """A client of a fake engine process; see tests/engine/fake_engine.py for the words."""
    return ZmqClient(EngineConfig.from_flat(model=words), command=COMMAND, **options)


def request(name: str, token_ids: list[int] | None = None, max_tokens: int = 8, **params: Any) -> EngineRequest:
    token_ids = token_ids or [ord(char) % 40 for char in name * 5]
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
    )


def joined(outputs: list[EngineOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def finish(client: EngineClient, requests: Iterable[EngineRequest] = ()) -> list[EngineOutput]:
    """Submit these; all outputs until nothing is unfinished, through the sync face."""
    for one in requests:
        client.add_request(one)
    outputs: list[EngineOutput] = []
    while client.has_unfinished():
        outputs += client.get_outputs().outputs
    return outputs
