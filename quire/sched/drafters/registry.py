"""Who drafts in an engine: the methods of --speculative-config, and what the settings make of them."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.groups import SpeculativeConfig
from quire.config.speculative import PROPOSING
from quire.sched.draft_lengths import MeasuredLengths
from quire.sched.drafters.forced import Forced, ForcedDrafter
from quire.sched.drafters.prediction import PredictionDrafter
from quire.sched.drafts import Drafter, Drafts, NoDrafts
from quire.sched.step_times import StepTimes
from quire.utils.registry import Registry

DRAFTERS: Registry[Callable[[SpeculativeConfig], Drafter]] = Registry(
    "speculative method",
    "quire.sched.drafters",
    {
        "ngram": "ngram:NgramDrafter",
        "suffix": "suffix:SuffixDrafter",
        "prediction": "prediction:PredictionDrafter",
        **dict.fromkeys(PROPOSING, "proposed:ProposedDrafter"),
    },
)


def make_drafting(config: SpeculativeConfig | None, times: StepTimes, forced: Callable[[str], Forced]) -> NoDrafts:
    """Without settings, what grammars force and the predictions of requests: both cost nothing where there are none.

    `times` is used by nobody else; `forced` tells what a request's grammar leaves no choice about.
    """
    config = config or SpeculativeConfig(method=PredictionDrafter.name)
    if config.method == "none":
        return NoDrafts()
    drafters: list[Drafter] = [ForcedDrafter(forced), PredictionDrafter(config)]
    if config.method != PredictionDrafter.name:
        drafters.append(DRAFTERS.get(config.method)(config))
    return Drafts(*drafters, most=config.num_speculative_tokens, lengths=MeasuredLengths(times))
