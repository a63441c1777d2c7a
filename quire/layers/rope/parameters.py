"""RoPE parameters out of a Hugging Face config, old spelling (rope_theta, rope_scaling) or new (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ModelError


@dataclass(frozen=True)
class RopeParameters:
    """Everything that frequencies depend on besides the sequence length. Layers with equal ones share a table."""

    rotary_dim: int
    theta: float
    max_position_embeddings: int
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    mixed_b: float | None = None  # of NTK scaling
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    sections: tuple[int, ...] = ()  # numbers of frequencies that follow one axis of the positions, in turn; none: one

    def required(self, key: str) -> Any:
        value = vars(self)[key]
        if value is None:
            raise ModelError(f"rope type {self.rope_type!r} needs {key!r}, which the model config does not give")
        return value


@dataclass(frozen=True)
class QueryTemperature:
    """What stands in place of a rotation where queries grow with their position instead (Llama-4).

    A query at position p is multiplied by log(1 + floor((p + 1) / floor_scale)) * strength + 1.
    """

    floor_scale: int
    strength: float


DEFAULT_THETA = 10_000.0
_OPTIONAL_KEYS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "mixed_b",
    "low_freq_factor",
    "high_freq_factor",
)


def rope_parameters(config: Mapping[str, Any], head_dim: int, layer_type: str = "full_attention") -> RopeParameters:
    """The parameters of layers of one type; configs without a distinction give all types the same."""
    given = _of_layer_type(config, layer_type)
    rope_type = _rope_type(given)
    max_positions = int(config["max_position_embeddings"])
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    sections = tuple(map(int, given.get("mrope_section") or ()))
    if sections and sum(sections) != int(head_dim * partial) // 2:
        raise ModelError(
            f"mrope_section is {list(sections)}, which is {sum(sections)} frequencies, but heads have"
            f" {int(head_dim * partial) // 2}; correct the model config"
        )
    return RopeParameters(
        rotary_dim=int(head_dim * partial),
        theta=float(given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
        max_position_embeddings=max_positions,
        rope_type=rope_type,
        original_max_position_embeddings=int(original or max_positions) if rope_type in _STRETCHED else None,
        **{key: given[key] for key in _OPTIONAL_KEYS if given.get(key) is not None},
        short_factor=_as_floats(given.get("short_factor")),
        long_factor=_as_floats(given.get("long_factor")),
        sections=sections,
    )


_STRETCHED = ("llama3", "yarn", "longrope")  # types that remember the length before stretching


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens the model is meant for, RoPE scaling included.

    linear and dynamic state the length before scaling, yarn states the original one beside it; llama3, longrope
    and per-layer-type parameters (Gemma3) already put the scaled length in max_position_embeddings.
    """
    length = int(config["max_position_embeddings"])
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in given or config.get("rope_local_base_freq") is not None:
        return length
    rope_type, factor = _rope_type(given), float(given.get("factor") or 1.0)
    if rope_type in ("linear", "dynamic"):
        return int(length * factor)
    if rope_type == "yarn":
        return max(length, int((given.get("original_max_position_embeddings") or length) * factor))
    return length


def choice_by_length(rope: RopeParameters, max_model_len: int) -> str | None:
    """What to say of frequencies that transformers chooses by each sequence's own length; None if they are not."""
    trained = {
        "dynamic": rope.max_position_embeddings,
        "longrope": rope.original_max_position_embeddings,
    }.get(rope.rope_type)
    if trained is None or max_model_len <= trained:
        return None
    return (
        f"RoPE type {rope.rope_type!r}: every sequence is rotated as one of max_model_len = {max_model_len} tokens,"
        f" so that cached prefixes serve sequences of any length; transformers rotates one of up to {trained} tokens"
        f" otherwise. If none will be longer, set --max-model-len {trained}"
    )


def _of_layer_type(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local_theta = config.get("rope_local_base_freq")
    if layer_type == "sliding_attention" and local_theta is not None:
        # Gemma3: the sliding layers have a base of their own, and rope_scaling is not about them.
        return {"rope_theta": local_theta, **(given.get(layer_type) or {})}
    if layer_type in given:
        return given[layer_type] or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(f"rope_parameters has no entry for {layer_type!r}; it has: {', '.join(given)}")
    return given


def _rope_type(given: Mapping[str, Any]) -> str:
    rope_type = str(given.get("rope_type") or given.get("type") or "default")
    # Early Phi-3 configs called longrope "su" or "yarn"; only longrope has one factor per frequency.
    if rope_type == "su" or given.get("short_factor"):
        return "longrope"
    return "default" if rope_type == "mrope" else rope_type  # which is about sections, not frequencies


def _as_floats(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
