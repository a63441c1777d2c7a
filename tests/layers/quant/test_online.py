"""`--quantization int8|int4|fp8|mxfp4`: float weights, experts' too, are rounded and stay packed on both devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.library import unavailable
from quire.layers.quant.base import MatrixSpec
from quire.layers.quant.registry import choose_grouped, choose_method
from quire.layers.quant.rounding import TO_FP8, TO_INT4, TO_INT8, TO_MXFP4, Rounding
from quire.layers.scheme import F32, Scheme, StoredMatrix, float_scheme
from quire.ops.base import Target
from quire.types.errors import ConfigError
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.layers.quant.test_unpacked import stored

needs_library = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")
DEVICES = [pytest.param("cpu", marks=needs_library), pytest.param("cuda", marks=needs_triton)]
BOUNDS = {"int8": 0.01, "int4": 0.12, "fp8": 0.03, "mxfp4": 0.14}  # of the norm of normal numbers
ROUNDINGS = {"int8": TO_INT8, "int4": TO_INT4, "fp8": TO_FP8, "mxfp4": TO_MXFP4}
KEPT = {
    "cpu": {"int8": "code8", "int4": "code4_min", "fp8": "e4m3", "mxfp4": "e2m1"},
    "cuda": {"int8": "int8", "int4": "int4", "fp8": "e4m3", "mxfp4": "e2m1"},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(rounding: Rounding, weight: Tensor) -> Tensor:
    return StoredMatrix(rounding.scheme, tuple(weight.shape), rounding.round(weight)).tensor()


def target_of(device: str, name: str) -> Target:
    return Target(device, quantization=name, activations="float32" if device == "cpu" else "auto")


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_matrix(device: str, name: str) -> None:
    spec = MatrixSpec(128, (64, 32), False, target_of(device, name))
    weights, x = [random(64, 128), random(32, 128, seed=1)], random(5, 128, seed=2)
    with torch.device(DEVICE if device == "cuda" else "cpu"):
        method = choose_method(spec, [F32, F32])
    for piece, weight in enumerate(weights):
        method.load(piece, weight)
    method.finish()
    kept = "fp8" if (device, name) == ("cuda", "fp8") else KEPT[device][name]
    assert method.kept == kept
    assert method.num_bytes == method.planned_bytes([F32, F32]) < 0.3 * 96 * 128 * 4
    found = method.multiply(x.to(DEVICE) if device == "cuda" else x).cpu()
    exact = x @ torch.cat(weights).T
    bound = BOUNDS[name] * (3 if kept == "fp8" else 1.3)  # there activations are rounded too
    assert (found - exact).norm() < bound * exact.norm()
    if kept in ("e4m3", "e2m1", "int8", "int4"):  # the values of the rounding, whatever kernels multiply by them
        expected = x @ torch.cat([rounded(ROUNDINGS[name], weight) for weight in weights]).T
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_experts(device: str, name: str) -> None:
    spec = MatrixSpec(128, (64,), False, target_of(device, name), "experts", "grouped", 2)
    weights, x = random(2, 64, 128), random(3, 2, 128, seed=2)
    with torch.device(DEVICE if device == "cuda" else "cpu"):
        method = choose_grouped(spec, [F32, F32])
    for expert in range(2):
        method.load(expert, 0, weights[expert])
    method.finish()
    assert method.backend == {"cpu": "native", "cuda": "triton"}[device]
    assert method.kept == KEPT[device][name]
    assert method.num_bytes == method.planned_bytes([F32, F32]) < 0.3 * 2 * 64 * 128 * 4
    ids, shares = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32), torch.rand(3, 2)
    where = DEVICE if device == "cuda" else "cpu"
    found = method.down(x.to(where), ids.to(where), shares.to(where)).cpu()
    exact = torch.einsum("nki,nkoi,nk->no", x, weights[ids.long()], shares)
    assert (found - exact).norm() < 1.3 * BOUNDS[name] * exact.norm()


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["gptq", "fp8-block", "Q8_0"])
def test_what_is_quantized_already_is_not_quantized_again(device: str, name: str, scheme: str) -> None:
    from quire.loader.gguf_quants import SCHEMES

    kind: Scheme = SCHEMES[scheme] if scheme in SCHEMES else stored(scheme).scheme
    spec = MatrixSpec(128, (64,), False, target_of(device, name), "up_proj")
    with pytest.raises(ConfigError, match=rf"'{name}', which quantizes float.* quantized already .*{kind.element}"):
        choose_method(spec, [kind]).planned_bytes([kind])
    with pytest.raises(ConfigError, match="quantized already"):
        choose_grouped(replace(spec, role="grouped", count=2), [kind] * 2).planned_bytes([kind] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_with_a_scale_for_each_output_stays_as_it_is(device: str) -> None:
    weight = stored("fp8-channel")
    spec = MatrixSpec(weight.shape[1], (weight.shape[0],), False, target_of(device, "fp8"))
    with torch.device(DEVICE if device == "cuda" else "cpu"):
        method = choose_method(spec, [weight.scheme])
    assert method.planned_bytes([weight.scheme])
    method.load(0, weight)
    method.finish()
    x = random(3, weight.shape[1])
    found = method.multiply(x.to(DEVICE) if device == "cuda" else x).cpu()
    expected = x @ weight.tensor().T
    assert (found - expected).norm() < (0.04 if device == "cuda" else 1e-4) * expected.norm()


@needs_triton
def test_shapes_that_kernels_do_not_take_are_named() -> None:
    spec = MatrixSpec(64, (96,), False, Target("cuda", quantization="fp8"), "experts", "grouped", 2)
    with pytest.raises(ConfigError, match="'fp8' but the experts of experts have 64 inputs and 96 outputs"):
        choose_grouped(spec, [F32, F32])
    odd = choose_method(MatrixSpec(32, (24,), False, Target("cuda", quantization="mxfp4")), [F32])
    assert odd.arithmetic == "unpacked for each matmul", "half a chunk"
    narrow = choose_method(MatrixSpec(32, (24,), False, Target("cuda", quantization="int8"), "up_proj"), [F32])
    with pytest.raises(ConfigError, match="up_proj has 32 inputs, which are no whole groups of 64"):
        narrow.planned_bytes([float_scheme(torch.bfloat16)])


@pytest.mark.parametrize("name", ROUNDINGS)
def test_zeros_and_extremes_stay_finite(name: str) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 3e4
    weight[2, 5] = 1e-20
    assert rounded(ROUNDINGS[name], weight).isfinite().all()
    assert not rounded(ROUNDINGS[name], weight)[0].any()
    assert torch.allclose(rounded(ROUNDINGS[name], weight)[1], weight[1], rtol=0.3)
