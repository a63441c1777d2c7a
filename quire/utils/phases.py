"""How long work says what it is doing: a name, and how far it has come where that can be told."""

from __future__ import annotations

from typing import Protocol


class ReportPhase(Protocol):
    def __call__(self, name: str, progress: float | None = None) -> None:
        """Phase `name` begins, or has come as far as `progress` (0 to 1)."""


def ignore_phase(name: str, progress: float | None = None) -> None:
    """Nobody wants to know."""
