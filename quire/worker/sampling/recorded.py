"""The sampling of a recorded decode step: kernels only, which read the parameters of every row where they stand.

Gives each row the token that Sampler.sample would. Which rows can be sampled so, the sampler knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.logprobs import logprobs
from quire.kernels.triton.sampling import draw_within
from quire.kernels.triton.shaping import apply_edits, apply_penalties, keep_allowed
from quire.kernels.triton.step import append_chosen, append_likeliest
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import output_lengths
from quire.worker.sampling.grammar_masks import KIND
from quire.worker.sampling.logprobs import BatchLogprobs
from quire.worker.sampling.sampler import RecordedKind, Sampler


def sample_step(kind: RecordedKind, sampler: Sampler, logits: Tensor, rows: Tensor, state: RequestRows) -> Tensor:
    """Choose a token for each of the rows [n] from its logits [n, vocab_size], append it, and advance the row.

    Returns [2, n] int32: the tokens, and 0 or what `error_of` explains. Log-probabilities follow in more lines.
    """
    place = (rows, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)
    if not kind.draws:
        return append_likeliest(logits, *place)
    shaped, raw_highest = logits, None
    if kind.masked or kind.shapes:
        shaped, raw_highest = _shape(kind, sampler, logits, rows, state)
    assert sampler.draw_table is not None
    parameters = sampler.draw_table.parameters.index_select(1, rows)
    seeds = state.seeds.index_select(0, rows)
    tokens, highest = draw_within(shaped, parameters, seeds, output_lengths(rows, state))
    out = append_chosen(tokens, highest, *place, raw_highest)
    if kind.logprobs is None:
        return out
    found = BatchLogprobs(*logprobs(logits, tokens, kind.logprobs))
    return torch.cat([out, *found.lines()])


def _shape(
    kind: RecordedKind, sampler: Sampler, logits: Tensor, rows: Tensor, state: RequestRows
) -> tuple[Tensor, Tensor]:
    """Logits with every change that may move the likeliest token, and the highest of what they were.

    Masks may come first, since what is impossible stays so.
    """
    buffer, table = sampler.mask_buffer, sampler.shaping_table
    assert table is not None
    if kind.masked:
        buffer.copy_staged(KIND, min(len(rows), state.scratch_row))
    first, last = (0 if kind.masked else 1), (2 if kind.shapes else 1)
    shaped, raw_highest = keep_allowed(logits, rows, buffer.masks, buffer.lines[first:last])
    known = (state.token_ids, state.num_tokens, state.num_prompt_tokens)
    if kind.shapes:
        apply_edits(shaped, rows, table.edits, table.counts, *known)
        apply_penalties(shaped, rows, table.penalties, *known)
    return shaped, raw_highest
