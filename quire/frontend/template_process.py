"""Renders chat templates in processes of their own, which are killed when they are late or take too much memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from quire.config.env import child_environment, import_path
from quire.frontend.template_child import read_frame, write_frame
from quire.types.errors import EngineUnavailableError, RequestError, TokenizerError

_COMMAND = (sys.executable, "-P", "-m", "quire.frontend.template_child")
_MAX_PROCESSES = 2
_START_SECONDS = 10.0  # for the imports of a process that is new


class TemplateProcesses:
    """A few processes, started when they are first needed and kept for the next rendering. Safe to share."""

    def __init__(self, max_seconds: float = 5.0, max_processes: int = _MAX_PROCESSES) -> None:
        self._max_seconds = max_seconds
        self._places = threading.Semaphore(max_processes)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop_all, self._idle)

    def render(self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
        """The prompt. Blocks; raises what ChatTemplate.render raises, or that the template ran too long."""
        request = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "arguments": dict(arguments),
            "seconds": self._max_seconds,
        }
        data = json.dumps(request).encode()
        if not self._places.acquire(timeout=2 * self._max_seconds):
            raise EngineUnavailableError(
                "other requests' chat templates are still being rendered; try again later", self._max_seconds
            )
        try:
            return _prompt_of(self._ask(data), self._max_seconds)
        finally:
            self._places.release()

    def close(self) -> None:
        """Stop the processes that wait for work."""
        self._finalizer()

    def _ask(self, data: bytes) -> dict[str, Any] | None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process()
        reply = process.ask(data, self._max_seconds)
        if reply is not None:
            with self._lock:
                self._idle.append(process)
        return reply


class _Process:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(**import_path())
        )
        self._is_ready = False

    def ask(self, data: bytes, seconds: float) -> dict[str, Any] | None:
        """The answer, or None if there was none in time; then the process is gone."""
        if not self._is_ready:
            self._is_ready = self._exchange(None, _START_SECONDS) is not None
        reply = self._exchange(data, seconds) if self._is_ready else None
        if reply is None:
            self.stop()
            return None
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _exchange(self, data: bytes | None, seconds: float) -> bytes | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        killer = threading.Timer(seconds, self._process.kill)
        killer.daemon = True
        killer.start()
        try:
            if data is not None:
                write_frame(self._process.stdin, data)
            return read_frame(self._process.stdout)
        except BrokenPipeError:
            return None
        finally:
            killer.cancel()

    def stop(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # what it had not read is of no use any more
        self._process.wait()


def _stop_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().stop()


def _prompt_of(reply: dict[str, Any] | None, seconds: float) -> str:
    if reply is None:
        raise RequestError(
            f"the chat template ran for more than {seconds:g} seconds, or took too much memory; give another with"
            " chat_template, or a shorter conversation",
            "chat_template",
        )
    if "prompt" in reply:
        return str(reply["prompt"])
    if "field" in reply:
        raise RequestError(reply["error"], reply["field"])
    raise TokenizerError(reply["error"])
