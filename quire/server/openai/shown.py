"""What chat and text completions show besides text, if they are asked to: token ids, usage, log-probabilities."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from quire.server.context import ServerContext
from quire.server.generation.usage import UsageCounter
from quire.server.openai.logprobs import LogprobsFormatter
from quire.server.openai.sampling import SamplingFields
from quire.server.openai.usage import Usage, usage_of


class Shown:
    """For the answer to one request. A field that the request names without asking for its content is null."""

    def __init__(self, context: ServerContext, body: SamplingFields, *, with_logprobs: bool) -> None:
        self.with_usage, self._with_every_chunk = body.wants_usage()
        self.names_prompt_logprobs = body.names("prompt_logprobs")
        self._names_token_ids = body.names("return_token_ids")
        self._return_token_ids = bool(body.return_token_ids)
        self.formatter: LogprobsFormatter | None = None
        if with_logprobs:
            self.formatter = LogprobsFormatter(
                context.tokenizer(), bool(body.return_tokens_as_token_ids), body.logprob_token_ids or ()
            )

    @property
    def tokens(self) -> bool:
        """Whether a token without text of its own is shown too, by its id or log-probability."""
        return self.formatter is not None or self._return_token_ids

    def token_ids(self, token_ids: list[int] | None) -> list[int] | UnsetType | None:
        if not self._names_token_ids:
            return UNSET
        return token_ids if self._return_token_ids else None

    def chunk_usage(self, counter: UsageCounter) -> Usage | UnsetType | None:
        """The `usage` of a chunk; the final usage has a chunk of its own."""
        if self._with_every_chunk:
            return usage_of(counter)
        return None if self.with_usage else UNSET
