"""ServedAdapters: the LoRA adapters that requests may name as their model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quire.loader.adapter_files import adapter_ref
from quire.types.errors import ConfigError
from quire.types.request import AdapterRef


class ServedAdapters:
    """Names and what they stand for; a name may come to stand for other bytes, and running requests go on."""

    def __init__(self, adapters: Iterable[AdapterRef] = ()) -> None:
        self._adapters = {adapter.name: adapter for adapter in adapters}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._adapters)

    @property
    def refs(self) -> Sequence[AdapterRef]:
        return tuple(self._adapters.values())

    def get(self, name: str) -> AdapterRef | None:
        """What the name stands for; None if it is not an adapter's."""
        return self._adapters.get(name)

    def put(self, adapter: AdapterRef) -> None:
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> AdapterRef | None:
        return self._adapters.pop(name, None)


def read_lora_modules(modules: Sequence[str], model_names: Sequence[str]) -> ServedAdapters:
    """The adapters of --lora-modules: NAME=PATH, or JSON with "name" and "path"."""
    found: dict[str, AdapterRef] = {}
    for text in modules:
        name, path = _name_and_path(text)
        if name in model_names or name in found:
            raise ConfigError(f"lora_modules has {name!r}, which is the name of another model; give it its own")
        found[name] = adapter_ref(name, path)
    return ServedAdapters(found.values())


def _name_and_path(text: str) -> tuple[str, str]:
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return str(given["name"]), str(given["path"])
        except (ValueError, KeyError) as error:
            raise ConfigError(f'lora_modules has {text!r}; as JSON it must have "name" and "path"') from error
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise ConfigError(f"lora_modules has {text!r} but must be NAME=PATH")
    return name, path
