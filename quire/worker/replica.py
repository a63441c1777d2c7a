"""The executor of a replica that shares experts with others: beside its engine's steps it takes part in theirs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch

from quire.config.engine import EngineConfig
from quire.models.experts import ExpertsMLP
from quire.parallel.connect import replica_group
from quire.parallel.expert_exchange import BetweenReplicas
from quire.parallel.replicas import ReplicaCollectives
from quire.types.errors import EngineDeadError
from quire.types.step import StepPlan
from quire.utils.phases import ReportPhase
from quire.worker.executor import refused
from quire.worker.inproc import InProcExecutor, InProcStep
from quire.worker.worker import Worker

_SHARED = "replicas that share experts (--enable-expert-parallel)"
_SOON = 0.002  # seconds after a step in which the engine usually begins the next one


class ReplicaExecutor(InProcExecutor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        self._ranks = ReplicaCollectives(config.parallel.data_parallel_size)
        super().__init__(Worker(config, report, replica_group(config.parallel, self._ranks)))
        assert self._worker.model is not None
        self._layers = [module for module in self._worker.model.modules() if isinstance(module, ExpertsMLP)]
        for number, layer in enumerate(self._layers):
            assert isinstance(layer.experts.exchange, BetweenReplicas)
            layer.experts.exchange.layer = number
        self._has_step, self._ended = False, 0.0
        threads = (config.device.num_threads,)
        threading.Thread(target=self._take_part, args=threads, name="quire-experts", daemon=True).start()

    def execute(self, plan: StepPlan) -> InProcStep:
        self._has_step = True
        step = super().execute(plan)
        self._has_step, self._ended = False, time.perf_counter()
        if step.done() and step.exception() is not None:  # others may be in the midst of it
            self._ranks.fail()
        return step

    def sleep(self, level: int) -> Future[str]:
        return refused(f"{_SHARED} cannot sleep; stop the server to free its memory, and start it again when needed")

    def update_weights(self, path: str) -> Future[str]:
        return refused(f"{_SHARED} cannot update their weights; start the server again with the new weights' folder")

    def is_sticky(self, error: Exception) -> bool:
        return self._ranks.is_broken or super().is_sticky(error)

    def _take_part(self, num_threads: int | None) -> None:
        """In steps of others, while there is none of our own."""
        self._worker.platform.start(num_threads)
        try:
            while True:
                self._ranks.wait()
                while self._ranks.is_behind:
                    self._catch_up()
        except Exception as error:  # whatever it was, all must hear of it
            self._ranks.fail()
            self.failure = EngineDeadError(f"experts cannot be computed for other replicas: {error!r}")
            self.on_failure()

    def _catch_up(self) -> None:
        """Pass the layers with experts once without a token, unless the engine's next step does it."""
        if self._has_step or time.perf_counter() - self._ended < _SOON:
            time.sleep(_SOON / 4)
            return
        with self._turns.step, torch.inference_mode():
            if self._ranks.is_behind:
                for layer in self._layers:
                    layer.experts.take_part(layer.router.routing.top_k, self._worker.plan.context.dtype)
