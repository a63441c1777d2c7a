"""Float weights are quantized while they are loaded: `--quantization int8|int4|fp8|mxfp4`, with experts, on CPUs and
GPUs. Embeddings, heads and routers stay floats, but for int8 and int4 on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from quire.layers.quant.base import LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.packed import Stored
from quire.layers.quant.packed_weights import PackedWeights
from quire.layers.quant.rounding import TO_FP8, TO_INT4, TO_INT8, TO_MXFP4
from quire.layers.scheme import Scheme
from quire.ops.base import Target
from quire.ops.fp8 import LINEAR_FP8


class Int8(Stored):
    """Integers of 8 bits with a scale for each 32 of them, or for each 64 on GPUs."""

    name = "int8"
    storage = table_storage = "int8"
    rounding = TO_INT8


class Int4(Stored):
    """Integers of 4 bits with a scale and a minimum for each 32; tables and heads, which suffer most, have 8 bits."""

    name = "int4"
    storage, table_storage = "int4", "int8"
    rounding = TO_INT4


class Mxfp4(Stored):
    """Floats of 4 bits with a power of two for each 32. Without kernels they are unpacked for each matmul."""

    name = "mxfp4"
    storage = rounding = TO_MXFP4

    def on(self, target: Target) -> Quantization:
        return self if self.refuses(target) is None else PackedWeights(self.name, self.rounding)


class Fp8(Stored):
    """Floats of 8 bits (E4M3) with a scale for each output."""

    name = "fp8"
    storage = rounding = TO_FP8

    def on(self, target: Target) -> Quantization:
        return self if self.refuses(target) is None else Fp8Matmuls()


class Fp8Matmuls(PackedWeights):
    """On GPUs activations are quantized as they come, and multiplied as fp8; those of experts are not."""

    def __init__(self) -> None:
        super().__init__("fp8", TO_FP8)

    def refuses(self, target: Target) -> str | None:
        platforms = sorted({name for kernels in LINEAR_FP8.implementations for name in kernels.platforms})
        if target.platform not in platforms:
            return f"it runs on {', '.join(platforms)}, and on cpu in float32 with a C++ compiler; leave it out"
        *_, reason = (implementation.refuses(target) for implementation in LINEAR_FP8.implementations)
        return None if reason is None else f"{reason}; leave --quantization out"

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        return Fp8Linear(spec) if spec.role == "linear" else super().method(spec, schemes)
