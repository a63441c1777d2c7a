from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.embedding import TiedProjection
from quire.layers.linear import Linear
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import Destination, MappedModule, WeightedLayer, WeightMap, empty_parameter
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.dummy import fill_dummy
from quire.loader.mapper import LISTED, count_parameters, load_weights, planned_bytes
from quire.models.base import BuildContext, CausalLM
from quire.models.registry import model_class
from quire.types.errors import WeightMismatchError
from tests.models.architectures import GENERATORS, own_keys
from tests.models.zoo import EXPERT_KEYS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "lm_head.weight": (32, 16),
    "model.embed_tokens.weight": (32, 16),
    **{f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()},
    "model.norm.weight": (16,),
}


class DictCheckpoint(Checkpoint):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.config = CONFIG
        self.data = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        self.reads: list[str] = []

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(x.shape), x.dtype, x.nbytes) for name, x in self.data.items()}

    def get(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.data[name]


def build(dtype: torch.dtype = torch.float32, **keys: Any) -> CausalLM:
    config = {**CONFIG, **keys}
    return model_class(config).from_config(config, BuildContext(dtype=dtype, max_model_len=64, platform="elsewhere"))


def test_every_tensor_is_read_once_in_order_and_lands_where_it_belongs() -> None:
    model, checkpoint, seen = build(), DictCheckpoint(SHAPES), []
    report = load_weights(model, checkpoint, lambda done, total: seen.append((done, total)))
    assert checkpoint.reads == list(SHAPES)
    assert (report.num_tensors, report.ignored) == (len(SHAPES), [])
    assert report.num_bytes == sum(tensor.nbytes for tensor in checkpoint.data.values())
    assert seen == sorted(seen)
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    parameters, data = dict(model.named_parameters()), checkpoint.data
    attention = [data[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(parameters["model.layers.1.self_attn.qkv_proj.method.weight"], torch.cat(attention).t())
    assert torch.equal(
        parameters["model.layers.0.mlp_norm.weight"], data["model.layers.0.post_attention_layernorm.weight"]
    )
    assert torch.equal(parameters["lm_head.projection.method.weight"], data["lm_head.weight"].t())


def test_merged_checkpoint_tensors_fill_all_pieces() -> None:
    shapes = dict(SHAPES)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        for name in "qkv":
            del shapes[f"{prefix}{name}_proj.weight"]
        shapes[f"{prefix}qkv_proj.weight"] = (32, 16)
    model, checkpoint = build(), DictCheckpoint(shapes)
    load_weights(model, checkpoint)
    name = "model.layers.1.self_attn.qkv_proj"
    found = dict(model.named_parameters())[f"{name}.method.weight"]
    assert torch.equal(found, checkpoint.data[f"{name}.weight"].t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_are_converted_to_the_dtype_of_the_model(dtype: torch.dtype, stored: torch.dtype) -> None:
    model, checkpoint = build(dtype), DictCheckpoint(SHAPES, stored)
    load_weights(model, checkpoint)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    expected = checkpoint.data["model.embed_tokens.weight"].to(dtype)
    assert torch.equal(dict(model.named_parameters())["model.embed_tokens.method.weight"], expected)


def test_tied_head_ignores_a_stored_copy_and_inv_freq_by_name() -> None:
    model = build(tie_word_embeddings=True)
    extra = {**SHAPES, "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    report = load_weights(model, DictCheckpoint(extra))
    assert report.ignored == ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert isinstance(model.lm_head.projection, TiedProjection)
    without_head = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert load_weights(build(tie_word_embeddings=True), DictCheckpoint(without_head)).ignored == []


def error_of(shapes: Mapping[str, tuple[int, ...]], **keys: Any) -> str:
    checkpoint = DictCheckpoint(shapes)
    with pytest.raises(WeightMismatchError) as caught:
        load_weights(build(**keys), checkpoint)
    assert checkpoint.reads == [], "nothing is read when the names do not fit"
    return str(caught.value)


def test_missing_tensors_are_listed_under_checkpoint_names() -> None:
    gone = ["lm_head.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"]
    message = error_of({name: shape for name, shape in SHAPES.items() if name not in gone})
    assert "missing (3)" in message
    assert all(name in message for name in gone)
    assert "unexpected" not in message


def test_unexpected_tensors_are_listed() -> None:
    message = error_of({**SHAPES, "model.layers.0.self_attn.q_proj.bias": (16,), "model.layers.9.mlp.x.weight": (1,)})
    assert "unexpected (2): model.layers.0.self_attn.q_proj.bias, model.layers.9.mlp.x.weight" in message


def test_misshapen_tensors_say_expected_and_found() -> None:
    message = error_of({**SHAPES, "model.layers.1.self_attn.k_proj.weight": (16, 8), "model.norm.weight": (17,)})
    assert "model.layers.1.self_attn.k_proj.weight (expected [8, 16], found [16, 8])" in message
    assert "model.norm.weight (expected [16], found [17])" in message
    assert "missing" not in message, "a misshapen tensor is not also missing"


def test_a_parameter_given_twice_is_refused() -> None:
    message = error_of({**SHAPES, "model.layers.0.mlp.gate_up_proj.weight": (48, 16)})
    assert "given twice (1): model.layers.0.mlp.gate_up_proj.weight" in message


def test_long_lists_are_cut() -> None:
    message = error_of({**SHAPES, **{f"extra.{index}.weight": (1,) for index in range(LISTED + 7)}})
    assert "and 7 more" in message
    assert f"extra.{LISTED}.weight" not in message


def test_a_tensor_that_breaks_its_announcement_is_refused() -> None:
    checkpoint = DictCheckpoint(SHAPES)
    announced = checkpoint.tensors()
    checkpoint.tensors = lambda: announced  # type: ignore[method-assign]
    checkpoint.data["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WeightMismatchError, match=r"model.norm.weight was announced as \[16\] but holds \[3\]"):
        load_weights(build(), checkpoint)


@pytest.mark.parametrize("architecture", GENERATORS)
def test_every_parameter_of_every_architecture_has_a_checkpoint_name(architecture: str) -> None:
    """`checkpoint_name` inverts `resolve`, so errors can name what a user would look for."""
    keys = {**EXPERT_KEYS, **own_keys(architecture, CONFIG["num_hidden_layers"])}
    model = build(architectures=[architecture], sliding_window=8, head_dim=4, **keys)
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            for parameter in module.weight_names():
                for piece in module.pieces(parameter):
                    destination = Destination(path, parameter, piece)
                    assert model.weight_map.resolve(model.weight_map.checkpoint_name(destination)) == destination


def test_a_layer_is_finished_once_with_its_last_piece_and_each_tensor_released_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Recording(DictCheckpoint):
        def get(self, name: str) -> Tensor:
            events.append(f"read {name}")
            return super().get(name)

        def release(self, name: str) -> None:
            events.append(f"release {name}")

        def release_all(self) -> None:
            events.append("release all")

    monkeypatch.setattr(Linear, "finish", lambda self: events.append("finish"))
    load_weights(build(), Recording(SHAPES))
    start = events.index("read model.layers.1.self_attn.q_proj.weight")
    kinds = [event.removeprefix("model.layers.1.self_attn.").split()[0] for event in events[start : start + 7]]
    assert kinds == ["read", "release"] * 3 + ["finish"]
    assert events.count("finish") == 2 * 4 + 1
    assert events[-1] == "release all"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_what_a_loaded_model_has(dtype: torch.dtype) -> None:
    checkpoint, model = DictCheckpoint(SHAPES), build(dtype)
    planned = planned_bytes(model, checkpoint.tensors())
    assert planned == planned_bytes(model, None) == sum(parameter.nbytes for parameter in model.parameters())
    assert count_parameters(model) == sum(tensor.numel() for tensor in checkpoint.data.values())
    with pytest.raises(WeightMismatchError, match=r"missing \(1\): model\.norm\.weight"):
        planned_bytes(
            model, {name: info for name, info in checkpoint.tensors().items() if name != "model.norm.weight"}
        )


class GroupedMatrices(WeightedLayer):
    """Gate and up projections of all experts in one parameter [experts, 2 * width, hidden]."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.sizes = (experts, width, hidden)
        self.weight = empty_parameter(experts, 2 * width, hidden, dtype=torch.float32)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        experts, *matrix = self.sizes
        return {f"{i}.{name}": tuple(matrix) for i in range(experts) for name in ("gate_proj", "up_proj")}

    def whole_shape(self, parameter: str) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        if piece is None:
            self.weight.data.copy_(as_tensor(weight))
            return
        expert, name = piece.split(".")
        first = 0 if name == "gate_proj" else self.sizes[1]
        self.weight.data[int(expert), first : first + self.sizes[1]].copy_(as_tensor(weight))


class Experts(MappedModule):
    weight_map = WeightMap(stack={"gate_up_proj": ("{i}.gate_proj", "{i}.up_proj")})

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.gate_up_proj = GroupedMatrices(3, 4, 8)


EXPERTS = {f"experts.{i}.{name}.weight": (4, 8) for i in range(3) for name in ("gate_proj", "up_proj")}


def test_numbered_pieces_fill_one_parameter_of_three_dimensions() -> None:
    model, checkpoint = Experts(), DictCheckpoint(EXPERTS)
    assert planned_bytes(model, checkpoint.tensors()) == 3 * 2 * 4 * 8 * 4
    assert count_parameters(model) == 3 * 2 * 4 * 8
    load_weights(model, checkpoint)
    loaded = model.get_parameter("experts.gate_up_proj.weight")
    for i in range(3):
        for first, name in ((0, "gate_proj"), (4, "up_proj")):
            assert torch.equal(loaded[i, first : first + 4], checkpoint.data[f"experts.{i}.{name}.weight"])


def test_a_checkpoint_may_hold_all_numbered_pieces_at_once() -> None:
    model, checkpoint = Experts(), DictCheckpoint({"experts.gate_up_proj.weight": (3, 8, 8)})
    load_weights(model, checkpoint)
    assert torch.equal(
        model.get_parameter("experts.gate_up_proj.weight"), checkpoint.data["experts.gate_up_proj.weight"]
    )
    fill_dummy(model)
    assert model.get_parameter("experts.gate_up_proj.weight").abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts.1.up_proj.weight": None}, r"missing \(1\): experts\.1\.up_proj\.weight"),
        ({"experts.3.up_proj.weight": (4, 8)}, r"unexpected \(1\): experts\.3\.up_proj\.weight"),
        ({"experts.gate_up_proj.weight": (3, 8, 8)}, r"given twice \(1\): experts\.gate_up_proj\.weight"),
    ],
)
def test_numbered_pieces_are_a_bijection_too(changes: dict[str, tuple[int, ...] | None], message: str) -> None:
    shapes = {name: shape for name, shape in {**EXPERTS, **changes}.items() if shape is not None}
    with pytest.raises(WeightMismatchError, match=message):
        load_weights(Experts(), DictCheckpoint(shapes))
