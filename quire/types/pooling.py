"""PoolerConfig: how a model's hidden states become vectors or classes, and what its folder says of texts."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.types.sampling import Activation, PoolingKind, PoolingTask

HeadActivation = Literal["tanh", "relu", "gelu"]
ScoreKind = Literal["cross", "cosine", "late"]


class HeadLayer(msgspec.Struct, frozen=True, array_like=True):
    """A linear layer on top of a model, with what comes behind it."""

    source: str  # what a checkpoint calls it
    in_size: int
    out_size: int
    bias: bool = True
    activation: HeadActivation | None = None
    norm: str | None = None  # what a checkpoint calls the layer norm behind the activation
    norm_eps: float = 1e-12
    norm_bias: bool = True
    tied: bool = False  # its matrix is the table of token embeddings


Heads = dict[str, tuple[HeadLayer, ...]]


class Classifier(msgspec.Struct, frozen=True, array_like=True):
    """What an architecture has on top to classify prompts (or, with kind `all`, their tokens)."""

    kind: PoolingKind
    layers: tuple[HeadLayer, ...]
    rewards: bool = False  # its values are rewards, which no activation belongs to


class PoolerConfig(msgspec.Struct, frozen=True, array_like=True):
    kind: PoolingKind
    size: int  # of a vector
    normalize: bool = True
    prompts: dict[str, str] = {}  # by name: what is put before a text
    default_prompt: str | None = None  # the name of the one that is put before texts that name none
    max_tokens: int | None = None  # of a text, where the folder says less than the model takes
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")  # the first is the one it is for
    heads: Heads = {}  # by name: what is on top of the model
    labels: tuple[str, ...] = ()  # of classes, in the order of their values
    activation: Activation = "softmax"  # of classes
    label_tokens: tuple[str, ...] = ()  # classes are these tokens of the vocabulary, and the head is the LM head
    score: ScoreKind | None = "cosine"  # how it compares two texts
    score_template: str | None = None  # a pair as one text, with {instruction}, {query} and {document}
    query_prefix: str = ""  # of multi-vector models: what is put before a query, and before a document
    document_prefix: str = ""
    query_length: int | None = None  # the same: queries with fewer tokens are filled up with mask tokens
    attends_to_masks: bool = True  # the same: whether tokens attend to these
    skiplist: tuple[str, ...] = ()  # the same: tokens of documents that have no vector
    dimensions: tuple[int, ...] | None = None  # sizes that vectors may be cut to; None: any
    skips_first: bool = False  # of vectors of tokens: none of the special token before a text
    generates: bool = False  # text too: its vectors are beside that


def only_pools(pooler: PoolerConfig | None) -> bool:
    """Whether a model with this pooler (None: it has none) generates nothing."""
    return pooler is not None and not pooler.generates


def able_tasks(pooler: PoolerConfig | None) -> tuple[Literal["generate"] | PoolingTask, ...]:
    """What such a model can do, the first being what it is for."""
    if pooler is None:
        return ("generate",)
    return ("generate", *pooler.tasks) if pooler.generates else pooler.tasks
