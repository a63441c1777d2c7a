"""DirectModel: one sequence straight through a model, without scheduler or sampling. For `verify` and tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.layers.experts import NO_TAPE, Replay, Router
from quire.planning.engine_plan import plan_engine
from quire.types.errors import ConfigError
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

    def logits(self, token_ids: list[int], routed_experts: NDArray[np.int16] | None = None) -> Tensor:
        """Logits of every position, in one pass. [len(token_ids), vocab]

        `routed_experts` [len(token_ids), layers with experts, experts of a token] are chosen instead of the routers'
        own choice: what `return_routed_experts` gave for these tokens.
        """
        routers = [module for module in self.model.modules() if isinstance(module, Router)]
        if routed_experts is not None:
            shape = (len(token_ids), len(routers), *{router.routing.top_k for router in routers})
            if routed_experts.shape != shape:
                raise ConfigError(f"routed_experts is {list(routed_experts.shape)}, but must be {list(shape)}")
            for layer, router in enumerate(routers):
                router.tape = Replay(torch.from_numpy(routed_experts[:, layer]), router.routing)
        try:
            hidden = forward_alone(self._plan, self.model, self._block_size, [token_ids])
        finally:
            for router in routers:
                router.tape = NO_TAPE
        return self.model.compute_logits(hidden)
