"""The sampling of a recorded decode step: kernels only, which read the parameters of every row where they stand.

Gives each row the token that Sampler.sample would. Which rows can be sampled so, the sampler knows.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.triton.sampling import draw_within
from quire.kernels.triton.shaping import keep_allowed
from quire.kernels.triton.step import append_chosen, append_likeliest
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import output_lengths
from quire.worker.sampling.sampler import RecordedKind, Sampler


def sample_step(kind: RecordedKind, sampler: Sampler, logits: Tensor, rows: Tensor, state: RequestRows) -> Tensor:
    """Choose a token for each of the rows [n] from its logits [n, vocab_size], append it, and advance the row.

    Returns [2, n] int32: the tokens, and 0 or what `error_of` says more about.
    """
    place = (rows, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)
    if not kind.draws:
        return append_likeliest(logits, *place)
    raw_highest = None
    if kind.masked:
        logits, raw_highest = keep_allowed(logits, rows, sampler.masks.buffer, sampler.masks.lines)
    assert sampler.draw_table is not None
    parameters = sampler.draw_table.parameters.index_select(1, rows)
    seeds = state.seeds.index_select(0, rows)
    tokens, highest = draw_within(logits, parameters, seeds, output_lengths(rows, state))
    return append_chosen(tokens, highest, *place, raw_highest)
