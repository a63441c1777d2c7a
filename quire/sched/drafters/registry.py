"""The methods of --speculative-config that guess tokens from tokens alone, without a model."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.groups import SpeculativeConfig
from quire.sched.drafts import Drafter
from quire.utils.registry import Registry

DRAFTERS: Registry[Callable[[SpeculativeConfig], Drafter]] = Registry(
    "speculative method",
    "quire.sched.drafters",
    {
        "ngram": "ngram:NgramDrafter",
        "suffix": "suffix:SuffixDrafter",
        "prediction": "prediction:PredictionDrafter",
    },
)
