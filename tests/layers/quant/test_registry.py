from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.library import unavailable
from quire.layers.quant.registry import METHODS, choose_method
from quire.ops.base import Target
from quire.types.errors import ConfigError, UnknownNameError

needs_library = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")


@needs_library
def test_auto_keeps_weights_as_stored_where_there_are_kernels() -> None:
    assert choose_method(Target()).name == "stored"


@pytest.mark.parametrize("target", [Target("elsewhere"), Target(dtype=torch.bfloat16)])
def test_auto_is_plain_elsewhere(target: Target) -> None:
    assert choose_method(target).name == "none"


@pytest.mark.usefixtures("torch_kernels")
def test_without_the_library_auto_is_plain_and_a_name_is_refused() -> None:
    assert choose_method(Target()).name == "none"
    with pytest.raises(
        ConfigError, match=r"quantization is 'int8' but .* could not be built; install a C.. compiler"
    ):
        choose_method(Target(quantization="int8"))


@pytest.mark.parametrize("name", ["stored", "int8", "int4"])
def test_what_a_method_cannot_serve_is_refused_with_the_fix(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization is '{name}' but it runs on cpu, not on elsewhere; leave"):
        choose_method(Target("elsewhere", quantization=name))
    with pytest.raises(ConfigError, match=r"computes in float32, not in torch\.float16; leave --dtype out"):
        choose_method(Target(dtype=torch.float16, quantization=name))


@pytest.mark.parametrize(
    "target", [Target("elsewhere", activations="int16"), Target(quantization="none", activations="int16")]
)
def test_integers_are_refused_where_weights_are_floats(target: Target) -> None:
    with pytest.raises(
        ConfigError, match=r"activations is 'int16' but weights are kept by 'none'.*leave --activations"
    ):
        choose_method(target)


@needs_library
@pytest.mark.parametrize("name", ["stored", "int8", "int4"])
def test_packed_weights_take_integers_if_asked_to(name: str) -> None:
    assert choose_method(Target(quantization=name, activations="int16")).name == name


@needs_library
@pytest.mark.parametrize(("fast", "expected"), [(True, "int16"), (False, "float32")])
def test_what_is_rounded_unasked_is_what_the_processor_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, fast: bool, expected: str
) -> None:
    monkeypatch.setattr("quire.layers.quant.packed.multiplies_integers", lambda: fast)
    assert choose_method(Target()).activations(Target()) == expected


def test_an_unknown_method_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown quantization method 'int3'; known: .*int4, int8, none"):
        choose_method(Target(quantization="int3"))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_name_it_is_registered_under(name: str) -> None:
    assert METHODS.get(name)().name == name
