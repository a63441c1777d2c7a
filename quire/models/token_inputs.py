"""TokenInputs: what a model reads about the tokens of a step besides their ids. Knows rows, never media.

Cache slots and causal order follow a token's index in its sequence. Its rotation follows a position that may be
another one, or one on each of several axes, and its embedding may come from elsewhere than the model's table.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.types.step import RowStart


class TokenInputs:
    """The plain case, which costs nothing: rotations follow the index, embeddings come from the table.

    rows [r] int64 and query_starts [r + 1] int32 say whose tokens they are, as in an AttentionBatch; index [n] int64
    is each token's place in its sequence, 0 for padding.
    """

    captures: bool = True
    """Whether the methods below call nothing but ops that have kernels, so that steps can be captured."""

    def add_request(self, start: RowStart) -> None:
        """A request takes a row."""

    def remove_request(self, row: int) -> None:
        """Forget the row; one that is not there does no harm."""

    def begin_step(self, rows: Sequence[int], counts: Sequence[int], computed: Sequence[int]) -> bool:
        """Whether the next step must run eagerly: counts[i] tokens of rows[i] from computed[rows[i]] on."""
        return False

    def rotary_positions(self, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        """[n] or, for RoPE in sections, [axes, n] int64; all below max_model_len. No sync."""
        return index

    def give(self, hidden: Tensor | None) -> None:
        """Hidden states of the tokens that come next, for what takes those as embeddings; None: no longer."""

    def embeds(self, input_ids: Tensor, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor | None:
        """[n, hidden] in place of the (scaled) rows of the model's table; None: all come from there. No sync."""
        return None


PLAIN_INPUTS = TokenInputs()
