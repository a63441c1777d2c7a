from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

import pytest
import torch

from quire.kernels.cpu.library import unavailable
from quire.layers.quant.base import LinearMethod, MatrixSpec, Quantization
from quire.layers.quant.plain import Plain
from quire.layers.quant.registry import METHODS, choose_grouped, choose_quantization
from quire.layers.scheme import F32, Scheme, float_scheme
from quire.loader.checkpoint import TensorInfo
from quire.loader.mapper import planned_bytes
from quire.models.base import BuildContext
from quire.models.registry import generator_class
from quire.ops.base import Target
from quire.types.errors import ConfigError, UnknownNameError

needs_library = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")


@needs_library
def test_auto_keeps_weights_as_stored_where_there_are_kernels() -> None:
    assert choose_quantization(Target()).name == "stored"


@pytest.mark.parametrize("target", [Target("elsewhere"), Target(dtype=torch.bfloat16)])
def test_auto_is_plain_elsewhere(target: Target) -> None:
    assert choose_quantization(target).name == "none"


@pytest.mark.usefixtures("torch_kernels")
def test_without_the_library_auto_is_plain_and_a_name_is_refused() -> None:
    assert choose_quantization(Target()).name == "none"
    with pytest.raises(
        ConfigError, match=r"quantization is 'int8' but .* could not be built; install a C.. compiler"
    ):
        choose_quantization(Target(quantization="int8"))


@pytest.mark.parametrize("name", ["stored", "int8", "int4"])
def test_what_a_method_cannot_serve_is_refused_with_the_fix(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization is '{name}' but it runs on cpu, not on elsewhere; leave"):
        choose_quantization(Target("elsewhere", quantization=name))
    with pytest.raises(ConfigError, match=r"computes in float32, not in torch\.float16; leave --dtype out"):
        choose_quantization(Target(dtype=torch.float16, quantization=name))


@pytest.mark.parametrize(
    "target", [Target("elsewhere", activations="int16"), Target(quantization="none", activations="int8")]
)
def test_integers_are_refused_where_weights_are_floats(target: Target) -> None:
    with pytest.raises(
        ConfigError, match=r"activations is 'int(16|8)' but weights are kept by 'none'.*leave --activations"
    ):
        choose_quantization(target)


@needs_library
@pytest.mark.parametrize("name", ["stored", "int8", "int4"])
def test_packed_weights_take_integers_if_asked_to(name: str) -> None:
    assert choose_quantization(Target(quantization=name, activations="int16")).name == name


@needs_library
@pytest.mark.parametrize(("fast", "expected"), [(True, "int16"), (False, "float32")])
def test_what_is_rounded_unasked_is_what_the_processor_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, fast: bool, expected: str
) -> None:
    monkeypatch.setattr("quire.layers.quant.packed.multiplies_integers", lambda: fast)
    assert choose_quantization(Target()).activations(Target()) == expected


def test_an_unknown_method_is_named_beside_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown quantization method 'int3'; known: .*int4, int8, mxfp4, none"
    ):
        choose_quantization(Target(quantization="int3"))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_name_it_is_registered_under(name: str) -> None:
    assert METHODS.get(name)().name == name


class ByLayer(Quantization):
    """Notes what it is asked, and keeps all as plain numbers."""

    name = "by_layer"
    asked: ClassVar[dict[str, tuple[str, list[str]]]] = {}

    def refuses(self, target: Target) -> str | None:
        return None

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        self.asked[spec.path] = (spec.role, [scheme.element for scheme in schemes])
        return Plain().method(spec, schemes)


def test_a_method_is_chosen_by_path_role_and_the_schemes_of_the_pieces(
    monkeypatch: pytest.MonkeyPatch, contexts: ExitStack
) -> None:
    contexts.enter_context(METHODS.with_entries({"by_layer": ByLayer}))
    monkeypatch.setattr(ByLayer, "asked", {})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    context = BuildContext(dtype=torch.float32, max_model_len=64, quantization="by_layer")
    with torch.device("meta"):
        model = generator_class(config).from_config(config, context)
    prefix = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head": (32, 16),
        "model.embed_tokens": (32, 16),
        "model.norm": (16,),
        **{f"{prefix}{name}layernorm": (16,) for name in ("input_", "post_attention_")},
        **{f"{prefix}self_attn.{name}_proj": (16, 16) for name in "qkvo"},
        **{f"{prefix}mlp.{name}_proj": (24, 16) for name in ("gate", "up")},
        f"{prefix}mlp.down_proj": (16, 24),
    }
    half = {f"{prefix}self_attn.k_proj", "lm_head"}
    planned_bytes(
        model,
        {
            f"{name}.weight": TensorInfo(shape, torch.bfloat16 if name in half else torch.float32, 4)
            for name, shape in shapes.items()
        },
    )
    f32, bf16 = F32.element, float_scheme(torch.bfloat16).element
    assert ByLayer.asked == {
        "model.embed_tokens": ("table", [f32]),
        f"{prefix}self_attn.qkv_proj": ("linear", [f32, bf16, f32]),
        f"{prefix}self_attn.o_proj": ("linear", [f32]),
        f"{prefix}mlp.gate_up_proj": ("linear", [f32, f32]),
        f"{prefix}mlp.down_proj": ("linear", [f32]),
        "lm_head.projection": ("head", [bf16]),
    }


@needs_library
@pytest.mark.parametrize(
    ("quantization", "backend", "message"),
    [
        ("stored", "native", None),
        ("stored", "triton", "multiplied by native kernels on cpu; leave --moe-backend out, or use an NVIDIA GPU"),
        ("stored", "torch", "or set --quantization none"),
        ("none", "torch", None),
        ("none", "native", "multiplied by torch kernels on cpu; .* --quantization stored, int8 or int4"),
    ],
)
def test_a_backend_for_experts_serves_or_is_refused(quantization: str, backend: str, message: str | None) -> None:
    spec = MatrixSpec(
        *(32, (8, 8), False, Target(quantization=quantization, moe_backend=backend), "mlp.experts", "grouped", 4)
    )
    if message is None:
        assert choose_grouped(spec, [F32] * 8).backend == backend
        return
    with pytest.raises(ConfigError, match=message):
        choose_grouped(spec, [F32] * 8)
