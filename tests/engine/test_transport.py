"""The transport: typed messages arrive whole and in order; strangers are neither heard nor told anything."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.engine.transport import Receiver, Sender, UndecodableError, make_meeting
from quire.types.messages import AbortRequests, Command, ToEngine
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass
class Link:
    context: Context
    receiver: Receiver[ToEngine]
    sender: Sender


@pytest.fixture(params=[True, False], ids=["ipc", "tcp"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    meeting = make_meeting(ipc=request.param)
    context: Context = zmq.Context()
    receiver = Receiver(context, meeting.engine, meeting.token, msgspec.msgpack.Decoder(ToEngine))
    sender = Sender(context, receiver.endpoint, meeting.token)
    yield Link(context, receiver, sender)
    sender.close()
    receiver.close()
    context.term()
    meeting.remove()


def next_message(receiver: Receiver[ToEngine]) -> ToEngine | None:
    assert receiver.socket.poll(5000)
    return receiver.receive()


def engine_request(**params: object) -> EngineRequest:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]  # each test names what it needs
    return EngineRequest(request_id="r", token_ids=[1, 2, 3], params=sampling, cache_salt="é")


def test_messages_arrive_equal_and_in_order(link: Link) -> None:
    receiver = link.receiver
    assert receiver.receive() is None
    messages = [
        engine_request(temperature=0.5, logit_bias={3: -1.5}, stop=("a", "b"), seed=2**64 - 1, logprobs=2),
        AbortRequests(["r", "unknown"]),
        Command(1, "reset_prefix_cache"),
    ]
    for message in messages:
        link.sender.send(message)
    assert [next_message(receiver) for _ in messages] == messages
    assert receiver.receive() is None


def test_sending_never_blocks_however_slow_the_reader(link: Link) -> None:
    receiver = link.receiver
    count = 5000  # far beyond what ZMQ queues by default
    for i in range(count):
        link.sender.send(AbortRequests([str(i), "x" * 200]))
    for i in range(count):
        assert next_message(receiver) == AbortRequests([str(i), "x" * 200])


def test_a_stranger_is_not_heard(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    receiver = link.receiver
    for frame in (b"", b"short", bytes(16) + msgspec.msgpack.encode(Command(1, "reset_prefix_cache"))):
        with link.context.socket(zmq.PUSH) as stranger:
            stranger.connect(receiver.endpoint)
            stranger.send(frame)
            assert next_message(receiver) is None
    assert caplog.text.count("stranger") == 3
    link.sender.send(Command(1, "reset_prefix_cache"))
    assert next_message(receiver) == Command(1, "reset_prefix_cache")


def test_a_message_of_the_wrong_shape_says_what_it_holds(link: Link) -> None:
    receiver = link.receiver
    wrong = engine_request()
    msgspec.structs.force_setattr(wrong.params, "top_k", 2.5)  # as no caller can make it; the wire checks again
    link.sender.send(wrong)
    link.sender.send(Command(1, "reset_prefix_cache"))
    with pytest.raises(UndecodableError, match="top_k") as caught:
        next_message(receiver)
    assert isinstance(caught.value.content, dict)
    assert caught.value.content["request_id"] == "r"
    assert next_message(receiver) == Command(1, "reset_prefix_cache")


def test_two_meetings_share_nothing_and_the_folder_is_private() -> None:
    one, two = make_meeting(ipc=True), make_meeting(ipc=True)
    assert one.token != two.token
    assert one.folder is not None
    assert one.folder != two.folder
    assert stat.S_IMODE(Path(one.folder).stat().st_mode) == 0o700
    for meeting in (one, two, one):
        meeting.remove()
    assert not Path(one.folder).exists()


def test_a_temporary_folder_too_long_for_a_socket_means_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    meeting = make_meeting()
    assert meeting.folder is None
    assert meeting.engine.startswith("tcp://127.0.0.1:")
    assert list(long.iterdir()) == []
