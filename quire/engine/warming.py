"""What a new replica does before requests are sent there: a first step, and the verbs that the others obeyed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from quire.engine.zmq_client import ZmqClient
from quire.types.control import EngineState, LiveLimits
from quire.types.errors import EngineStartError
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

_LASTING = ("set_vocabulary", "set_log_level", "pause", "sleep", "update_weights")
_LOOK_INTERVAL = 0.02  # seconds between two looks whether a change has ended
_FIRST = EngineRequest(
    request_id="warm-up", token_ids=[0], params=SamplingParams(temperature=0.0, max_tokens=1), max_tokens=1
)


class Told:
    """Verbs whose effect lasts, each once, in the order in which they were last said."""

    def __init__(self) -> None:
        self._verbs: dict[str, tuple[str, object]] = {}

    def __iter__(self) -> Iterator[tuple[str, object]]:
        return iter(list(self._verbs.values()))

    def note(self, verb: str, argument: object) -> None:
        if verb == "wake":
            self._verbs.pop("sleep", None)
        elif isinstance(argument, LiveLimits):
            for name, value in msgspec.structs.asdict(argument).items():
                if value is not None:
                    self._put(name, (verb, LiveLimits(**{name: value})))
        elif verb in _LASTING:
            self._put(verb, (verb, argument))

    def _put(self, key: str, said: tuple[str, object]) -> None:
        self._verbs.pop(key, None)
        self._verbs[key] = said


async def warm_up(replica: ZmqClient, told: Told, other: ZmqClient | None) -> None:
    """Let a replica that is ready become what `other` is; EngineStartError if its weights are different then."""
    pooler = replica.info.pooler
    if pooler is None or pooler.generates:
        replica.add_request(_FIRST)
        while not any(output.finish_reason for output in (await replica.get_outputs_async()).outputs):
            pass
    for verb, argument in told:
        await replica.call_async(verb, argument, limit=None)
        if verb in ("sleep", "update_weights"):
            await _settled(replica)
    if other is not None and any(verb == "update_weights" for verb, _ in told):
        mine, theirs = await _settled(replica), await _settled(other)
        if mine.weights != theirs.weights:
            raise EngineStartError(f"its weights are not those of the others: {mine.error or mine.weights}")


async def _settled(replica: ZmqClient) -> EngineState:
    """Its state, once nothing is being changed."""
    while True:
        state: EngineState = await replica.call_async("state", limit=None)
        if state.changing is None:
            return state
        await asyncio.sleep(_LOOK_INTERVAL)
