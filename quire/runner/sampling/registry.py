"""The sampling features that change logits, in the order in which they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.runner.sampling.base import Feature
from quire.runner.sampling.edits import Edits
from quire.runner.sampling.logits_processors import LogitsProcessor, LogitsProcessors
from quire.runner.sampling.penalties import Penalties
from quire.runner.sampling.thinking_budget import ThinkingBudget

MakeFeature = Callable[[int, int, torch.device], Feature]  # vocab_size, max_rows, device

FEATURES: list[MakeFeature] = [Edits, Penalties, ThinkingBudget]


def sampling_features(processors: Sequence[type[LogitsProcessor]]) -> list[MakeFeature]:
    """All features of an engine: those above, then the operator's own logits processors."""
    if not processors:
        return FEATURES
    return [*FEATURES, lambda vocab_size, max_rows, device: LogitsProcessors(processors, vocab_size, device)]
