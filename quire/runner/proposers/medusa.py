"""Medusa heads: all tokens are proposed from the hidden state that the last token was sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.drafters.medusa import Medusa
from quire.platform.transfer import Download, upload
from quire.runner.proposers.base import NoProposer, valid_tokens
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.sampler import Sampler
from quire.types.step import StepPlan, StepResult


class MedusaProposer(NoProposer):
    follows = wants_hidden = True

    def __init__(self, model: Medusa, target: RequestRows, rows: RequestRows, sampler: Sampler) -> None:
        """`rows`: where what is proposed is appended, for what samples behind it."""
        self._model, self._target, self._rows, self._sampler = model, target, rows, sampler

    @torch.inference_mode()
    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        assert hidden is not None
        valid = valid_tokens(plan, result)
        # Index -> the token of the step whose hidden state is read.
        asked = {
            index: valid[row][-1] for index, row in enumerate(plan.rows) if row in plan.num_proposals and row in valid
        }
        if not asked:
            return {}
        mine, theirs, device = self._rows, self._target, hidden.device
        rows = [plan.rows[index] for index in asked]
        place = upload(rows, device, torch.int64)
        mine.token_ids[place], mine.numbers[:, place] = theirs.token_ids[place], theirs.numbers[:, place]
        hidden = hidden[upload(list(asked.values()), device, torch.int64)]
        kind = self._sampler.draft_kind(rows, False)
        most = min(max(plan.num_proposals[row] for row in rows), self._model.num_heads)
        given = [
            Download(self._sampler.sample(kind, self._model.logits_ahead(hidden, head), place, mine))
            for head in range(most)
        ]
        found: dict[int, list[int]] = {index: [] for index in asked}
        for sampled in given:
            for (index, tokens), (token, code) in zip(found.items(), sampled.get().tolist(), strict=True):
                if not code and len(tokens) < plan.num_proposals[plan.rows[index]]:
                    tokens.append(token)
        return {index: tokens for index, tokens in found.items() if tokens}
