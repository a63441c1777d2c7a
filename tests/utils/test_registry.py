"""The registry: lazy, extensible at run time, and clear about names it does not know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from quire.types.errors import ConfigError, UnknownArchitectureError, UnknownNameError
from quire.utils.registry import Registry


def make() -> Registry[object]:
    return Registry("unit", "quire.utils", {"bytes": "units:format_bytes", "away": "no_such_module:thing"})


def test_an_entry_is_resolved_when_asked_for() -> None:
    registry = make()
    from quire.utils.units import format_bytes

    assert registry.get("bytes") is format_bytes
    assert registry.get("bytes") is format_bytes
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("away")


def test_names_are_known_without_importing() -> None:
    code = (
        "import sys; from quire.utils.registry import Registry\n"
        "r = Registry('unit', 'quire.utils', {'bytes': 'units:format_bytes'})\n"
        "assert 'bytes' in r and list(r) == ['bytes'] and 'quire.utils.units' not in sys.modules\n"
        "r.get('bytes'); assert 'quire.utils.units' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown unit 'miles'; known: away, bytes") as info:
        make().get("miles")
    assert (info.value.kind, info.value.name, info.value.known) == ("unit", "miles", ["away", "bytes"])
    empty: Registry[object] = Registry("unit", "quire.utils", {}, error=UnknownArchitectureError)
    with pytest.raises(UnknownArchitectureError, match="known: none"):
        empty.get("miles")


def test_register_takes_an_object_or_a_path_and_replaces() -> None:
    registry = make()
    registry.register("new", thing := object())
    assert registry.get("new") is thing
    registry.get("bytes")
    registry.register("bytes", thing)
    assert registry.get("bytes") is thing
    registry.register("bytes", "collections.abc:Mapping")
    assert registry.get("bytes") is Mapping


def test_a_package_that_is_not_installed_is_named() -> None:
    registry: Registry[object] = Registry("unit", "quire.utils", {"away": "no_such_package.inside:thing"})
    with pytest.raises(ConfigError, match=r"unit 'away' needs the Python package 'no_such_package'.*install it"):
        registry.get("away")


def test_entries_of_a_block_are_gone_after_it() -> None:
    registry: Registry[object] = Registry("thing", "quire.utils", {"a": "log:get_logger", "b": "log:get_logger"})
    before = registry.get("a")
    with registry.with_entries({"a": 1, "c": 2}):
        registry.register("d", 3)
        assert [registry.get(name) for name in registry] == [1, before, 2, 3]
    assert list(registry) == ["a", "b"]
    assert registry.get("a") is before
    with registry.with_entries({"c": 2}, only=True):
        assert list(registry) == ["c"]
        with pytest.raises(UnknownNameError):
            registry.get("a")
    assert list(registry) == ["a", "b"]
