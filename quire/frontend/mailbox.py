"""Mailboxes: what a request has said and its reader has not read yet. A slow reader costs no more than the text."""

from __future__ import annotations

import asyncio

from quire.types.errors import QuireError
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.sampling import OutputKind

# Waiting deltas are merged when there are this many: merging each one on arrival would copy the text each time.
_MERGE_AT = 32


class Mailbox:
    """Outputs of one request, oldest first; deltas that wait are merged, newer cumulative outputs replace older."""

    __slots__ = ("__weakref__", "_delta", "_error", "_pending")

    def __init__(self, kind: OutputKind) -> None:
        self._delta = kind == "delta"
        self._pending: list[RequestOutput] = []
        self._error: QuireError | None = None

    def put(self, output: RequestOutput) -> None:
        if not self._delta:
            self._pending.clear()
        elif len(self._pending) >= _MERGE_AT:
            self._pending = [merge_deltas(self._pending)]
        self._pending.append(output)

    def fail(self, error: QuireError) -> None:
        """The request ended with an error; it is raised to the reader after what came before it."""
        self._error = error

    def take(self) -> RequestOutput | None:
        """Everything that waits as one output, None if nothing does; raises the error the request ended with."""
        pending = self._pending
        if pending:
            self._pending = []
            return merge_deltas(pending)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame: without this, both would wait for the collector
        return None

    @property
    def empty(self) -> bool:
        return not self._pending and self._error is None


class AsyncMailbox(Mailbox):
    """A mailbox whose reader can wait. Belongs to the event loop that it is read on."""

    __slots__ = ("_event",)

    def __init__(self, kind: OutputKind) -> None:
        super().__init__(kind)
        self._event = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        super().put(output)
        self._event.set()

    def fail(self, error: QuireError) -> None:
        super().fail(error)
        self._event.set()

    async def get(self) -> RequestOutput:
        """Wait until something is there, and take it."""
        while (output := self.take()) is None:
            self._event.clear()
            await self._event.wait()
        return output


def merge_deltas(pending: list[RequestOutput]) -> RequestOutput:
    """Several deltas of one request, oldest first, merged into one."""
    if len(pending) == 1:
        return pending[0]
    by_index: dict[int, list[CompletionOutput]] = {}
    for output in pending:
        for completion in output.outputs:
            by_index.setdefault(completion.index, []).append(completion)
    last = pending[-1]
    return RequestOutput(
        last.request_id,
        last.prompt,
        last.prompt_token_ids,
        [_merge_completions(by_index[index]) for index in sorted(by_index)],
        last.finished,
        next((o.prompt_logprobs for o in pending if o.prompt_logprobs is not None), None),
        last.metrics,
        last.num_cached_tokens,
    )


def _merge_completions(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    return CompletionOutput(
        last.index,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        last.cumulative_logprob,
        None if last.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        None if last.events is None else [event for part in parts for event in part.events or ()],
        last.num_reasoning_tokens,
        last.num_accepted_predictions,
        last.num_rejected_predictions,
        last.routed_experts,
    )
