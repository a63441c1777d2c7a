"""An OpenAI-compatible server with known timing and known faults, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web


@dataclass
class Behaviour:
    """How requests are answered. Faults are taken from the left, one per request, and then there are none."""

    first: float = 0.0  # seconds to the first token
    between: float = 0.0  # seconds between tokens
    usage: bool = True
    models: tuple[str, ...] = ("fake-model",)
    key: str | None = None
    starting: int = 0  # how many times it answers that it is not ready
    slots: int | None = None  # requests answered at the same time
    faults: deque[str] = field(default_factory=deque)


class FakeServer:
    """`with FakeServer(Behaviour(...)) as server:`; `server.url` is where, `server.bodies` what it was asked."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.in_flight = 0
        self.peak = 0
        self.busy = threading.Event()  # set once a request has come
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        slots = self.behaviour.slots
        self._slots = None if slots is None else asyncio.Semaphore(slots)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.behaviour.models]})

    async def _health(self, request: web.Request) -> web.Response:
        if not self.behaviour.starting:
            return web.Response(status=404)
        self.behaviour.starting -= 1
        return web.Response(text="loading", status=503)

    def _refused(self, request: web.Request) -> bool:
        key = self.behaviour.key
        return key is not None and request.headers.get("Authorization") != f"Bearer {key}"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.busy.set()
        self.peak = max(self.peak, self.in_flight)
        try:
            if self._slots is None:
                return await self._answer(request)
            async with self._slots:
                return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        behaviour = self.behaviour
        fault = behaviour.faults.popleft() if behaviour.faults else None
        if self._refused(request):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if fault is not None and fault.isdigit():
            return web.json_response({"error": {"message": "busy"}}, status=int(fault))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        if chat:
            await send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(behaviour.first)
        for index in range(body["max_tokens"]):
            if index:
                await asyncio.sleep(behaviour.between)
            if fault is not None and index == 1:
                return await self._break(request, response, fault)
            text = {"delta": {"content": " word"}} if chat else {"text": " word"}
            await send(response, {"choices": [text]})
        await send(response, {"choices": [{**({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]})
        if behaviour.usage:
            await send(response, {"choices": [], "usage": usage(body)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> web.StreamResponse:
        if fault == "error_event":
            await send(response, {"error": {"message": "the engine died"}})
        elif fault == "bad_chunk":
            await response.write(b"data: {oops\n\n")
        elif fault == "disconnected":
            assert request.transport is not None
            request.transport.abort()
        elif fault == "timeout":
            await self._stop.wait()
        return response  # "incomplete": ends without a word


async def send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def usage(body: dict[str, Any]) -> dict[str, Any]:
    """A word is a token here, whatever the client thinks."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    tokens = prompt if isinstance(prompt, list) else prompt.split()
    return {
        "prompt_tokens": len(tokens),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 1},
    }
