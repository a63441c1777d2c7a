"""Eager execution: every op is called by the host, at the size of the step. Takes every step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import HostLengths
from quire.platform.transfer import Download, upload
from quire.runner.forward import StepProgram
from quire.runner.inputs import StepInputs
from quire.runner.prompt_logprobs import LogitsHead, PromptLogprobs
from quire.runner.sampling.sampler import SamplingKind
from quire.runner.step import Arriving, PlannedTokens, Sampled, Step


@dataclass(frozen=True)
class Padding:
    """Sizes that eager steps are padded to, where a matmul's bits depend on its number of rows; empty: none."""

    tokens: list[int]
    samples: list[int]
    narrow_above: int | None  # steps of more tokens compute in the last layer only what is sampled from


class Eager:
    name = "eager"
    step_sizes = ()

    def __init__(
        self, program: StepProgram, head: LogitsHead, prompt_logprobs: PromptLogprobs, padding: Padding
    ) -> None:
        self._program, self._head, self._prompt_logprobs, self._padding = program, head, prompt_logprobs, padding

    def capture_next(self) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, step: Step) -> bool:
        program, plan, tokens, shape = self._program, step.plan, step.tokens, step.shape
        above = self._padding.narrow_above
        narrow = above is not None and shape.num_tokens > above and not shape.every_token
        knows = narrow and not shape.places_drafts  # how many tokens come before each sample
        size = padded(shape.num_tokens, self._padding.tokens)
        lengths = HostLengths(plan.num_tokens, tokens.contexts, tokens.attended)
        work = program.backend.divide(lengths)
        wanted = self._wanted(step) if narrow else tokens
        num_samples = len(wanted.samples)
        device, scratch = program.tables.tables.device, program.rows.scratch_row
        inputs = StepInputs(shape.num_rows, num_samples, tuple(map(len, work.lists)), scratch, device)
        inputs.load(plan.rows, wanted, work.lists, shape.places_drafts)
        if shape.places_drafts:
            program.place_drafts(inputs.lists)
        finite = torch.empty(size, dtype=torch.bool, device=device)
        hidden, kept = program.mixed(
            inputs.lists,
            size,
            work.kind,
            finite,
            num_tokens=shape.num_tokens,
            narrow=narrow,
            adapted=shape.adapted,
            lengths=lengths,
            sample_lengths=HostLengths([1] * num_samples, wanted.samples.lengths) if knows else None,
            max_context=max(tokens.contexts),
        )
        step.prompt_logprobs = self._prompt_logprobs.compute(plan, tokens.starts, hidden)
        if shape.every_token or program.taps:
            step.every_hidden = kept[0] if len(kept) == 1 else torch.cat(kept, dim=-1)
        if narrow:
            step.hidden = hidden
        elif shape.num_samples:
            step.hidden = program.select(hidden, inputs.lists.sample_tokens)
        if not shape.is_decode:  # there the sampler finds it out from the logits
            step.finite = Download(finite[: shape.num_tokens])
        return True

    @torch.inference_mode()
    def sample(self, step: Step) -> None:
        program, kind, rows = self._program, step.shape.sampling, step.sample_rows
        assert step.hidden is not None
        device = step.hidden.device
        places = upload(rows, device, torch.int64)
        logits = self._head(step.hidden[: len(rows)], places if kind.adapted else None, not kind.candidates)
        ahead = upload(step.tokens.samples.ahead, device) if kind.drafted else None
        out = program.sampler.sample(kind, logits, places, program.rows, ahead)
        step.sampled = Sampled(Download(out), errors=program.sampler.errors(rows) if kind.eager else {})
        wanted = {} if kind.logprobs is None else program.sampler.wanted_logprobs(rows)
        if wanted:
            asking = upload(list(wanted), device, torch.int64)
            chosen = out[:, 0].index_select(0, asking)
            found = program.sampler.logprobs(logits.index_select(0, asking), chosen, max(wanted.values()))
            step.sampled.logprobs = Download(found)
            step.sampled.places, step.sampled.counts = list(wanted), list(wanted.values())
            step.sampled.lines = range(len(wanted))
        asked = program.sampler.asked_logprobs.wanted(rows) if kind.eager else {}
        if asked:
            step.sampled.asked = Download(program.sampler.asked_logprobs.gather(logits, asked))
            step.sampled.asked_ids = asked

    @torch.inference_mode()
    def go_on(
        self, rows: list[int], hidden: Tensor | None, kind: SamplingKind, count: int
    ) -> tuple[Arriving, Tensor] | None:
        program = self._program
        places = upload(rows, program.rows.token_ids.device, torch.int64)
        attention = program.backend.decode_kind([program.rows.host_num_computed[row] for row in rows], len(rows))
        nothing = torch.zeros_like(places, dtype=torch.int32)
        given = None if hidden is None else hidden[: len(rows)]
        *found, left = program.go_on(places, given, kind, attention, nothing, count)
        return Download(torch.stack(found)), left

    def _wanted(self, step: Step) -> PlannedTokens:
        """The step's tokens with padded samples: of some token if no row samples."""
        count = padded(max(1, len(step.tokens.samples)), self._padding.samples)
        return step.tokens.padded_samples(step.plan, count)


def padded(count: int, ladder: list[int]) -> int:
    """The next size of the ladder; without one, the count itself."""
    return ladder[bisect_left(ladder, count)] if ladder else count
