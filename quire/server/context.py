"""What every route needs: the engine behind an EngineProvider, the text side of the model, and the settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.config.groups import ServerConfig
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.frontend.tokenizer import Tokenizer
from quire.server.admission import Admission
from quire.server.conversation.formats import Formats
from quire.server.errors import UnknownModelError
from quire.server.tool_servers import ToolServers
from quire.types.errors import EngineUnavailableError, RequestError
from quire.utils.log import get_logger

logger = get_logger(__name__)

# Clients choose the names, so only so many are remembered.
_MAX_REMEMBERED_FIELDS = 1000


class HealthReport(Protocol):
    """How the engine is: one word, and a sentence for people."""

    @property
    def status(self) -> str: ...

    @property
    def detail(self) -> str: ...


class EngineProvider(Protocol):
    """Where the routes get the engine from; it may be another engine after a restart."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine that takes requests now; EngineUnavailableError while there is none."""
        ...

    def health(self) -> HealthReport: ...


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
    created: int = field(default_factory=lambda: int(time.time()))
    _seen_fields: set[str] = field(default_factory=set)

    def check_model(self, name: str | None) -> str:
        """The name to answer with; without one the request is for whatever is served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise UnknownModelError(name, self.model_names)
        return name

    def max_model_len(self) -> int | None:
        """None while no engine is there to say it."""
        try:
            return self.provider.engine.info.max_model_len
        except EngineUnavailableError:
            return None

    def tokenizer(self) -> Tokenizer:
        if self.text.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", "prompt")
        return self.text.tokenizer

    def note_ignored_field(self, route: str, name: str) -> None:
        """One line in the log for each field name that nobody knows."""
        key = f"{route} {name[:100]}"
        if key not in self._seen_fields and len(self._seen_fields) < _MAX_REMEMBERED_FIELDS:
            self._seen_fields.add(key)
            logger.warning("ignoring the unknown field %r of %s; said once", name[:100], route)
