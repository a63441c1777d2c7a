"""Constraints: requests whose output must obey a grammar, and what the core has to do about them.

A request is parked until its grammar is compiled. From then on: the masks of a step, following the outputs, and
saying which requests end because their grammar does. Knows requests; leaves grammars to quire/structured.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from quire.structured.base import Grammar
from quire.structured.manager import GrammarManager
from quire.types.errors import RequestError
from quire.types.masks import Masks
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import MaskedRow
from quire.types.structured import Vocabulary


class Constraints:
    """A condition of parked requests, and a collaborator of the core."""

    name = "grammar"

    def __init__(self, manager: GrammarManager | None = None) -> None:
        self._manager = manager or GrammarManager()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._manager.set_vocabulary(vocabulary)

    @property
    def in_use(self) -> bool:
        """Whether any request that may be running has a grammar."""
        return self._manager.in_use

    def applies(self, request: EngineRequest) -> bool:
        return request.grammar is not None

    def begin(self, request: EngineRequest) -> Future[Grammar]:
        assert request.grammar is not None
        return self._manager.compile(request.grammar)

    def take(self, request: EngineRequest, grammar: Grammar) -> None:
        """Start at the end of the request's known tokens: of its outputs, if it had any before."""
        assert request.grammar is not None
        ignores_eos = isinstance(request.params, SamplingParams) and request.params.ignore_eos
        self._manager.open(request.request_id, request.grammar.kind, grammar, ignores_eos=ignores_eos)
        if request.num_given_outputs:
            state = self._manager.accept(request.request_id, request.token_ids[request.num_prompt_tokens :])
            if state.error is not None:
                raise RequestError(f"its outputs do not fit its grammar: {state.error}", state.error_field)
            if state.is_complete:
                raise RequestError("it has ended: its grammar allows nothing after its outputs", "token_ids")

    def forget(self, request_id: str) -> None:
        self._manager.close(request_id)

    def start_masks(self, rows: Sequence[MaskedRow]) -> Future[Masks]:
        """What these rows may say next, a line per sample position. They say nothing more until it is done."""
        return self._manager.start_masks(rows)

    def follow(self, outputs: list[EngineOutput]) -> list[str]:
        """Take in what a step said. An output whose grammar allows no more is replaced by the last of its request.

        Returns the requests that the scheduler does not know to have ended.
        """
        ended: list[str] = []
        for index, output in enumerate(outputs):
            reason = output.finish_reason
            if output.token_ids and reason != "error":
                outputs[index] = last = self._advanced(output)
                if reason is None and last.finish_reason is not None:
                    ended.append(output.request_id)
        return ended

    def shutdown(self) -> None:
        self._manager.shutdown()

    def _advanced(self, output: EngineOutput) -> EngineOutput:
        """Go on over an output; what follows the end of its grammar is cut off: the step sampled that unmasked."""
        tokens = output.token_ids
        # A token that stopped the request is none of the grammar's.
        told = tokens if output.finish_reason in (None, "length") else tokens[:-1]
        if not told:
            return output
        state = self._manager.accept(output.request_id, told)
        if state.error is not None:
            return msgspec.structs.replace(
                output, finish_reason="error", error=state.error, error_field=state.error_field
            )
        if not state.is_complete:
            return output
        logprobs = None if output.logprobs is None else output.logprobs[: state.num_tokens]
        return msgspec.structs.replace(
            output,
            finish_reason="stop",
            stop_reason=None,
            is_complete=True,
            token_ids=tokens[: state.num_tokens],
            logprobs=logprobs,
        )
