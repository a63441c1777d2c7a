"""What whoever launches a rank on any host has to know. Imports no torch, since it runs no steps itself."""

from __future__ import annotations

import msgspec

REFUSED = 3  # exit status: joining again would not help, and the cause was printed
ORDERS, REPORTS, CONTROL, LAUNCHER = b"/orders", b"/reports", b"/control", b"/launcher"


class Lost(msgspec.Struct, tag=True, frozen=True):
    """Whoever launched a rank tells the engine how it ended."""

    reason: str


class JoinOrder(msgspec.Struct, frozen=True):
    """What a remote rank reads from stdin."""

    address: str
    secret: bytes
    token: str  # names it to the engine
    num_local: int  # ranks of this host
