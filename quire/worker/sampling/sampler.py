"""The sampler: from logits to tokens, on the device, each row as if it were alone.

Order, the same as vLLM's:

1. log-probabilities are taken from the untouched logits
2. allowed tokens, bad words, logit bias, min_tokens, penalties, then the grammar's mask: they can change the
   likeliest token
3. greedy rows take the likeliest token, the lower id among equals; for the others
4. temperature, min_p, top_k, top_p
5. argmax of logit + Gumbel noise, keyed by (seed, output position, token id)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.choice import DRAW, FIRST_MAX
from quire.ops.draw_within import DRAW_WITHIN
from quire.ops.keep_allowed import KEEP_ALLOWED
from quire.ops.logprobs import LOGPROBS
from quire.platform.transfer import Download
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, TokenLogprobs
from quire.worker.sampling.allowed_tokens import AllowedTokens
from quire.worker.sampling.bad_words import BadWords
from quire.worker.sampling.base import ActiveRows, Feature, RowState, SampleRows, output_lengths, sampling_params
from quire.worker.sampling.draw import draw_of
from quire.worker.sampling.draw_table import DrawTable
from quire.worker.sampling.grammar_masks import GrammarMasks
from quire.worker.sampling.logit_bias import LogitBias
from quire.worker.sampling.logprobs import BatchLogprobs, Logprobs, token_logprobs
from quire.worker.sampling.mask_buffer import MaskBuffer
from quire.worker.sampling.min_p import MinP
from quire.worker.sampling.min_tokens import MinTokens
from quire.worker.sampling.penalties import Penalties
from quire.worker.sampling.temperature import Temperature
from quire.worker.sampling.top_k_top_p import TopKTopP

if TYPE_CHECKING:
    from quire.worker.sampling.shaping_table import ShapingTable

_RECORDED_LOGPROBS = (0, 5, 20)  # numbers of likeliest tokens for which sampling is recorded
_BAD_LOGITS, _NO_TOKEN, _OVERFLOW = 1, 2, 3
_MESSAGES = {
    _BAD_LOGITS: "the model produced NaN or infinite logits; the weights or the dtype are unsuitable",
    _NO_TOKEN: (
        "no token may be chosen: allowed_token_ids, bad_words, min_tokens and the grammar exclude every token; "
        "loosen one of them"
    ),
    _OVERFLOW: "the logits overflow; use less extreme logit_bias or repetition_penalty",
}


@dataclass
class SampleOutput:
    """Tokens on the device; the first call of a method brings everything to the host in one copy."""

    token_ids: Tensor  # [m] int64
    status: Tensor  # [m] int32, 0 is fine
    batch_logprobs: BatchLogprobs | None = None
    places: list[int] = field(default_factory=list)  # batch entries that batch_logprobs is about
    counts: list[int] = field(default_factory=list)  # parallel to places: how many likeliest tokens

    def tokens(self) -> list[int]:
        """The chosen tokens in batch order; 0 or any other valid id where there is an error. Syncs once."""
        return self._fetched[0].tolist()

    def errors(self) -> dict[int, str]:
        """Batch entry -> why it has no token."""
        return {place: _MESSAGES[code] for place, code in enumerate(self._fetched[1].tolist()) if code}

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Batch entry -> its log-probabilities, for those that asked."""
        if self.batch_logprobs is None:
            return {}
        tokens, _, integers, values = self._fetched
        chosen = tokens[self.places].tolist()
        lines = zip(chosen, integers.tolist(), values.view(torch.float32).tolist(), self.counts, strict=True)
        return {place: token_logprobs(*line) for place, line in zip(self.places, lines, strict=True)}

    def send(self) -> None:
        """Start the copy to the host, so that it is there when asked for. Does not wait."""
        self._arriving  # noqa: B018  computed once, on first use

    @cached_property
    def _arriving(self) -> tuple[Download, list[torch.Size]]:
        parts = [self.token_ids.to(torch.int32), self.status]
        if self.batch_logprobs is not None:
            parts += [self.batch_logprobs.integers, self.batch_logprobs.values.view(torch.int32)]
        return Download(torch.cat([part.flatten() for part in parts])), [part.shape for part in parts]

    @cached_property
    def _fetched(self) -> list[Tensor]:
        download, shapes = self._arriving
        pieces = torch.split(download.get(), [shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class RecordedKind(NamedTuple):
    """What the sampling of a recorded step has to do: what some of its rows ask for.

    There are few kinds, since each is recorded when it first comes up, and everybody waits for that.
    """

    draws: bool = False  # not just the likeliest token of all
    masked: bool = False  # a grammar's mask
    shapes: bool = False  # allowed tokens, bans, biases or penalties
    logprobs: int | None = None  # log-probabilities of so many likeliest tokens


class Sampler:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._shaping: list[Feature] = [
            AllowedTokens(vocab_size, device),
            BadWords(vocab_size, device),
            LogitBias(vocab_size, device),
            MinTokens(vocab_size, device),
            Penalties(max_rows, device),
        ]
        self._temperature = Temperature(max_rows, device)
        self._min_p = MinP(max_rows, device)
        self._top_k_top_p = TopKTopP(vocab_size, max_rows, device)
        self._features = [*self._shaping, self._temperature, self._min_p, self._top_k_top_p]
        self._logprobs = Logprobs(vocab_size)
        self._first_max = FIRST_MAX.bind(Target(device.type))
        self._draw = DRAW.bind(Target(device.type))
        self._gather_logprobs = LOGPROBS.bind(Target(device.type))
        # Where a kernel does the whole draw; elsewhere the features above do it one after the other.
        self._draw_within = DRAW_WITHIN.bind(Target(device.type))
        can_draw = self._draw_within is not DRAW_WITHIN.reference
        can_shape = KEEP_ALLOWED.bind(Target(device.type)) is not KEEP_ALLOWED.reference
        self.draw_table = DrawTable(vocab_size, max_rows, device) if can_draw else None
        self.mask_buffer = MaskBuffer(vocab_size, max_rows, 2 if can_shape else 1, device)
        self.masks = GrammarMasks(vocab_size, self.mask_buffer)
        self.shaping_table: ShapingTable | None = None
        if can_shape:  # its module needs what its kernels need
            from quire.worker.sampling.shaping_table import ShapingTable

            self.shaping_table = ShapingTable(vocab_size, max_rows, self.mask_buffer, device)
        # Every row is in one of these.
        self._greedy = ActiveRows()
        self._few_candidates = ActiveRows()
        self._whole_vocabulary = ActiveRows()
        self._plain: set[int] = set()
        self._recordable: set[int] = set()  # in steps whose sampling has kernels
        self._kind_of: tuple[bool, list[int], RecordedKind | None] | None = None  # what was last asked for

    def add_request(self, row: int, start: RowStart) -> None:
        """Stage a request's parameters. Host only."""
        self.remove_request(row)
        if not isinstance(start.params, SamplingParams):
            return
        for feature in self._features:
            feature.add_request(row, start)
        self._logprobs.add_request(row, start)
        if self.draw_table is not None:
            self.draw_table.set(row, start.params)
            if self._can_be_recorded(row, start):
                self._recordable.add(row)
        if sampling_params(start).greedy:
            self._greedy.add(row)
            if _is_simple(start.params):
                self._plain.add(row)
        elif self._top_k_top_p.has_few_candidates(row):
            self._few_candidates.add(row)
        else:
            self._whole_vocabulary.add(row)

    def _can_be_recorded(self, row: int, start: RowStart) -> bool:
        """Stage what shapes its logits, if there are kernels for that; without them nothing may."""
        if self.shaping_table is None:
            return _is_simple(sampling_params(start))
        self.shaping_table.set(row, start)
        return row not in self.shaping_table.too_large

    def remove_request(self, row: int) -> None:
        for feature in self._features:
            feature.remove_request(row)
        self._logprobs.remove_request(row)
        self._kind_of = None
        self._plain.discard(row)
        self._recordable.discard(row)
        if self.shaping_table is not None:
            self.shaping_table.remove(row)
        for group in (self._greedy, self._few_candidates, self._whole_vocabulary):
            group.discard(row)

    def all_plain(self, row_list: list[int]) -> bool:
        """Whether all these rows take the likeliest token and ask for nothing else."""
        return self._plain.issuperset(row_list)

    def recorded_kind(self, row_list: list[int], masked: bool) -> RecordedKind | None:
        """How a recorded step chooses for these rows, some of which may be masked; None if it cannot.

        Without kernels for it, it can only take the likeliest token.
        """
        if self._kind_of is None or self._kind_of[:2] != (masked, row_list):
            self._kind_of = (masked, list(row_list), self._find_kind(row_list, masked))
        return self._kind_of[2]

    @property
    def usual_kinds(self) -> list[RecordedKind]:
        """Those that nearly every engine comes to."""
        return [RecordedKind(), *([] if self.draw_table is None else [RecordedKind(draws=True)])]

    def _find_kind(self, row_list: list[int], masked: bool) -> RecordedKind | None:
        if not masked and self.all_plain(row_list):
            return RecordedKind()
        if not self._recordable.issuperset(row_list):
            return None
        table = self.shaping_table
        if table is None:
            return None if masked else RecordedKind(draws=True)
        most = max(self.wanted_logprobs(row_list).values(), default=None)
        if most is not None and most > _RECORDED_LOGPROBS[-1]:
            return None
        return RecordedKind(
            draws=True,
            masked=masked,
            shapes=not table.shaped.isdisjoint(row_list),
            logprobs=None if most is None else next(count for count in _RECORDED_LOGPROBS if count >= most),
        )

    def wanted_logprobs(self, row_list: list[int]) -> dict[int, int]:
        """How many likeliest tokens are to be told of, for those places of a batch that want log-probabilities."""
        return self._logprobs.wanted_counts(row_list)

    def apply_staged_writes(self) -> None:
        """Bring staged parameters to the device. Call it before `sample`, after adding and removing rows."""
        for feature in self._features:
            feature.apply_staged_writes()
        if self.draw_table is not None:
            self.draw_table.apply_staged_writes()
        if self.shaping_table is not None:
            self.shaping_table.apply_staged_writes()

    def sample(self, logits: Tensor, rows: SampleRows, state: RowState) -> SampleOutput:
        """A token for each line of logits [m, vocab_size]. The logits are overwritten. No sync."""
        wanting = self._logprobs.select(rows)
        untouched = None if wanting is None else wanting.take(logits)
        if self._only_draws(rows.row_list):
            token_ids, best = self._draw_all(logits, rows, state)
            status = _status(best, best)
        else:
            logits = logits.to(torch.float32)
            if untouched is logits:
                untouched = logits.clone()
            if self.all_plain(rows.row_list) and not self.masks.loaded:
                token_ids, best = self._first_max(logits)
                return SampleOutput(token_ids, _status(best, best))
            raw_best = logits.amax(-1)
            shaped = logits
            for feature in self._shaping:
                shaped = feature.apply(shaped, rows, state)
            shaped = self.masks.apply(shaped, rows)
            status = _status(raw_best, shaped.amax(-1))
            token_ids = self._choose(shaped, rows, state)
        if wanting is None or untouched is None:
            return SampleOutput(token_ids, status)
        counts = self._logprobs.counts(wanting.batch)
        found = BatchLogprobs(*self._gather_logprobs(untouched, wanting.take(token_ids), max(counts)))
        return SampleOutput(token_ids, status, found, wanting.places, counts)

    def _only_draws(self, row_list: list[int]) -> bool:
        """Whether one kernel does it all, from logits of any type: as it is in recorded steps."""
        if self.draw_table is None or self.masks.loaded:
            return False
        kind = self.recorded_kind(row_list, False)
        return kind is not None and kind.draws and not kind.shapes

    def _draw_all(self, logits: Tensor, rows: SampleRows, state: RowState) -> tuple[Tensor, Tensor]:
        """Tokens [m] int64 within each row's limits, and the highest logits."""
        assert self.draw_table is not None
        parameters = self.draw_table.parameters.index_select(1, rows.rows)
        seeds, positions = state.seeds.index_select(0, rows.rows), output_lengths(rows.rows, state)
        tokens, highest = self._draw_within(logits, parameters, seeds, positions)
        return tokens.to(torch.int64), highest

    def _choose(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        if self.draw_table is not None:
            return self._draw_all(logits, rows, state)[0]
        token_ids = torch.zeros(len(rows.row_list), dtype=torch.int64, device=logits.device)
        selection = self._greedy.select(rows)
        if selection is not None:
            token_ids = selection.put(token_ids, self._first_max(selection.take(logits))[0])
        selection = self._few_candidates.select(rows)
        if selection is not None:
            scaled, seeds, positions = self._prepare(selection.take(logits), selection.batch, state)
            values, candidates = self._top_k_top_p.candidates(scaled, selection.batch)
            token_ids = selection.put(token_ids, draw_of(values, candidates, seeds, positions))
        selection = self._whole_vocabulary.select(rows)
        if selection is not None:
            scaled, seeds, positions = self._prepare(selection.take(logits), selection.batch, state)
            scaled = self._top_k_top_p.apply(scaled, selection.batch, state)
            token_ids = selection.put(token_ids, self._draw(scaled, seeds, positions))
        return token_ids

    def _prepare(self, logits: Tensor, rows: SampleRows, state: RowState) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled logits, seeds and output positions of rows that draw at random."""
        scaled = self._temperature.apply(logits, rows, state)
        scaled = self._min_p.apply(scaled, rows, state)
        return scaled, state.seeds.index_select(0, rows.rows), output_lengths(rows.rows, state)


def _is_simple(params: SamplingParams) -> bool:
    """Whether nothing shapes the logits and no log-probabilities are wanted."""
    shaping = (
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty - 1.0,
        params.min_tokens,
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words_token_ids,
    )
    return not any(shaping) and params.logprobs is None


def error_of(code: int) -> str:
    """Why a row has no token; the code is not 0."""
    return _MESSAGES[code]


def _status(raw_best: Tensor, best: Tensor) -> Tensor:
    """[m] int32, from the highest logit before and after shaping. A NaN anywhere makes the highest NaN."""
    overflow = torch.where(best.isfinite(), 0, _OVERFLOW)
    status = torch.where(best == -torch.inf, _NO_TOKEN, overflow)
    return torch.where(raw_best.isfinite(), status, _BAD_LOGITS).to(torch.int32)
