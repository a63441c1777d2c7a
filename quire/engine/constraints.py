"""Constraints: requests whose output must obey a grammar, and what the core has to do about them.

Holds a request back until its grammar is compiled, so that others pass it; asks for the masks of a step; follows the
outputs, and says which requests end because their grammar does. Knows requests; leaves grammars to quire/structured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from quire.structured.manager import GrammarManager
from quire.types.errors import RequestError
from quire.types.masks import Masks
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import MaskedRow
from quire.types.structured import Vocabulary


class Constraints:
    def __init__(self, manager: GrammarManager | None = None) -> None:
        self._manager = manager or GrammarManager()
        self._held: dict[str, EngineRequest] = {}

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._manager.set_vocabulary(vocabulary)

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when a request need not be held any more."""
        self._manager.on_news = wake

    @property
    def in_use(self) -> bool:
        """Whether any request that may be running has a grammar."""
        return self._manager.in_use

    @property
    def has_news(self) -> bool:
        return self._manager.has_news

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def hold(self, request: EngineRequest) -> None:
        """Keep a request until its grammar is compiled; never blocks."""
        assert request.grammar is not None
        if request.request_id in self._held:
            raise RequestError(
                f"request {request.request_id!r} is already being served; give every request its own id", "request_id"
            )
        self._held[request.request_id] = request
        ignores_eos = isinstance(request.params, SamplingParams) and request.params.ignore_eos
        self._manager.open(request.request_id, request.grammar, ignores_eos=ignores_eos)

    def take_ready(self) -> tuple[list[EngineRequest], list[tuple[str, RequestError]]]:
        """The requests that may run now, and those whose grammar cannot be used."""
        ready: list[EngineRequest] = []
        refused: list[tuple[str, RequestError]] = []
        for news in self._manager.take_compiled():
            request = self._held.pop(news.request_id)
            if news.error is None:
                ready.append(request)
            else:
                refused.append((news.request_id, news.error))
        return ready, refused

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Forget requests; those that are held are answered here."""
        outputs: list[EngineOutput] = []
        for request_id in request_ids:
            self.forget(request_id)
            if self._held.pop(request_id, None) is not None:
                outputs.append(EngineOutput(request_id, [], finish_reason="abort"))
        return outputs

    def forget(self, request_id: str) -> None:
        self._manager.close(request_id)

    def start_masks(self, rows: Sequence[MaskedRow]) -> Future[Masks]:
        """What these rows may say next, a line per sample position. They say nothing more until it is done."""
        return self._manager.start_masks(rows)

    def follow(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Take in what a step said. An output whose grammar allows no more becomes the last of its request.

        Returns the requests that the scheduler does not know to have ended.
        """
        ended: list[str] = []
        for output in outputs:
            reason = output.finish_reason
            if output.token_ids and reason != "error":
                self._advance(output)
                if reason is None and output.finish_reason is not None:
                    ended.append(output.request_id)
            if output.finish_reason is not None:
                self._manager.close(output.request_id)
        return ended

    def shutdown(self) -> None:
        self._manager.shutdown()

    def _advance(self, output: EngineOutput) -> None:
        """Go on over an output; what follows the end of its grammar is cut off: the step sampled that unmasked."""
        tokens = output.token_ids
        # A token that stopped the request is none of the grammar's.
        told = tokens if output.finish_reason in (None, "length") else tokens[:-1]
        if not told:
            return
        state = self._manager.accept(output.request_id, told)
        if state.error is not None:
            output.finish_reason, output.error, output.error_field = "error", state.error, state.error_field
        elif state.is_complete:
            output.finish_reason, output.stop_reason, output.is_complete = "stop", None, True
            output.token_ids = tokens[: state.num_tokens]
            if output.logprobs is not None:
                output.logprobs = output.logprobs[: state.num_tokens]
