"""What the runner knows of recorded steps: whether one fits a plan, and how to replay it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.platform.recording import Recorder
from quire.platform.transfer import Download
from quire.types.step import StepPlan
from quire.worker.input_batch import InputBatch, PlannedTokens


class Arriving(Protocol):
    """A result on its way from the device; `get` waits for it."""

    def get(self) -> Tensor | NDArray[np.int32]: ...


class Recorders(NamedTuple):
    """What forward passes share, and what samples, since it reads logits that forward passes leave."""

    forward: Recorder
    sample: Recorder


class StepGraphs(Protocol):
    def takes(self, plan: StepPlan) -> bool:
        """Whether a recorded step can run this plan."""

    def run(self, plan: StepPlan) -> Arriving:
        """Replay; the result, once it has arrived, is [2, n] int32: tokens, and 0 or what was wrong with the logits.

        `error_of` of the sampler says what; further lines are those of BatchLogprobs, where they are wanted.
        """

    def record_next(self) -> bool:
        """Record a step that may come and was not recorded yet; False if there is none."""


class PieceGraphs(Protocol):
    """Recorded steps in two pieces, for those whose sampling waits for masks."""

    def takes(self, plan: StepPlan) -> bool:
        """Whether a recorded step can run this plan."""

    def forward(self, plan: StepPlan) -> None:
        """Replay the model's part. `sample` comes next, when the masks are where it reads them."""

    def sample(self) -> Arriving:
        """Replay the rest; the result is that of StepGraphs.run."""


class PromptGraphs(Protocol):
    """Recorded steps with prompts in them, in two pieces."""

    def forward(self, plan: StepPlan, planned: PlannedTokens) -> Download | None:
        """Replay the model's part; None if the host must run this step.

        The result is [num_tokens] bool: whether each token's values were finite. If any row samples, `sample` comes
        next, for a plan with masks when they are there.
        """

    def sample(self) -> Arriving:
        """Replay the rest; the result is that of StepGraphs.run, of the rows that sample."""

    def record_next(self) -> bool:
        """As in StepGraphs."""


class ForwardGraphs(Protocol):
    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states of a step that fits a recorded size, padded; None if the host must run it.

        Where the batch wants some tokens only, they are of those alone.
        """


class NoForwardGraphs:
    """Every forward pass is launched by the host."""

    def run(self, batch: InputBatch) -> Tensor | None:
        return None


class NoPromptGraphs:
    """Every step with prompts in it is run by the host."""

    def forward(self, plan: StepPlan, planned: PlannedTokens) -> Download | None:
        return None

    def sample(self) -> Arriving:
        raise AssertionError("forward() is always None")

    def record_next(self) -> bool:
        return False


class NoGraphs:
    """Every step is run by the host."""

    def takes(self, plan: StepPlan) -> bool:
        return False

    def run(self, plan: StepPlan) -> Arriving:
        raise AssertionError("takes() is always False")

    def forward(self, plan: StepPlan) -> None:
        raise AssertionError("takes() is always False")

    def sample(self) -> Arriving:
        raise AssertionError("takes() is always False")

    def record_next(self) -> bool:
        return False
