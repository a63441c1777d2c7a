"""Addresses and secrets of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.config.hosts import parse_address, read_secret
from quire.types.errors import ConfigError

SECRET = b"a secret of 16+ bytes"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "is not HOST:PORT"),
        (":5900", "is not HOST:PORT"),
        ("10.0.0.1:x", "is not HOST:PORT"),
        ("10.0.0.1:65536", "is not HOST:PORT"),
        ("no-such-host.invalid:5900", "is not known"),
    ],
)
def test_addresses_that_are_none(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(address)


def test_every_replica_has_a_port_of_its_own() -> None:
    config = EngineConfig.from_flat(
        model="m", executor="hosts", hosts_address="10.0.0.1:5900", data_parallel_size=3, tensor_parallel_size=2
    )
    replicas = [config.of_replica(index, 4) for index in range(3)]
    assert [each.parallel.hosts_address for each in replicas] == [f"10.0.0.1:590{index}" for index in range(3)]
    assert {each.parallel.data_parallel_size for each in replicas} == {1}
    assert {each.device.num_threads for each in replicas} == {None}  # the cores of other hosts are theirs
    assert EngineConfig.from_flat(model="m", data_parallel_size=3).of_replica(2, 4).device.num_threads == 4


def test_every_replica_has_a_trace_of_its_own() -> None:
    config = EngineConfig.from_flat(model="m", data_parallel_size=2, trace="t/quire.trace")
    assert [config.of_replica(index, 1).tracing.trace for index in range(2)] == [
        "t/quire.trace-replica0",
        "t/quire.trace-replica1",
    ]
    assert EngineConfig.from_flat(model="m", data_parallel_size=2).of_replica(0, 1).tracing.trace is None


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_HOSTS_SECRET", raising=False)
    with pytest.raises(ConfigError, match="need a secret that they share"):
        read_secret(None)
    with pytest.raises(ConfigError, match="cannot be read from"):
        read_secret(str(tmp_path / "absent"))
    file = tmp_path / "secret"
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="has 5 bytes but needs 16 or more"):
        read_secret(str(file))
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", "of the environment")
    assert read_secret(None) == b"of the environment"
