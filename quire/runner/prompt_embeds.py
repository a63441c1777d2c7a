"""Prompts that are embeddings instead of tokens: the inputs of a model with those of requests that bring their own.

They stay on the host; a step uploads those of its own tokens, so the device holds no more than a step's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.models.token_inputs import TokenInputs
from quire.ops.select import embed_from
from quire.types.request import PromptEmbeds
from quire.types.step import RowStart

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PromptEmbedInputs(TokenInputs):
    def __init__(
        self, inner: TokenInputs, embed: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`inner` are the model's own; `embed` looks tokens up in its table, [n] -> [n, hidden] of `dtype`."""
        self.captures = inner.captures  # steps that compute such prompts run eagerly
        self.inner, self._embed = inner, embed
        self._dtype, self._device = dtype, device
        self._given: dict[int, Tensor] = {}  # row -> [n, hidden] on the host
        self._encoded: Tensor | None = None  # of the step's tokens, those that are given
        self._sources: list[int] = []  # of each of the step's tokens, its line among them, or -1

    def add_request(self, start: RowStart) -> None:
        self.inner.add_request(start)
        if start.prompt_embeds is not None:
            self._given[start.row] = as_tensor(start.prompt_embeds)

    def remove_request(self, row: int) -> None:
        self.inner.remove_request(row)
        self._given.pop(row, None)

    def begin_step(self, rows: Sequence[int], counts: Sequence[int], computed: Sequence[int]) -> bool:
        needs_eager = self.inner.begin_step(rows, counts, computed)
        self._encoded = None
        if not self._given:
            return needs_eager
        parts: list[Tensor] = []
        sources: list[int] = []
        total = 0
        for row, count in zip(rows, counts, strict=True):
            given = self._given.get(row)
            part = None if given is None else given[computed[row] : computed[row] + count]
            size = 0 if part is None else len(part)
            sources += [*range(total, total + size), *[-1] * (count - size)]
            total += size
            if part is not None and size:
                parts.append(part.to(self._dtype))
        if not parts:
            return needs_eager
        self._encoded, self._sources = torch.cat(parts).to(self._device), sources
        return True

    def rotary_positions(self, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        return self.inner.rotary_positions(index, rows, query_starts)

    def embeds(self, input_ids: Tensor, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor | None:
        own = self.inner.embeds(input_ids, index, rows, query_starts)
        encoded, self._encoded = self._encoded, None  # of this step only: the next may be one that is captured
        if encoded is None:
            return own
        padding = [-1] * (len(input_ids) - len(self._sources))
        sources = torch.tensor([*self._sources, *padding], device=self._device)
        return embed_from(self._embed(input_ids) if own is None else own, encoded, sources)


def as_tensor(embeds: PromptEmbeds) -> Tensor:
    return torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype]).view(embeds.shape)
