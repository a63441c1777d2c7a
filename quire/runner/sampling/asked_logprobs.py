"""Log-probabilities of token ids that a request names (logprob_token_ids), besides those of the top tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.logprobs import LOGPROBS
from quire.platform.transfer import upload
from quire.runner.sampling.base import sampling_params
from quire.types.step import RowStart, TokenLogprobs

# Copies of logits that are made at a time: a row has one for each of its token ids.
_MAX_COPIES = 16


class AskedLogprobs:
    """Knows which rows name token ids. Their steps run eagerly: captured ones have no room for the answers."""

    def __init__(self, device: torch.device) -> None:
        self._gather = LOGPROBS.bind(Target(device.type))
        self._ids: dict[int, tuple[int, ...]] = {}

    def add_request(self, row: int, start: RowStart) -> None:
        if ids := sampling_params(start).logprob_token_ids:
            self._ids[row] = ids

    def remove_request(self, row: int) -> None:
        self._ids.pop(row, None)

    def wanted(self, row_list: list[int]) -> dict[int, tuple[int, ...]]:
        """Place in the batch -> token ids, for those rows that name any."""
        if not self._ids:
            return {}
        return {place: self._ids[row] for place, row in enumerate(row_list) if row in self._ids}

    def gather(self, logits: Tensor, wanted: Mapping[int, Sequence[int]]) -> Tensor:
        """[n, 2] int32: the rank of each of the n tokens and the bits of its log-probability, in order. No sync.

        Each is what the op gives of a chosen token, so it is the same number, bit for bit, if the token is sampled.
        """
        lines = upload([place for place, ids in wanted.items() for _ in ids], logits.device, torch.int64)
        tokens = upload([token for ids in wanted.values() for token in ids], logits.device, torch.int64)
        found = []
        for first in range(0, len(lines), _MAX_COPIES):
            part = slice(first, first + _MAX_COPIES)
            ranks, values = self._gather(logits.index_select(0, lines[part]), tokens[part], 0)
            found.append(torch.cat([ranks, values.view(torch.int32)], dim=1))
        return torch.cat(found)


def add_asked(
    entries: Sequence[TokenLogprobs], places: Sequence[int], asked: Mapping[int, Sequence[int]], found: Tensor
) -> list[TokenLogprobs]:
    """Entries of `places` with what `gather` found for those that are among `asked`, on the host."""
    ranks, values = found[:, 0].tolist(), found[:, 1].contiguous().view(torch.float32).tolist()
    slices, first = {}, 0
    for place, ids in asked.items():
        slices[place] = slice(first, first + len(ids))
        first += len(ids)
    extended = []
    for place, entry in zip(places, entries, strict=True):
        if place in slices:
            part = slices[place]
            entry = msgspec.structs.replace(
                entry,
                token_ids=[*entry.token_ids, *asked[place]],
                logprobs=[*entry.logprobs, *values[part]],
                asked_ranks=ranks[part],
            )
        extended.append(entry)
    return extended
