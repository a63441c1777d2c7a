"""TLS 1.3 between two processes that share a secret, behind a plain socket. Knows sockets, not what passes.

The certificate is made of the secret: who has it has the same one, and trusts no other. OpenSSL does the rest.
A thread of its own carries bytes between the plain socket and the encrypted connection, so that whoever has the plain
one, such as a kernel, needs to know nothing of it.
"""

from __future__ import annotations

import select
import socket
import ssl
import tempfile
import threading
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec

from quire.types.errors import ConfigError

_CHUNK = 1 << 18
_BUFFER = 1 << 20  # bytes that wait between the plain socket and the thread


def check_tls() -> None:
    """ConfigError where connections cannot be encrypted."""
    if find_spec("cryptography") is None:
        raise ConfigError(
            "what ranks on several hosts exchange is encrypted, which needs the Python package 'cryptography';"
            " install it on every host: pip install 'quire[hosts]'"
        )


def seal(connection: socket.socket, secret: bytes, *, is_server: bool) -> socket.socket:
    """A socket to the other side of `connection`, which is encrypted from now on. Blocks for the handshake, as long
    as the connection's timeout lets it. OSError if the other side has another secret."""
    context = _contexts(secret)[is_server]
    sealed = context.wrap_socket(connection, server_side=is_server)
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    # A daemon: it ends with either side.
    threading.Thread(target=_carry, args=(sealed, far), name="quire-tls", daemon=True).start()
    return near


@cache
def _contexts(secret: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(client's, server's)"""
    certificate, key = _certificate(secret)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts are told by the secret, not by their names
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificate.decode())
        with tempfile.NamedTemporaryFile() as file:  # its owner's alone; Python loads keys from files only
            file.write(certificate + key)
            file.flush()
            context.load_cert_chain(file.name)
    return client, server


def _certificate(secret: bytes) -> tuple[bytes, bytes]:
    """The certificate and the private key of a secret, as PEM. The same secret gives the same bytes."""
    check_tls()
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(blake2b(secret, digest_size=32, person=b"quire tls").digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "quire")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))  # clocks of hosts differ
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private


def _carry(sealed: ssl.SSLSocket, plain: socket.socket) -> None:
    """Until one of the two ends. One thread for both ways: a connection of OpenSSL is not for two."""
    with closing(sealed), closing(plain), suppress(OSError):
        sealed.setblocking(False)
        plain.setblocking(False)
        outward = inward = memoryview(b"")
        while True:
            moved = False
            if not outward:
                with suppress(BlockingIOError):
                    outward = memoryview(plain.recv(_CHUNK))
                    if not outward:
                        return
            if outward:
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    outward, moved = outward[sealed.send(outward) :], True
            if not inward:
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    inward = memoryview(sealed.recv(_CHUNK))
                    if not inward:
                        return
            if inward:
                with suppress(BlockingIOError):
                    inward, moved = inward[plain.send(inward) :], True
            if not moved:
                _wait(sealed, plain, bool(outward), bool(inward))


def _wait(sealed: ssl.SSLSocket, plain: socket.socket, has_outward: bool, has_inward: bool) -> None:
    poller = select.poll()
    poller.register(sealed, (0 if has_inward else select.POLLIN) | (select.POLLOUT if has_outward else 0))
    poller.register(plain, (0 if has_outward else select.POLLIN) | (select.POLLOUT if has_inward else 0))
    poller.poll()
