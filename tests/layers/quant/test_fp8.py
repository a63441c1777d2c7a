"""Norms, activations and matmuls in fp8: the same whether rows are quantized in one pass or in two."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.activation import gated_activation
from quire.layers.norm import RMSNorm
from quire.layers.quant.base import LinearMethod, MatrixSpec
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.plain import PlainLinear
from quire.ops.base import Target
from quire.ops.fp8 import QuantizedActivations, quantize_rows

WIDTH = 32
TARGET = Target("elsewhere", torch.bfloat16, "fp8")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def filled(kind: type[LinearMethod]) -> LinearMethod:
    method = kind(MatrixSpec(WIDTH, (24, 8), True, TARGET))
    method.load(0, random(24, WIDTH, seed=1))
    method.load(1, random(8, WIDTH, seed=2))
    method.load_bias(0, random(32, seed=3))
    return method


def test_a_norm_before_matmuls_in_fp8() -> None:
    plain, fused = (RMSNorm(WIDTH, eps=1e-5, target=TARGET, weight_offset=1.0) for _ in range(2))
    for layer in (plain, fused):
        layer.load("weight", None, random(WIDTH, seed=4))
    matmul, hidden = filled(Fp8Linear), random(5, WIDTH)
    fused.feed(matmul.accepts)
    for residual in (None, random(5, WIDTH, seed=5)):
        (normed, total), (quantized, same) = plain.merge(hidden, residual), fused.merge(hidden, residual)
        assert isinstance(normed, Tensor)
        assert isinstance(quantized, QuantizedActivations)
        assert torch.equal(total, same)
        assert torch.equal(matmul.multiply_quantized(quantized), matmul.multiply(normed))


def test_an_activation_before_matmuls_in_fp8() -> None:
    gate_up, matmul = random(5, 2 * WIDTH), filled(Fp8Linear)
    for name in ("silu", "gelu_pytorch_tanh"):
        plain = gated_activation(name, TARGET)(gate_up)
        quantized = gated_activation(name, TARGET, Fp8Linear.accepts)(gate_up)
        assert isinstance(plain, Tensor)
        assert isinstance(quantized, QuantizedActivations)
        assert torch.equal(matmul.multiply_quantized(quantized), matmul.multiply(plain))


def test_other_methods_take_quantized_activations_too() -> None:
    x = random(5, WIDTH)
    lines = QuantizedActivations(*quantize_rows(x), x.dtype)
    method = filled(PlainLinear)
    assert not method.accepts
    assert torch.equal(method.multiply_quantized(lines), method.multiply(lines.unpacked()))
    torch.testing.assert_close(lines.unpacked(), x, atol=0.02, rtol=1 / 16)
