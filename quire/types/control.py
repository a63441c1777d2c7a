"""What control verbs take and tell: the state that an operator has put an engine into."""

from __future__ import annotations

from typing import Literal

import msgspec

OpenRequests = Literal["continue", "drain", "abort"]
"""Requests that are open when weights change: they go on from their tokens, end before, or are ended."""

Change = Literal["sleep", "wake", "update_weights"]


class WeightsUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str  # a model of the same config
    requests: OpenRequests = "continue"


class LiveLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the scheduler; None: as it is. None can be above what the engine was started with."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


class EngineState(msgspec.Struct, frozen=True):
    asleep: int  # the level of its sleep; 0: it is awake
    is_paused: bool
    changing: Change | None  # what goes on and has not ended
    error: str | None  # why the last change was not made
    weights: str  # digest of the weights that were put in place of those it started with; "" until then
    max_num_seqs: int
    max_num_batched_tokens: int


class AdapterState(msgspec.Struct, frozen=True):
    """How far the reading of an adapter is."""

    is_read: bool
    error: str | None = None  # why it cannot be served
    is_away: bool = False  # the engine sleeps, or its weights change
