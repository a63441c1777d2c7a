"""Metadata of GGUF files, and keys of configs that several architectures have."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.loader.config_schema import MAX_EXPERTS
from quire.loader.gguf_file import GgufFile
from quire.types.errors import CheckpointError


class GgufKeys:
    """Metadata of one architecture: keys are given without their "llama." prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return shortest(self.file.metadata.get(f"{self.architecture}.{key}"))

    def count(
        self, key: str, default: int | None = None, at_most: int | None = None, *, skips_zero: bool = False
    ) -> int:
        """A positive whole number, required if it has no default; given per layer, it must be the same for all.

        `skips_zero`: layers may have none.
        """
        value = self.get(key)
        values = value if isinstance(value, list) and value else [value]
        if skips_zero:
            values = [each for each in values if each != 0] or values
        if any(other != values[0] for other in values):
            raise self.wrong(key, values, "the same for all layers: such models are not supported")
        number = self._or_default(key, values[0], default)
        if not isinstance(number, int) or number < 1:
            raise self.wrong(key, number, "a positive whole number")
        if at_most is not None and number > at_most:
            raise self.wrong(key, number, f"at most {at_most}")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """A number, required if it has no default."""
        value = self._or_default(key, self.get(key), default)
        if not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._or_default(key, self.get(key), default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def _or_default(self, key: str, value: Any, default: Any) -> Any:
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{self.file.path} has no metadata key {self.architecture}.{key}, which a model of this "
                f"architecture needs; convert the model again"
            )
        return default

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key} is {value!r}; it must be {expected}")

    def floats(self, tensor_name: str) -> list[float] | None:
        """A small float32 tensor such as a table of rope factors; None if the file has none."""
        tensor = self.file.tensors.get(tensor_name)
        if tensor is None:
            return None
        if tensor.type != "F32":
            raise CheckpointError(f"{self.file.path}: {tensor_name} has type {tensor.type}; it must be F32")
        return [shortest(value) for value in self.file.data(tensor).view(np.float32).tolist()]


def shortest(value: Any) -> Any:
    """A float32 widened to Python's float, as the shortest decimal that means it: 1e-05, not 9.9999997e-06."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def experts(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "num_local_experts": keys.count("expert_count", at_most=MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length", config["intermediate_size"]),
    }


def experts_alone(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Of models without dense layers, whose config calls the width of an expert intermediate_size."""
    experts(keys, config)
    config["intermediate_size"] = config["moe_intermediate_size"]


def granite(keys: GgufKeys, config: dict[str, Any]) -> None:
    config |= {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale"),  # both sides divide the logits by it
    }
