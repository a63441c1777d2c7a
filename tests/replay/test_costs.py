"""Cost tables from files: what no machine can have measured is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.replay.costs import read_table, shipped_tables
from quire.types.errors import ConfigError


def test_the_tables_of_the_package_can_be_read() -> None:
    assert ("epyc-2-cores", "smollm2") in shipped_tables()


@pytest.mark.parametrize("name", ["decode", "prefill", "host"])
@pytest.mark.parametrize(
    ("curve", "why"),
    [
        ([], "must have sizes that grow"),
        ([(2, 0.1), (1, 0.2)], "must have sizes that grow"),
        ([(1, 0.1), (1, 0.2)], "must have sizes that grow"),
        ([(1, -0.1), (2, 0.2)], "holds -0.1 seconds"),
    ],
)
def test_a_damaged_curve_is_refused_by_name(tmp_path: Path, name: str, curve: list[Any], why: str) -> None:
    table = msgspec.to_builtins(shipped_tables()["epyc-2-cores", "smollm2"])
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode({**table, name: curve}))
    with pytest.raises(ConfigError, match=f"is not a cost table: {name} {why}.*; `quire bench steps --table` writes"):
        read_table(path)


def test_steps_take_time(tmp_path: Path) -> None:
    table = msgspec.to_builtins(shipped_tables()["epyc-2-cores", "smollm2"])
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode({**table, "decode": [(1, 0.0)]}))
    with pytest.raises(ConfigError, match=r"decode holds 0.0 seconds"):
        read_table(path)
