"""RestartingClient: an engine process for batches. When it dies or stalls, the next goes on with every open request.

What quire/engine/resuming.py is to a server, with the synchronous face that LLM drives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.control import REPLY_LIMIT
from quire.engine.journal import Journal
from quire.engine.resuming import refused_output
from quire.engine.stalls import STALL_TIMEOUT
from quire.engine.zmq_client import ZmqClient
from quire.types.control import EngineState, LiveLimits, WeightsUpdate
from quire.types.errors import EngineDeadError, EngineError, EngineStartError
from quire.types.messages import EngineInfo, StartupPhase
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase

logger = get_logger(__name__)

_REMEMBERED = frozenset({"set_vocabulary", "set_limits", "set_log_level", "pause", "sleep"})
MAX_RESTARTS = 3  # in a row, of engines that gave no token


class MortalClient(Protocol):
    """A client whose engine may die; ZmqClient is one."""

    @property
    def info(self) -> EngineInfo: ...

    def wait_ready(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def get_outputs(self) -> EngineOutputs: ...

    def has_unfinished(self) -> bool: ...

    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any: ...

    def take_received(self) -> list[EngineOutput]: ...

    def shutdown(self) -> None: ...


class RestartingClient(EngineClient):
    """Launches the first engine when it is made."""

    def __init__(self, launch: Callable[[str | None], MortalClient]) -> None:
        """`launch` starts an engine, with the weights of a folder if they are not those it was made with."""
        self._launch = launch
        self._weights: str | None = None
        self._weights_before: str | None = None  # if those above are not known to fit
        self._journal = Journal()
        self._said: list[EngineOutput] = []  # to be handed out before anything else
        self._told: dict[str, object] = {}  # what a new engine has to be told, by verb
        self._num_deaths = 0  # in a row, without a token between them
        self._client = launch(None)
        try:
            self.info = self._client.wait_ready()
        except EngineError:
            self._client.shutdown()
            raise

    def add_request(self, request: EngineRequest) -> None:
        self._journal.open(request)
        self._submit_waiting()

    def abort(self, request_ids: list[str]) -> None:
        known: list[str] = []
        for name in request_ids:
            entry = self._journal.close(name)
            if entry is not None and entry.is_submitted:
                known.append(name)
            elif entry is not None:
                self._said.append(EngineOutput(name, [], finish_reason="abort"))
        if known:
            self._client.abort(known)
        self._submit_waiting()

    def get_outputs(self) -> EngineOutputs:
        while not self._said:
            try:
                batch = self._client.get_outputs()
            except EngineDeadError as error:
                self._replace(error)
                continue
            outputs = self._journal.take(batch.outputs)
            self._submit_waiting()
            if outputs or not self._journal:
                return EngineOutputs(outputs, batch.stats)
        said, self._said = self._said, []
        return EngineOutputs(said)

    async def get_outputs_async(self) -> EngineOutputs:
        raise EngineError("this engine is driven synchronously; use get_outputs")

    def has_unfinished(self) -> bool:
        return bool(self._journal or self._said) or self._client.has_unfinished()

    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """What an engine has not answered when it dies is asked of the next one."""
        # Before they are done: no crash undoes them. The next engine comes with the new weights, or none comes.
        if verb == "wake":
            self._told.pop("sleep", None)
        elif isinstance(argument, WeightsUpdate):
            self._weights = argument.path
        while True:
            try:
                result = self._client.call(verb, argument, limit=limit)
            except EngineDeadError as error:
                self._replace(error)
            except EngineError:
                self._weights = self._weights_before
                raise
            else:
                self._remember(verb, argument, result)
                return result

    def _remember(self, verb: str, argument: object, result: object) -> None:
        if isinstance(result, EngineState) and result.changing is None:
            self._weights = self._weights if result.error is None else self._weights_before
            self._weights_before = self._weights
        if verb == "set_limits" and isinstance(result, EngineState):
            argument = LiveLimits(result.max_num_seqs, result.max_num_batched_tokens)
        if verb in _REMEMBERED:
            self._told.pop(verb, None)
            self._told[verb] = argument

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        raise EngineError("this engine is driven synchronously; use call")

    def shutdown(self) -> None:
        self._client.shutdown()

    def _submit_waiting(self) -> None:
        for entry in self._journal.to_submit():
            try:
                self._client.add_request(entry.resumed())
            except EngineDeadError:
                return  # whoever asks for outputs next hears of it
            self._journal.note_submitted(entry)

    def _replace(self, error: EngineDeadError) -> None:
        """Take in what the dead engine said last, and launch the next; `error` if that has been tried in vain."""
        while True:
            self._end_life(error)
            logger.warning("%s; another one goes on with %d requests", error, len(self._journal))
            self._client = self._launch(self._weights)
            try:
                self.info = self._client.wait_ready()
                for verb, argument in self._told.items():
                    self._client.call(verb, argument, limit=None)
            except EngineStartError:
                raise
            except EngineDeadError as failed:
                error = failed
            else:
                self._submit_waiting()
                return

    def _end_life(self, error: EngineDeadError) -> None:
        journal = self._journal
        self._said += journal.take(self._client.take_received())
        self._client.shutdown()
        has_progressed, was_trying = journal.has_progressed, journal.is_trying
        refused = journal.end_life()
        self._said += [refused_output(entry, str(error)) for entry in refused]
        if has_progressed or refused:
            self._num_deaths = 0
        elif not was_trying:
            self._num_deaths += 1
        if self._num_deaths > MAX_RESTARTS:
            raise error


def make_process_client(config: EngineConfig, report: ReportPhase) -> EngineClient:
    """Load the model in a process of its own; `report` hears of phases."""

    def on_phase(phase: StartupPhase) -> None:
        report(phase.name, phase.progress)

    def launch(weights: str | None) -> ZmqClient:
        wanted = config if weights is None else config.with_model(weights)
        return ZmqClient(wanted, on_phase=on_phase, stall_timeout=STALL_TIMEOUT)

    return RestartingClient(launch)
