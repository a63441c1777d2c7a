"""The RoPE types by name. Adding one is a function of the same shape and one line here."""

from __future__ import annotations

from collections.abc import Callable

from quire.layers.rope.frequencies import Frequencies
from quire.layers.rope.parameters import RopeParameters
from quire.utils.registry import Registry

ROPE_TYPES: Registry[Callable[[RopeParameters, int], Frequencies]] = Registry(
    "rope type",
    "quire.layers.rope",
    {
        "default": "frequencies:default",
        "linear": "frequencies:linear",
        "dynamic": "frequencies:dynamic",
        "llama3": "frequencies:llama3",
        "yarn": "frequencies:yarn",
        "longrope": "frequencies:longrope",
    },
)
