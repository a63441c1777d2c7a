"""Quantization methods by name. Adding one is a new file with a `Quantization` and one line here.

Imports no torch: a wrong name is refused before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.types.errors import ConfigError
from quire.utils.registry import Registry

if TYPE_CHECKING:
    from quire.layers.quant.base import GroupedMethod, LinearMethod, MatrixSpec, Quantization
    from quire.layers.scheme import Scheme
    from quire.ops.base import Target

METHODS: Registry[type[Quantization]] = Registry(
    "quantization method",
    "quire.layers.quant",
    {
        "none": "plain:Plain",
        "stored": "packed:Stored",
        "int8": "online:Int8",
        "int4": "online:Int4",
        "fp8": "online:Fp8",
        "mxfp4": "online:Mxfp4",
        "unpacked": "unpacked:Unpacked",
    },
)
_FIXES = {  # what else makes a backend for experts possible
    "native": ", or use a CPU with --quantization stored, int8 or int4",
    "triton": ", or use an NVIDIA GPU",
    "torch": ", or set --quantization none",
}
ROUNDED = ("int16", "int8")  # what activations are rounded to if they are
# What "auto" means: the first of these that does not refuse. "none" never does.
AUTOMATIC = ("stored", "none")


def choose_method(spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
    """How one layer keeps its matrix, as the quantization that its target names decides."""
    return choose_quantization(spec.target).method(spec, schemes)


def choose_grouped(spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
    """How one layer keeps the matrices of its experts."""
    asked = spec.target.moe_backend
    method = choose_quantization(spec.target).grouped(spec, schemes)
    if asked not in ("auto", method.backend):
        raise ConfigError(
            f"moe_backend is {asked!r} but the experts of {spec.path} are multiplied by"
            f" {method.backend} kernels on {spec.target.platform}; leave --moe-backend out{_FIXES[asked]}"
        )
    return method


def choose_quantization(target: Target) -> Quantization:
    """The quantization that the target names; ConfigError if it cannot serve."""
    method = _named(target)
    if target.activations in ROUNDED and not method.rounds_activations:
        raise ConfigError(
            f"activations is {target.activations!r} but weights are kept by {method.name!r}, which multiplies in"
            f" {target.dtype}; leave --activations out, or use a CPU with --quantization stored, int8 or int4"
        )
    return method


def _named(target: Target) -> Quantization:
    if target.quantization == "auto":
        methods = (METHODS.get(name)().on(target) for name in AUTOMATIC)
        return next(method for method in methods if method.refuses(target) is None)
    method = METHODS.get(target.quantization)().on(target)
    reason = method.refuses(target)
    if reason is not None:
        raise ConfigError(f"quantization is {target.quantization!r} but {reason}")
    return method
