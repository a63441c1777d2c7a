"""How long messages take between an engine and its client, over the transport that both use."""

from __future__ import annotations

import statistics
import threading
import time

import msgspec
import zmq

from quire.engine.transport import Receiver, Sender, make_meeting
from quire.types.messages import ToEngine
from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest

_MESSAGES = 200


class Outbox:
    """Sends outputs as an engine process does, to a client that reads them on request."""

    def __init__(self) -> None:
        self._meeting, decoder = make_meeting(), msgspec.msgpack.Decoder(EngineOutputs)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._client = Receiver(self._context, self._meeting.client, self._meeting.token, decoder)
        self._sender = Sender(self._context, self._client.endpoint, self._meeting.token)
        self.send = self._sender.send

    def empty(self) -> None:
        while self._client.receive() is not None:
            pass

    def close(self) -> None:
        self._sender.close()
        self._client.close()
        self._context.term()
        self._meeting.remove()


def message_times(request: EngineRequest) -> tuple[float, float]:
    """Seconds that a message takes to the other side, and between two requests that a client sends at once.

    The other side is a thread that sends every message back.
    """
    meeting, decoder = make_meeting(), msgspec.msgpack.Decoder(ToEngine)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = (Receiver(context, address, meeting.token, decoder) for address in (meeting.client, meeting.engine))
    to_there, to_here = (Sender(context, one.endpoint, meeting.token) for one in (there, here))

    def take(receiver: Receiver[ToEngine]) -> ToEngine:
        while (message := receiver.receive()) is None:
            receiver.socket.poll()
        return message

    def echo() -> None:
        for _ in range(2 * _MESSAGES):
            to_here.send(take(there))

    thread = threading.Thread(target=echo)
    thread.start()
    round_trips = []
    for _ in range(_MESSAGES):
        begin = time.perf_counter()
        to_there.send(request)
        take(here)
        round_trips.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(_MESSAGES):
        to_there.send(request)
    for _ in range(_MESSAGES):
        take(here)
    both_ways = (time.perf_counter() - begin) / _MESSAGES
    thread.join()
    for end in (to_there, to_here, here, there):
        end.close()
    context.term()
    meeting.remove()
    return statistics.median(round_trips) / 2, both_ways / 2
