"""What a layer keeps of the tokens before: declared by models, laid out in blocks by kv, allocated by the worker."""

from __future__ import annotations

from dataclasses import dataclass

STATE_ROLLBACK = 9  # tokens that a recurrent state can take back: drafts, and the last known token
STATE_SHORT = 32  # tokens of a row in a step up to which they are folded into its states one by one in every mode


@dataclass(frozen=True, slots=True)
class KVForm:
    """What attention kernels read of one token."""

    num_heads: int  # of keys and values
    head_dim: int
    value_dim: int | None = None  # latent: a value is its key's first dimensions; None: it is kept apart
    index_dim: int = 0  # latent: a key of the sparse indexer, kept after the latent


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps: something of every token, or a state per row.

    Models declare kind, window and form; the bytes follow once the attention backend and its type are chosen.
    """

    kind: str  # of KV group, see quire/kv/kinds.py
    window: int | None = None  # sliding: a query sees itself and the window-1 tokens before it; chunked: chunk size
    bytes_per_token: int = 0  # keys and values together
    bytes_per_row: int = 0  # of a state, which stands for all tokens before
    form: KVForm | None = None  # None: a state, of which only its layer knows more than the size

    def block_bytes(self, block_size: int) -> int:
        """A block holds what is kept of `block_size` tokens, or one state."""
        return self.bytes_per_row or block_size * self.bytes_per_token
