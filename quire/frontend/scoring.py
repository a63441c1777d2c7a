"""Scores of pairs of texts: which prompts have to be pooled for them, and what is made of the results.

A cross-encoder reads both texts of a pair at once; embedders and multi-vector models read each text by itself, so a
text that is in several pairs is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.types.errors import RequestError, WrongTaskError
from quire.types.pooling import PoolerConfig, ScoreKind, able_tasks
from quire.types.sampling import PoolingTask

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PLACES = re.compile(r"\{(instruction|query|document)\}")


class TextPair(NamedTuple):
    """A prompt of two texts, which a cross-encoder compares."""

    query: str
    document: str
    instruction: str | None = None

    def filled(self, template: str) -> tuple[str, str, str]:
        """What a template makes of it: before the document, the document, and behind it."""
        values = {
            "instruction": self.instruction or DEFAULT_INSTRUCTION,
            "query": self.query,
            "document": self.document,
        }
        before, _, behind = template.partition("{document}")
        first, last = (_PLACES.sub(lambda found: values[found[1]], part) for part in (before, behind))
        return first, self.document, last


class LateText(NamedTuple):
    """A prompt of a multi-vector model, of which it reads queries and documents each in its own way."""

    text: str
    is_document: bool

    def marked(self, pooler: PoolerConfig) -> str:
        return (pooler.document_prefix if self.is_document else pooler.query_prefix) + self.text


Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ScorePlan:
    """Prompts to be pooled, and which of them each score is made of."""

    kind: ScoreKind
    task: PoolingTask
    prompts: list[str | TextPair | LateText]
    pairs: list[tuple[int, int]]  # indices into prompts; of a cross-encoder both are the same

    def scores(self, values: Sequence[Vectors]) -> list[float]:
        """Of each pair, from what was pooled of each prompt."""
        if self.kind == "cross":
            return [float(values[at][0]) for at, _ in self.pairs]
        compare = cosine if self.kind == "cosine" else max_sim
        return [compare(values[first], values[second]) for first, second in self.pairs]


def plan_scores(
    pooler: PoolerConfig | None, queries: Sequence[str], documents: Sequence[str], instruction: str | None = None
) -> ScorePlan:
    """Score each query beside its document; one query goes with all documents."""
    if pooler is None or pooler.score is None:
        raise WrongTaskError("score", able_tasks(pooler))
    if not queries or not documents:
        raise RequestError("there is nothing to score; give a query and at least one document", "documents")
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{len(queries)} queries for {len(documents)} documents; give one query, or one for each document",
            "queries",
        )
    if len(queries) == 1:
        queries = [queries[0]] * len(documents)
    if pooler.score == "cross":
        pairs = [TextPair(query, document, instruction) for query, document in zip(queries, documents, strict=True)]
        return ScorePlan("cross", "classify", list(pairs), [(at, at) for at in range(len(pairs))])
    if instruction is not None:
        raise RequestError("instruction is for rerankers that have a place for it; leave it out", "instruction")
    is_late = pooler.score == "late"
    first: list[str | LateText] = [LateText(query, False) if is_late else query for query in queries]
    second: list[str | LateText] = [LateText(document, True) if is_late else document for document in documents]
    places: dict[str | LateText, int] = {}
    for text in (*first, *second):
        places.setdefault(text, len(places))
    found = [(places[query], places[document]) for query, document in zip(first, second, strict=True)]
    return ScorePlan(pooler.score, "embed" if pooler.score == "cosine" else "token_embed", list(places), found)


def cosine(first: Vectors, second: Vectors) -> float:
    """Of two vectors [size]."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / lengths if lengths else 0.0


def max_sim(query: Vectors, document: Vectors) -> float:
    """Late interaction: for each token of the query the best of the document's, [tokens, size] both, added up."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(1).sum())


def ranked(scores: Sequence[float], top: int | None = None) -> list[int]:
    """Indices of the best scores first; of equal ones, the earlier first."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return order if top is None else order[:top]
