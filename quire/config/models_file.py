"""The file of `quire serve --models`: several models for one server, as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from quire.config.engine import GROUP_TYPES, EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import check_server
from quire.types.errors import ConfigError
from quire.utils.units import parse_bytes

MIN_RESIDENCE = 5.0  # seconds
_LEAST_RESIDENCE = 0.1  # with none at all, two busy models would swap and never compute
PER_MODEL = (
    *("served_model_name", "tool_call_parser", "reasoning_parser", "allow_request_chat_template"),
    *("lora_modules", "lora_root", "max_queue", "max_n", "max_logprobs"),
)
"""Settings of the server that a model may have for itself."""
_SIZES = ("memory_budget", "host_memory_budget")
_TOP = (*_SIZES, "min_residence", "models")


@dataclass(frozen=True)
class ModelEntry:
    name: str
    engine: EngineConfig
    server: ServerConfig

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it; the table's own name comes first."""
        return tuple(dict.fromkeys((self.name, *self.server.served_model_name)))


@dataclass(frozen=True)
class ModelsFile:
    models: tuple[ModelEntry, ...]
    memory_budget: int | None = None  # bytes of the device that all models may take; None: what is free
    host_memory_budget: int | None = None  # bytes of the host for sleeping models of a GPU; None: what is free
    min_residence: float = MIN_RESIDENCE
    """Seconds that a busy model stays in memory before it makes room for another."""


def read_models(path: str, defaults: Mapping[str, Any], settings: ServerConfig) -> ModelsFile:
    """Read the file; `defaults` are engine settings of the command line, which hold where a table says nothing else.

    ConfigError, with the table and the key, for what cannot be.
    """
    try:
        given = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"models {path!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"models {path!r} is not valid TOML: {error}") from error
    _check_keys(path, given, _TOP)
    tables = given.get("models")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(
            f'models {path!r} names no model; write a table such as [models.chat] with model = "smollm2"'
        )
    entries = tuple(_entry(path, name, table, defaults, settings) for name, table in tables.items())
    _check_names(path, entries)
    _check_traces(path, entries)
    residence = given.get("min_residence", MIN_RESIDENCE)
    is_number = isinstance(residence, int | float) and not isinstance(residence, bool)
    if not is_number or not residence >= _LEAST_RESIDENCE or not isfinite(residence):
        raise ConfigError(
            f"models {path!r}: min_residence is {residence!r} but must be seconds, at least {_LEAST_RESIDENCE}"
        )
    memory, host = (_size(path, name, given.get(name)) for name in _SIZES)
    return ModelsFile(entries, memory, host, float(residence))


def _entry(path: str, name: str, table: Any, defaults: Mapping[str, Any], settings: ServerConfig) -> ModelEntry:
    where = f"models {path!r}, [models.{name}]"
    if not name or not name.isprintable():
        raise ConfigError(f"models {path!r}: {name!r} is no name for a model; give it one that clients can send")
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r} but must be a table of settings")
    known = [field.name for group in GROUP_TYPES.values() for field in fields(group)]
    _check_keys(where, table, (*known, *PER_MODEL))
    if "model" not in table:
        raise ConfigError(f"{where} has no model; add model = FOLDER, a .gguf file, a hub id or a built-in alias")
    own = {key: value for key, value in table.items() if key in PER_MODEL}
    try:
        given = {key: value for key, value in table.items() if key not in PER_MODEL}
        engine = EngineConfig.from_flat(**{**defaults, **given})
        if "trace" not in given:
            engine = replace(engine, tracing=engine.tracing.named(name))
        hints = get_type_hints(ServerConfig)
        server = replace(settings, **{key: _converted(key, value, hints[key]) for key, value in own.items()})
        check_server(server)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for key, value, normal in (
        ("data_parallel_size", engine.parallel.data_parallel_size, 1),
        ("parallel", engine.parallel.parallel, "manual"),
        ("elastic", engine.parallel.elastic, False),
        ("standby", engine.device.standby, False),
    ):
        if value != normal:
            raise ConfigError(f"{where}: {key} is for a server of one model; leave it out")
    return ModelEntry(name, engine, server)


def _converted(key: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} is {value!r}, which is wrong: {error}") from error


def _check_keys(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    listed = list(known)
    for key in given:
        if key not in listed:
            likely = get_close_matches(key, listed, n=1)
            hint = f"did you mean {likely[0]!r}?" if likely else "docs/reference/settings.md lists the settings"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _check_names(path: str, entries: Iterable[ModelEntry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if name in owners:
                raise ConfigError(
                    f"models {path!r}: the name {name!r} is both [models.{owners[name]}] and [models.{entry.name}];"
                    " give each model its own names"
                )
            owners[name] = entry.name


def _check_traces(path: str, entries: Iterable[ModelEntry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        trace = entry.engine.tracing.trace
        if trace is not None and owners.setdefault(trace, entry.name) != entry.name:
            raise ConfigError(
                f"models {path!r}: the trace of both [models.{owners[trace]}] and [models.{entry.name}] is {trace!r};"
                " give each model its own file"
            )


def _size(path: str, name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError(f"models {path!r}: {name}: {error}") from error
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f'models {path!r}: {name} is {value!r} but must be a size such as "100GiB"')
    return size
