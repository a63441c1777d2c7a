"""Token embeddings and the language-model head, split over the vocabulary."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.linear import ColumnParallelLinear
from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.embedding import embed, embed_range
from quire.ops.linear import DIRECT, LINEAR_TRANSPOSED, linear_transposed
from quire.ops.soft_cap import soft_cap
from quire.parallel.groups import ParallelGroup


class VocabParallelEmbedding(WeightedLayer):
    """A [vocab, hidden] table; each rank holds a range of tokens and the ranks' rows are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, *, target: Target, group: ParallelGroup) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.first_token, self.num_tokens = group.slice_of(vocab_size, "vocabulary")
        self.weight = empty_parameter(self.num_tokens, hidden_size, dtype=target.dtype)
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [n] -> [n, hidden]."""
        if self._group.size == 1:
            return embed(self.weight, token_ids)
        rows = embed_range(self.weight, token_ids, self.first_token)
        return self._group.collectives.all_reduce(rows)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {None: (self.vocab_size, self.weight.shape[1])}

    def load(self, parameter: str, piece: str | None, tensor: Tensor) -> None:
        self.weight.data.copy_(tensor[self.first_token : self.first_token + self.num_tokens])


class TiedProjection(nn.Module):
    """hidden @ table^T over the embedding's own storage, so that the table exists once."""

    def __init__(self, embedding: VocabParallelEmbedding, target: Target) -> None:
        super().__init__()
        self.embedding = embedding
        self._product = LINEAR_TRANSPOSED.bind(target)
        self.recipe = DIRECT  # how to call the product batch-invariantly; set by the self-check at start

    @property
    def is_invariant(self) -> bool:
        return self._product is not linear_transposed

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product(hidden, self.embedding.weight, None, self.recipe)


class LMHead(nn.Module):
    """Logits over the whole vocabulary, in the model's dtype: projection, then scale, then soft cap."""

    def __init__(
        self,
        projection: TiedProjection | ColumnParallelLinear,
        *,
        logit_divisor: float | None,
        logit_soft_cap: float | None,
        group: ParallelGroup,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.logit_divisor = logit_divisor
        self.logit_soft_cap = logit_soft_cap
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [m, hidden] -> [m, vocab]."""
        logits = self._group.collectives.all_gather(self.projection(hidden), dim=-1)
        if self.logit_divisor is not None:
            logits = logits / self.logit_divisor
        if self.logit_soft_cap is not None:
            logits = soft_cap(logits, self.logit_soft_cap)
        return logits
