"""The one Registry class: names to implementations, imported only when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

from quire.types.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to `"module:attribute"` relative to a package, resolved and cached on first use.

    A registry line is the only thing an extension adds outside its own file, so nothing is imported
    until somebody asks for that name.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        entries: dict[str, str],
        error: type[UnknownNameError] = UnknownNameError,
    ) -> None:
        self.kind = kind
        self._package = package
        self._entries = dict(entries)
        self._resolved: dict[str, T] = {}
        self._error = error

    def register(self, name: str, target: str | T) -> None:
        """Add or replace an entry at run time: a `"module:attribute"` path or the object itself."""
        self._resolved.pop(name, None)
        if isinstance(target, str):
            self._entries[name] = target
        else:
            self._entries[name] = f"<object {target!r}>"
            self._resolved[name] = target

    @contextmanager
    def with_entries(self, entries: Mapping[str, str | T], *, only: bool = False) -> Iterator[None]:
        """Have these entries too, or `only` these, in a `with` block; whatever it registers is gone after it."""
        before = self._entries, self._resolved
        self._entries, self._resolved = ({}, {}) if only else (dict(self._entries), dict(self._resolved))
        for name, target in entries.items():
            self.register(name, target)
        try:
            yield
        finally:
            self._entries, self._resolved = before

    def check(self, name: str) -> None:
        """Refuse a name that is not known. Imports nothing."""
        if name not in self._entries:
            raise self._error(self.kind, name, sorted(self._entries))

    def get(self, name: str) -> T:
        if name in self._resolved:
            return self._resolved[name]
        self.check(name)
        module_name, _, attribute = self._entries[name].partition(":")
        # A relative module lives in the registry's own package; a dotted one is a user's plug-in.
        try:
            module = importlib.import_module(module_name if "." in module_name else f"{self._package}.{module_name}")
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package == __name__.partition(".")[0]:  # our own mistake
                raise
            raise ConfigError(
                f"{self.kind} {name!r} needs the Python package {package!r}, which is not installed; install it, or"
                f" choose another {self.kind}"
            ) from error
        resolved = cast(T, getattr(module, attribute))
        self._resolved[name] = resolved
        return resolved

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
