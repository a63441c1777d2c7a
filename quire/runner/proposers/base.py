"""Proposer: a drafter with weights. After a step it says what may follow in the rows that the plan names.

It keeps keys and values of its own for the same tokens, in the blocks of the same tables. What it proposes is sampled
as the target samples, with the same noise, so that a proposer that knew the target's logits would always be right.
"""

from __future__ import annotations

from torch import Tensor

from quire.types.step import RowStart, StepPlan, StepResult


class NoProposer:
    """Steps propose nothing."""

    wants_hidden = False
    """Whether `propose` reads the last hidden states of every token of a step."""
    follows = False
    """Whether it hears of every step, before the next one is started."""

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        return None

    def propose(self, plan: StepPlan, result: StepResult, hidden: Tensor | None) -> dict[int, list[int]]:
        """Tokens that may follow in the rows of plan.num_proposals, by index, once a step's result is known.

        The rows stand behind what the step gave. hidden [n or more, width]: what is kept of the step's tokens.
        """
        return {}

    def capture_next(self) -> bool:
        """Capture one more kind of its own steps; False if there is none."""
        return False


def num_valid(plan: StepPlan, result: StepResult, index: int) -> int:
    """How many of the tokens that a step computed of a row are the row's: all but the drafts that did not hold."""
    drafts, tokens = plan.draft_token_ids.get(plan.rows[index], ()), result.token_ids[index]
    return plan.num_tokens[index] - (1 + len(drafts) - len(tokens) if drafts and tokens else 0)
