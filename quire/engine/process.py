"""The engine process: `python -m quire.engine.process`, launched by quire.engine.child, serves one client.

The main thread waits for messages, signals and the end of its parent; a second thread loads the model, runs the
steps and sends their outputs; a third gives heartbeats and waits for no step, so that a long step is no hang. The
launch order comes as one line of JSON on stdin, and stdin closes when the parent is gone. With --spare the process
imports everything first and then waits for its order.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.config.env import log_level
from quire.engine.child import BEAT_EVERY
from quire.engine.transport import Meeting, Receiver, Sender, UndecodableError
from quire.platform.allocator import return_free_memory
from quire.types.errors import EngineError, QuireError
from quire.types.messages import EngineFailure, EngineInfo, Hello, Ready, StartupPhase, ToEngine
from quire.types.outputs import EngineOutput
from quire.utils.collector import paused_collector
from quire.utils.log import get_logger, setup_logging
from quire.utils.phases import ReportPhase

if TYPE_CHECKING:
    from quire.engine.loop import EngineLoop

logger = get_logger("quire.engine.process")  # not __main__, which it is in a process of its own

EXIT_FAILED = 70
SPARE_FLAG = "--spare"
_STOP_GRACE = 1.0  # seconds for a step in flight to end; nobody waits for what it would say
_END_GRACE = 7.0  # seconds for the device to end: more than its ranks get, less than the client waits
_LINGER = 2.0  # seconds for the last messages to leave
_PHASE_INTERVAL = 0.2  # seconds between two words about the progress of one phase


class LaunchOrder(msgspec.Struct, frozen=True):
    """What a new engine process reads from stdin."""

    config: EngineConfig
    meeting: Meeting
    launched_at: float  # time.time(), the clock that two processes share
    beat_fd: int  # a pipe for heartbeats


BuildLoop = Callable[[EngineConfig, ReportPhase], "tuple[EngineLoop, EngineInfo]"]


def build_loop(config: EngineConfig, report: ReportPhase) -> tuple[EngineLoop, EngineInfo]:
    """The real engine; tests serve others."""
    report("import")
    with paused_collector():
        from quire.engine.build import build_engine
        from quire.engine.loop import EngineLoop

        core, info, debug_checks = build_engine(config, report)
    return EngineLoop(core, debug_checks=debug_checks), info


def import_engine() -> None:
    """All that an engine needs of code; the same modules are then there for `build_loop`."""
    with paused_collector():
        import quire.engine.build
        import quire.engine.loop  # noqa: F401
        from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS

        EXECUTORS.get(DEFAULT_EXECUTOR)
    return_free_memory()


def keep_beating(fd: int) -> None:
    """Show the parent that this process runs, until the parent is gone."""
    os.set_blocking(fd, False)
    while True:
        try:
            os.write(fd, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of heartbeats that nobody looks at
        except BrokenPipeError:
            return
        time.sleep(BEAT_EVERY)


class EngineProcess:
    def __init__(self, order: LaunchOrder, build: BuildLoop) -> None:
        self._order = order
        self._build = build
        self._loop: EngineLoop | None = None
        self._is_terminating = False
        self._has_ended = False
        self._has_failed = False
        self._is_ending = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        meeting = order.meeting
        decoder = msgspec.msgpack.Decoder(ToEngine)
        self._receiver = Receiver(self._context, meeting.engine, meeting.token, decoder)
        self._sender = Sender(self._context, meeting.client, meeting.token)  # used by the engine thread only
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._run_engine, name="quire-engine", daemon=True)
        self._phase = ""
        self._phase_sent_at = 0.0

    def run(self) -> int:
        """Serve until told to stop, or until the parent or the engine is gone; returns the exit status."""
        self._catch_signals()
        threading.Thread(
            target=keep_beating, args=(self._order.beat_fd,), name="quire-heartbeat", daemon=True
        ).start()
        self._thread.start()
        poller = zmq.Poller()
        poller.register(self._receiver.socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN | zmq.POLLERR)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if sys.stdin.fileno() in events:  # nothing is ever sent here: it was closed
                break
            if self._wake_out.fileno() in events and self._must_leave():
                break
            self._take_messages()
        return self._leave()

    def _catch_signals(self) -> None:
        """SIGTERM: finish what runs, then leave. SIGINT is the parent's business. SIGUSR1: say what threads do."""
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._wake_in.setblocking(False)
        signal.set_wakeup_fd(self._wake_in.fileno())
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # the wake-up is enough
        if self._order.config.parallel.shares_experts:  # others need its experts until the parent ends them all
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _must_leave(self) -> bool:
        """A signal arrived or the engine thread ended: whether to leave at once."""
        self._wake_out.recv(64)
        if self._has_ended or self._is_terminating or self._loop is None:
            return True
        self._is_terminating = True
        self._loop.stop(finish_work=True)
        return False

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._receiver.receive()
            except UndecodableError as error:
                self._refuse(error)
                continue
            if message is None:
                return
            assert self._loop is not None, "a message came before the engine was ready"
            self._loop.submit(message)

    def _refuse(self, error: UndecodableError) -> None:
        """A request that is not what it claims to be fails alone."""
        logger.error("a message cannot be understood: %s", error)
        content = error.content
        if self._loop is not None and isinstance(content, dict) and "request_id" in content:
            reason = f"the engine cannot understand it: {error}"
            self._loop.submit(EngineOutput(str(content["request_id"]), [], finish_reason="error", error=reason))

    def _leave(self) -> int:
        """Let a step in flight end and the last messages leave; a step that does not end is left behind."""
        if self._loop is not None:
            self._loop.stop()
        if self._loop is not None or self._has_ended:
            self._thread.join(_STOP_GRACE)
        if self._is_ending:
            self._thread.join(_END_GRACE)
        status = EXIT_FAILED if self._has_failed else 0
        if self._thread.is_alive():
            self._order.meeting.remove()
            os._exit(status)  # a thread that is loading or stuck cannot be stopped in any other way
        self._receiver.close()
        self._context.term()
        self._order.meeting.remove()
        return status

    def _run_engine(self) -> None:
        try:
            self._sender.send(Hello(self._receiver.endpoint))
            loop, info = self._build(self._order.config, self._report)
            loop.on_reply = self._sender.send
            self._loop = loop
            self._sender.send(Ready(info, self._age()))
            self._run_steps(loop)
        except Exception as error:  # whatever ended the engine, the client must hear of it
            self._fail(error)
        finally:
            self._sender.close(_LINGER)
            self._has_ended = True
            self._wake_in.send(b"\0")

    def _run_steps(self, loop: EngineLoop) -> None:
        """Every step is sent, also one without outputs (a chunk of a long prompt): it shows that the engine lives."""
        while loop.wait():
            outputs = loop.run_once()
            if outputs.stats is not None or outputs.cached is not None:  # else nothing but commands came
                self._sender.send(outputs)
        self._is_ending = True
        loop.shutdown()

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        is_permanent = isinstance(error, QuireError) and not isinstance(error, EngineError)
        cause = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        logger.error("the engine failed: %s", cause, exc_info=None if is_permanent else error)
        self._sender.send(EngineFailure(cause, is_permanent))

    def _report(self, name: str, progress: float | None = None) -> None:
        now = time.monotonic()
        if name == self._phase and progress != 1.0 and now - self._phase_sent_at < _PHASE_INTERVAL:
            return
        self._phase, self._phase_sent_at = name, now
        self._sender.send(StartupPhase(name, self._age(), progress))

    def _age(self) -> float:
        return time.time() - self._order.launched_at


def serve(build: BuildLoop, preload: Callable[[], None] = lambda: None) -> int:
    """Read the launch order and serve the engine that `build` makes. A spare process runs `preload` before that."""
    setup_logging(log_level())
    if SPARE_FLAG in sys.argv[1:]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, here as in an engine
        preload()
        logger.info("engine process %d stands by, should the engine die", os.getpid())
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone, and needs no engine
        return 0
    return EngineProcess(msgspec.json.decode(line, type=LaunchOrder), build).run()


if __name__ == "__main__":
    sys.exit(serve(build_loop, import_engine))
