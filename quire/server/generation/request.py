"""A checked request for text, as every API hands it to `run`: its ids, prompts, parameters and origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from quire.frontend.reading import Reading
from quire.metrics.tracing import TRACE_HEADERS
from quire.server.conversation.prepare import PreparedConversation
from quire.server.generation.fields import GenerationFields, engine_prompt
from quire.server.generation.record import Record, record_of
from quire.server.middleware import is_request_id, request_id_of
from quire.types.beam_search import BeamSearchParams
from quire.types.errors import RequestError
from quire.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Origin:
    """When an HTTP request arrived, the headers that name its trace, and whose it is."""

    arrival_time: float
    """On the monotonic clock."""
    trace_headers: dict[str, str] | None
    tenant: str | None = None
    """Stands for the API key; None where none is asked for."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The answer's id and the engine's. Clients may use an id twice at a time; the engine may not."""

    response: str
    engine: str


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One checked request: what to run and under which name to answer."""

    ids: Ids
    model: str
    prompts: Sequence[dict[str, Any]]
    prompt_field: str
    """What the request calls its prompt."""
    format_field: str | None = None
    """What the request calls the grammar of its answer."""
    params: SamplingParams
    beam_search: BeamSearchParams | None = None
    """The search for the completions, if nothing is sampled."""
    reading: Reading | None = None
    """How the answer is read, where it is more than text."""
    record: Record = field(default_factory=Record)
    """What was said before, after which the outputs go on; they are added to it."""
    turn: int = 0
    """Of the record."""
    priority: int
    add_special_tokens: bool
    origin: Origin

    @property
    def created(self) -> int:
        return self.record.created

    def engine_id(self, prompt: int) -> str:
        """What the engine calls a prompt's request."""
        return self.ids.engine if len(self.prompts) == 1 else f"{self.ids.engine}-{prompt}"


def origin_of(request: Request) -> Origin:
    traced = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    return Origin(request.state.arrival_time, traced or None, request.state.owner or None)


def ids_of(prefix: str, body: GenerationFields, request: Request) -> Ids:
    """Ids made of the request's own id: from its body, from its header, or one that the server chose."""
    name, own = request_id_of(request.scope), bool(request.state.own_request_id)
    if body.request_id is not None:
        if not is_request_id(body.request_id):
            raise RequestError("request_id must be 1 to 128 letters, digits or any of . : / @ + = _ -", "request_id")
        name, own = body.request_id, False
    response_id = f"{prefix}{name}"
    return Ids(response_id, response_id if own else f"{response_id}-{record_of(request).id_suffix}")


def conversation_generation(
    body: GenerationFields,
    prepared: PreparedConversation,
    ids: Ids,
    origin: Origin,
    *,
    model: str,
    prompt_field: str,
    add_special_tokens: bool = False,
    beam_search: BeamSearchParams | None = None,
    record: Record | None = None,
    turn: int = 0,
) -> Generation:
    """The request for the answer to a conversation."""
    return Generation(
        ids=ids,
        model=model,
        prompts=[engine_prompt(body, prepared.prompt)],
        prompt_field=prompt_field,
        format_field=prepared.format_field,
        params=prepared.params,
        beam_search=beam_search,
        reading=prepared.reading,
        priority=body.priority or 0,
        add_special_tokens=add_special_tokens,
        origin=origin,
        record=record or Record(),
        turn=turn,
    )
