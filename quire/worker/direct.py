"""DirectModel: one sequence straight through a model, without scheduler or sampling. For `verify` and tests."""

from __future__ import annotations

from torch import Tensor

from quire.config.engine import EngineConfig
from quire.planning.engine_plan import plan_engine
from quire.worker.alone import forward_alone
from quire.worker.worker import bind_caches, load_model


class DirectModel:
    def __init__(self, config: EngineConfig) -> None:
        self._plan = plan_engine(config)
        self._block_size = config.cache.block_size
        self.model = load_model(self._plan, config)
        bind_caches(self._plan, self.model.cached_layers(), self._block_size)
        self.source = self._plan.source
        self.dtype = self._plan.dtype
        self.vocab_size = self._plan.description.vocab_size
        self.max_model_len = self._plan.ledger.max_model_len

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits of every position, in one pass. [len(token_ids), vocab]"""
        hidden = forward_alone(self._plan, self.model, self._block_size, [token_ids])
        return self.model.compute_logits(hidden)
