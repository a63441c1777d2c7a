"""The methods of --speculative-config: some guess from tokens alone, for the others the worker proposes."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.groups import SpeculativeConfig
from quire.config.speculative import PROPOSING
from quire.sched.drafts import Drafter
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
