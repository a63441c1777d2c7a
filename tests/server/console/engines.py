"""A real engine over a tiny model for the console: slow, short of blocks, with grammars held back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.engine.build import build_engine
from quire.engine.client import InProcClient
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import load_text_model
from quire.server.app import build_app
from quire.server.console.feed import ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.server.console.router import console_router
from quire.types.request import EngineRequest
from quire.types.step import StartedStep, StepPlan
from quire.worker.executor import Executor
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.server.helpers import MODEL, FakeProvider


class SlowExecutor(Executor):
    def __init__(self, inner: Executor, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self.description = inner.description

    def execute(self, plan: StepPlan) -> StartedStep:
        time.sleep(self._seconds)
        return self._inner.execute(plan)

    def mask_room(self, count: int) -> Any:
        return self._inner.mask_room(count)

    def is_sticky(self, error: Exception) -> bool:
        return self._inner.is_sticky(error)

    def shutdown(self) -> None:
        self._inner.shutdown()


class WatchedEngine(FakeProvider):
    """The engine, its text side and its console; `may_compile` lets grammars be compiled."""

    def __init__(self, folder: Path, *, step_seconds: float = 0.01, api_keys: tuple[str, ...] = (), **shown: Any):
        path = make_model(folder / "tiny", "llama")
        write_tokenizer(path)
        config = EngineConfig.from_flat(
            model=str(path), max_model_len=160, max_num_seqs=4, block_size=16, kv_cache_memory=160 << 10
        )
        self.core, info, _ = build_engine(config)
        self.core.executor = SlowExecutor(self.core.executor, step_seconds)
        self.may_compile = threading.Event()
        self._hold_grammars(self.core)
        self.monitor = ConsoleMonitor(**shown)
        client = InProcClient(self.core, EngineLoop(self.core, debug_checks=True), info)
        super().__init__(client, load_text_model(config.model))  # type: ignore[arg-type]
        self._engine = AsyncEngine(client, self.text, observer=self.monitor)
        self.feed = ConsoleFeed(self, self.monitor, (MODEL,), interval=0.1, **shown)
        self.api_keys = api_keys

    def app(self) -> FastAPI:
        routers = [console_router(self.feed)]
        return build_app(
            self,
            self.text,
            ServerConfig(),
            model_names=(MODEL,),
            api_keys=self.api_keys,
            observer=self.monitor,
            extra_routers=routers,
        )

    def _hold_grammars(self, core: EngineCore) -> None:
        begin = core.constraints.begin

        def held(request: EngineRequest) -> Future[Any]:
            waiting: Future[Any] = Future()

            def go_on() -> None:
                self.may_compile.wait(60)
                begin(request).add_done_callback(lambda done: waiting.set_result(done.result()))

            threading.Thread(target=go_on, daemon=True).start()
            return waiting

        core.constraints.begin = held  # type: ignore[method-assign]
