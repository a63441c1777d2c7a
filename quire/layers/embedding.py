"""Token embeddings and the language-model head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from quire.layers.adapters import Adaptable, AdapterSizes, LinearAdapters, LoraPair
from quire.layers.fusion import whole
from quire.layers.linear import Linear, MatrixLayer, Piece
from quire.layers.quant.base import LinearMethod, MatrixSpec, TableMethod
from quire.layers.quant.registry import choose_method
from quire.layers.scheme import F32, Scheme, Weight, part_of, part_scheme
from quire.layers.weights import NO_SCHEMES, Schemes
from quire.ops.base import Target
from quire.ops.scale import SCALE, SOFT_CAP
from quire.ops.select import CLEAR_OUTSIDE_RANGE, TOKENS_IN_RANGE
from quire.parallel.groups import ParallelGroup


class VocabParallelEmbedding(MatrixLayer):
    """A [vocab, hidden] table; each rank holds a range of tokens and the ranks' rows are summed."""

    method: TableMethod

    def __init__(self, vocab_size: int, hidden_size: int, *, target: Target, group: ParallelGroup) -> None:
        super().__init__(bias=False, target=target)
        self.vocab_size, self.hidden_size, self._group = vocab_size, hidden_size, group
        self.first_token, self.num_tokens = group.share_of(vocab_size, "vocabulary")
        self._local, self._clear = TOKENS_IN_RANGE.bind(target), CLEAR_OUTSIDE_RANGE.bind(target)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [n] -> [n, hidden]."""
        rows = self._rows(token_ids)
        if self.adapters is None or not self.adapters.is_active:
            return rows
        return whole(self.adapters.expand(rows, self.adapters.look_up(token_ids)))

    def adapt(self, sizes: AdapterSizes) -> None:
        with self._device:
            self.adapters = LinearAdapters(self.vocab_size, (self.hidden_size,), sizes, self._target)

    def adapter_shape(self, piece: str | None) -> tuple[int, int] | None:
        return self.hidden_size, self.vocab_size

    def adapter_parts(self, piece: str | None, pair: LoraPair) -> dict[int, LoraPair]:
        return {0: pair}  # every rank has all of it, and adds it to the sum of the ranks' rows

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self.method.embed(token_ids)
        held = (self.first_token, self.num_tokens)
        rows = self.method.embed(self._local(token_ids, *held))
        return self._group.collectives.all_reduce(self._clear(token_ids, rows, *held))

    def head_adapters(self, sizes: AdapterSizes) -> LinearAdapters:
        """Slots of a head that multiplies by this table."""
        with self._device:
            return LinearAdapters(self.hidden_size, (self.num_tokens,), sizes, self._target)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {None: (self.vocab_size, self.hidden_size)}

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        spec = MatrixSpec(self.hidden_size, (self.num_tokens,), False, self._target, path, "table")
        with self._device:
            method = choose_method(spec, self._loaded_schemes(schemes))
        assert isinstance(method, TableMethod)
        self.method = method
        return self

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        self.method.load(0, part_of(weight, 0, self.first_token, self.num_tokens))

    def _loaded_schemes(self, schemes: Schemes) -> list[Scheme]:
        stored = schemes.get(("weight", None), F32)
        return [part_scheme(stored, 0, self.first_token, self.num_tokens, self.vocab_size)]


class TiedProjection(Adaptable):
    """hidden @ table^T over the embedding's own storage, so that the table exists once."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.vocab_size = embedding.vocab_size
        self.adapters: LinearAdapters | None = None

    def adapt(self, sizes: AdapterSizes) -> None:
        self.adapters = self.embedding.head_adapters(sizes)

    def adapter_shape(self, piece: str | None) -> tuple[int, int] | None:
        return self.vocab_size, self.embedding.hidden_size

    def adapter_parts(self, piece: str | None, pair: LoraPair) -> dict[int, LoraPair]:
        first, count = self.embedding.first_token, self.embedding.num_tokens
        return {0: LoraPair(pair.down, pair.up[:, first : first + count])}

    @property
    def method(self) -> LinearMethod:
        return self.embedding.method

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.embedding.method.multiply(hidden)
        if self.adapters is None or not self.adapters.is_active:
            return logits
        return whole(self.adapters.expand(logits, self.adapters.shrink(hidden)))


class HeadProjection(Linear):
    """A head with a matrix of its own, which a quantization may treat unlike other layers.

    Each rank holds a range of tokens, as of the embeddings.
    """

    __call__: Callable[..., Tensor]  # nobody feeds it
    role = "head"

    def __init__(
        self, hidden_size: int, vocab_size: int, *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        piece = Piece(None, vocab_size, *group.share_of(vocab_size, "vocabulary"))
        super().__init__(hidden_size, (piece,), bias=bias, target=target)
        self.vocab_size = vocab_size


class LMHead(nn.Module):
    """Logits over the whole vocabulary, in the model's dtype: projection, then scale, then soft cap."""

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        projection: TiedProjection | HeadProjection,
        *,
        logit_divisor: float | None = None,
        logit_soft_cap: float | None = None,
        target: Target,
        group: ParallelGroup,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.logit_divisor = logit_divisor
        self.logit_soft_cap = logit_soft_cap
        self._scale, self._soft_cap = SCALE.bind(target), SOFT_CAP.bind(target)
        self._group = group

    def forward(self, hidden: Tensor, whole: bool = True) -> Tensor:
        """hidden: [m, hidden] -> [m, vocab]; without `whole`, of this rank's slice of the vocabulary."""
        logits: Tensor = self.projection(hidden)
        if self.logit_divisor is not None:
            logits = self._scale(logits, 1.0 / self.logit_divisor)
        if self.logit_soft_cap is not None:
            logits = self._soft_cap(logits, self.logit_soft_cap)
        return self._group.collectives.all_gather(logits, self.projection.vocab_size) if whole else logits
