"""Sealed connections: bytes come through in order, strangers do not, and nobody in between reads or changes any."""

from __future__ import annotations

import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from quire.utils import tls
from quire.utils.streams import receive_exactly
from quire.utils.tls import seal

SECRET = b"of these tests alone"


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    for end in (client, accepted):
        end.settimeout(10)
    return client, accepted


def sealed(first: bytes = SECRET, second: bytes = SECRET) -> tuple[socket.socket, socket.socket]:
    client, server = pair()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(seal, server, second, is_server=True)
        try:
            return seal(client, first, is_server=False), accepting.result(10)
        except BaseException:
            client.close()
            raise


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = sealed()
    with closing(near), closing(far):
        near.settimeout(10)
        far.settimeout(10)
        yield near, far


def test_any_amount_passes_both_ways_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    """More than all buffers hold: nobody may wait for the other to read first."""
    data = [random.Random(seed).randbytes(5_000_000 + seed) for seed in range(2)]
    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(end.sendall, each) for end, each in zip(ends, data, strict=True)]
        received = [pool.submit(receive_exactly, end, len(data[1 - index])) for index, end in enumerate(ends)]
        assert [one.result(30) for one in received] == data[::-1]
        for one in sending:
            one.result(10)


def test_the_end_of_one_side_is_the_end_of_the_other(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    near.sendall(b"last words")
    near.close()
    assert receive_exactly(far, 10) == b"last words"
    with pytest.raises(EOFError):
        receive_exactly(far, 1)


@pytest.mark.parametrize("is_server", [False, True])
def test_another_secret_gets_no_connection(is_server: bool) -> None:
    secrets = (SECRET, b"a guess") if is_server else (b"a guess", SECRET)
    with pytest.raises(OSError, match=r"certificate|alert|[Cc]onnection"):
        sealed(*secrets)


def test_a_certificate_of_the_same_name_is_not_enough() -> None:
    """Nor is any other of a stranger's."""
    certificate, key = tls._certificate(b"a stranger")
    assert certificate != tls._certificate(SECRET)[0]
    assert tls._certificate(SECRET) == tls._certificate(SECRET)
    assert ssl.PEM_cert_to_DER_cert(certificate.decode())
    assert key.startswith(b"-----BEGIN PRIVATE KEY")


def test_without_the_package_the_fix_is_named() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
from quire.types.errors import ConfigError
from quire.utils.tls import check_tls
try:
    check_tls()
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'quire[hosts]'" in done.stdout


def test_threads_end_with_their_connections() -> None:
    before = threading.active_count()
    near, far = sealed()
    near.close()
    far.settimeout(10)
    with closing(far), pytest.raises(EOFError):
        receive_exactly(far, 1)
    for thread in threading.enumerate():
        if thread.name == "quire-tls":
            thread.join(10)
    assert threading.active_count() <= before
