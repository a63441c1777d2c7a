"""The least body of each route of a model that pools."""

from __future__ import annotations

from typing import Any

_RANK = {"query": "Hi", "documents": ["you"]}
_PAIR = {"text_1": "Hi", "text_2": "you"}
POOLING_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/score": _PAIR,
    "/v1/score": _PAIR,
    "/rerank": _RANK,
    "/v1/rerank": _RANK,
    "/v2/rerank": _RANK,
}
