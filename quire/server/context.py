"""What every route needs: the engine behind an EngineProvider, the text side of the model, and the settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeVar

from quire.config.groups import ServerConfig
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.frontend.tokenizer import LONG_TEXT, Tokenizer, TooManyTokensError
from quire.loader.describe import UNKNOWN, ModelDescription
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.server.adapters import ServedAdapters
from quire.server.admission import Admission
from quire.server.control.keep_alive import KeepAlive
from quire.server.conversation.formats import Formats
from quire.server.errors import UnknownModelError
from quire.server.tool_servers import ToolServers
from quire.types.errors import EngineUnavailableError, QueueFullError, RequestError, WrongTaskError
from quire.types.pooling import able_tasks
from quire.types.sampling import PoolingTask
from quire.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
Task = Literal["generate", "score"] | PoolingTask

LATEST = ":latest"
"""A tag that may follow a model's name, as Ollama's clients write it."""
MAX_TOKENIZED = 1 << 20
"""The most tokens of a text for /tokenize and for counting."""

# Clients choose the names, so the number of names that are remembered is bounded.
_MAX_REMEMBERED_FIELDS = 1000


class HealthReport(Protocol):
    """How the engine is: one word, and a sentence for people."""

    @property
    def status(self) -> str: ...

    @property
    def detail(self) -> str: ...


class EngineProvider(Protocol):
    """Where the routes get the engine from; requests outlive a restart of its process."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine that takes requests now; EngineUnavailableError while there is none."""
        ...

    def health(self) -> HealthReport: ...


class TemplateThreads:
    """Threads for rendering chat templates of requests, apart from the default pool, with a bounded queue."""

    def __init__(self, num_threads: int = 2, max_waiting: int = 32) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-template")
        self._most = num_threads + max_waiting
        self._num_open = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_open >= self._most:
            raise QueueFullError(f"{self._num_open} chat templates of requests wait to be rendered; try again later")
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_open -= 1


@dataclass(frozen=True)
class ServerContext:
    """One server's state. There are no globals: two servers in one process do not know each other."""

    provider: EngineProvider
    text: TextModel
    settings: ServerConfig
    model_names: Sequence[str]
    admission: Admission
    formats: Formats
    tool_servers: ToolServers
    description: ModelDescription = UNKNOWN
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    keep_alive: KeepAlive | None = None
    """None: the engine stays awake whatever requests say."""
    template_threads: TemplateThreads = field(default_factory=TemplateThreads)
    created: int = field(default_factory=lambda: int(time.time()))
    observer: Observer = NULL_OBSERVER
    on_ready: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Run once, when the first engine takes requests."""
    _seen_fields: set[str] = field(default_factory=set)

    @property
    def served_names(self) -> Sequence[str]:
        """What a request may name as its model: the model, by each of its names, and its adapters."""
        return (*self.model_names, *self.adapters.names)

    def check_model(self, name: str | None, task: Task | None = None) -> str:
        """The served name that is meant: the given one, which `:latest` may follow, or the first if none is given.

        WrongTaskError if the model is not for what it is wanted for; while there is no engine, that is not known.
        """
        if name is not None and name not in self.served_names:
            given, name = name, name.removesuffix(LATEST)
            if name not in self.served_names:
                raise UnknownModelError(given, self.served_names)
        able = self.tasks() if task is not None else ()
        if task is not None and able and task not in able:
            raise WrongTaskError(task, tuple(one for one in able if one != "score"))
        return self.model_names[0] if name is None else name

    def tasks(self) -> tuple[Task, ...]:
        """What the model is for; empty while there is no engine."""
        try:
            pooler = self.provider.engine.info.pooler
        except EngineUnavailableError:
            return ()
        able = able_tasks(pooler)
        return (*able, "score") if pooler is not None and pooler.score is not None else able

    def max_model_len(self) -> int | None:
        """None while there is no engine."""
        try:
            return self.provider.engine.info.max_model_len
        except EngineUnavailableError:
            return None

    def tokenizer(self) -> Tokenizer:
        if self.text.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", "prompt")
        return self.text.tokenizer

    async def encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        """The token ids of any text, long ones on a thread. More than a model could take are refused."""
        tokenizer = self.tokenizer()
        most = max(self.max_model_len() or 0, MAX_TOKENIZED)
        encode = partial(tokenizer.encode, text, add_special_tokens, max_tokens=most)
        try:
            return await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()
        except TooManyTokensError as error:
            raise RequestError(f"the text has more than {most} tokens; send it in parts", field) from error

    def note_ignored_field(self, route: str, name: str) -> None:
        """Log each unknown field name once."""
        key = f"{route} {name[:100]}"
        if key not in self._seen_fields and len(self._seen_fields) < _MAX_REMEMBERED_FIELDS:
            self._seen_fields.add(key)
            logger.warning("ignoring the unknown field %r of %s; said once", name[:100], route)
