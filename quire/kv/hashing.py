"""The hash chain that names cached blocks: a block's hash stands for its tokens and all that came before.

Two requests share a block exactly when everything that decides its KV is equal: tokens, embeddings that were given in
their place, and cache salt. The hash is collision-resistant, since a collision would show one user's text to another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from quire.types.request import EngineRequest

_DOMAIN = b"quire-kv-1"


class HashChain:
    """The hashes of one request's full blocks; grows as tokens become known."""

    __slots__ = ("_block_size", "_pack", "_root", "hashes")

    def __init__(self, request: EngineRequest, block_size: int, weights: str = "") -> None:
        self.hashes: list[bytes] = []
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._root = root_hash(request, weights)

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hash the full blocks among the first `num_tokens` of `token_ids` that are not hashed yet."""
        hashes = self.hashes
        size = self._block_size
        first = len(hashes) * size
        count = (num_tokens - first) // size
        if count <= 0:
            return
        # Packed in one call: hashing thousands of tokens would take longer than computing them may.
        last = first + count * size
        tokens = token_ids if first == 0 and last == len(token_ids) else token_ids[first:last]
        packed = self._pack(*tokens) if count == 1 else struct.pack(f"<{count * size}I", *tokens)
        parent = hashes[-1] if hashes else self._root
        width = 4 * size
        for begin in range(0, len(packed), width):
            parent = blake2b(parent + packed[begin : begin + width]).digest()[:32]  # as _hash, without the call
            hashes.append(parent)


def root_hash(request: EngineRequest, weights: str = "") -> bytes:
    """The parent of the first block: everything that applies to the whole request, a part each.

    `weights` is the digest of the model's weights, once they are others than at the start.
    """
    salt, embeds = request.cache_salt, request.prompt_embeds
    parts: tuple[bytes, ...] = (
        _DOMAIN,
        b"" if salt is None else b"salt" + salt.encode(),
        b"" if embeds is None else b"embeds" + _hash(f"{embeds.dtype} {embeds.shape}".encode() + embeds.data),
    )
    if request.adapter is not None:
        parts = (*parts, b"adapter" + request.adapter.digest.encode())
    if weights:
        parts = (*parts, b"weights" + weights.encode())
    return _hash(b"".join(_framed(part) for part in parts))


def _hash(content: bytes) -> bytes:
    # Half the time of SHA-256 for so little content. Cut here: asking for fewer bytes would take as long again.
    return blake2b(content).digest()[:32]


def _framed(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part
