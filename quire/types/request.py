"""A request as the engine sees it: tokens and numbers, never text."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.structured import GrammarSource

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


class PromptEmbeds(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that stand for the tokens of a prompt: what the first layer reads, as a plain array."""

    dtype: Literal["float32", "float16", "bfloat16"]
    shape: tuple[int, int]  # tokens, hidden size
    data: bytes  # in C order, little-endian


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter. The digest of its bytes is what it is; name and folder are how people and loaders find it."""

    name: str
    digest: str
    path: str  # of a folder that an operator named
    rank: int = 0  # the highest of its matrices


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Built once by the frontend's input processor; read-only afterwards."""

    request_id: str
    token_ids: list[int]
    """The prompt, then outputs that were generated before: the request goes on after the last of them."""
    params: SamplingParams | PoolingParams
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output unless ignore_eos."""
    seed: int = 0
    """The sampling key, always set: params.seed folded with the child index, or drawn at random."""
    max_tokens: int = 16
    """params.max_tokens after clamping to what the context leaves."""
    grammar: GrammarSource | None = None
    """What the output must obey: params.structured_outputs after checking."""
    num_prompt_tokens: int | None = None
    """How many of token_ids are the prompt; None: all of them."""
    priority: int = 0
    """Smaller runs earlier, under the priority policy."""
    cache_salt: str | None = None
    """Requests with different salts never share cached blocks."""
    tenant: str | None = None
    """Whose request it is: outputs of one tenant are never drafts for another."""
    session: int = 0
    """Stands for the session that it is a part of, whose requests stay in one replica; 0: none."""
    prediction: list[int] = []
    """Tokens that the output is expected to be much like; they are drafts and change nothing else."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings in place of those of the prompt's tokens, which then say nothing."""
    adapter: AdapterRef | None = None
    """What is added to the model's weights for this request."""
    arrival_time: float = 0.0

    @property
    def num_given_outputs(self) -> int:
        """Tokens at the end of token_ids that were generated before."""
        return 0 if self.num_prompt_tokens is None else len(self.token_ids) - self.num_prompt_tokens
