"""Router and grouped layers: every form in which a checkpoint has experts fills the same matrices, also sliced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.layers.experts import GroupedDown, GroupedGateUp, GroupedLinear, Layout, Router, TokenGate
from quire.layers.linear import QKVParallelLinear
from quire.layers.quant.registry import METHODS
from quire.layers.scheme import F32, Block, Scheme, StoredMatrix, Weight, as_tensor, matrix_of, rows_of
from quire.layers.weights import MappedModule
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.mapper import load_weights
from quire.models.decoder import EXPERT_WEIGHTS
from quire.models.gpt_oss import GptOss
from quire.ops.base import Target
from quire.ops.grouped import grouped_down, grouped_gate_up
from quire.ops.routing import Routing, route
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError, WeightMismatchError

EXPERTS, HIDDEN, WIDTH = 4, 12, 8
GATE, UP = torch.randn(EXPERTS, WIDTH, HIDDEN), torch.randn(EXPERTS, WIDTH, HIDDEN)
DOWN = torch.randn(EXPERTS, HIDDEN, WIDTH)
GATE_BIAS, UP_BIAS, DOWN_BIAS = torch.randn(EXPERTS, WIDTH), torch.randn(EXPERTS, WIDTH), torch.randn(EXPERTS, HIDDEN)
X, IDS, WEIGHTS = (
    torch.randn(5, HIDDEN),
    torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [3, 2]]).int(),
    torch.rand(5, 2),
)
# Each value is its own byte, less 100.
BYTES = Scheme(
    "BYTES", Block(1, 1, lambda data: data.float() - 100, F32, lambda data: {"weight": data.float() - 100})
)


def numbered(weight: Tensor, name: str, kind: str = "weight") -> dict[str, Weight]:
    return {f"experts.{expert}.{name}.{kind}": weight[expert] for expert in range(EXPERTS)}


def turns(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up taking turns along dimension 1."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


NUMBERED = {
    **{**numbered(GATE, "gate_proj"), **numbered(UP, "up_proj"), **numbered(DOWN, "down_proj")},
    **{**numbered(GATE_BIAS, "gate_proj", "bias"), **numbered(UP_BIAS, "up_proj", "bias")},
    **numbered(DOWN_BIAS, "down_proj", "bias"),
}
ALL = {
    **{"experts.all.gate_proj.weight": GATE, "experts.all.up_proj.weight": UP, "experts.all.down_proj.weight": DOWN},
    **{"experts.all.gate_proj.bias": GATE_BIAS, "experts.all.up_proj.bias": UP_BIAS},
    "experts.all.down_proj.bias": DOWN_BIAS,
}
MERGED = {
    "experts.gate_up_proj.weight": torch.cat((GATE, UP), dim=1),
    "experts.gate_up_proj.bias": torch.cat((GATE_BIAS, UP_BIAS), dim=1),
    "experts.down_proj.weight": DOWN,
    "experts.down_proj.bias": DOWN_BIAS,
}
OF_GPT_OSS = {
    "experts.gate_up_proj": turns(GATE, UP).transpose(1, 2).contiguous(),
    "experts.gate_up_proj_bias": turns(GATE_BIAS, UP_BIAS),
    "experts.down_proj": DOWN.transpose(1, 2).contiguous(),
    "experts.down_proj_bias": DOWN_BIAS,
}
OF_LLAMA4 = {
    "experts.gate_up_proj": torch.cat((GATE, UP), dim=1).transpose(1, 2).contiguous(),
    "experts.gate_up_proj_bias": torch.cat((GATE_BIAS, UP_BIAS), dim=1),
    "experts.down_proj": DOWN.transpose(1, 2).contiguous(),
    "experts.down_proj_bias": DOWN_BIAS,
}
FORMS: list[tuple[dict[str, Tensor], Layout]] = [
    (NUMBERED, "rows"),
    (ALL, "rows"),
    (MERGED, "rows"),
    (OF_GPT_OSS, "interleaved_columns"),
    (ALL, "interleaved_columns"),
    (OF_LLAMA4, "columns"),
]


class Experts(MappedModule):
    def __init__(self, layout: Layout, group: ParallelGroup, quantization: str, bias: bool) -> None:
        super().__init__()
        target = Target(quantization=quantization)
        kind = {"bias": bias, "layout": layout, "target": target, "group": group}
        self.weight_map = EXPERT_WEIGHTS if layout == "rows" else GptOss.weight_map
        self.experts = torch.nn.ModuleDict(
            {
                "gate_up_proj": GroupedGateUp(EXPERTS, HIDDEN, WIDTH, "silu", **kind),  # type: ignore[arg-type]
                "down_proj": GroupedDown(EXPERTS, WIDTH, HIDDEN, **kind),  # type: ignore[arg-type]
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        gated = self.experts["gate_up_proj"](x, IDS)
        out: Tensor = self.experts["down_proj"](gated, IDS, WEIGHTS)
        return out


class Given(Checkpoint):
    def __init__(self, weights: dict[str, Weight]) -> None:
        self.config, self.weights = {}, weights

    def tensors(self) -> dict[str, TensorInfo]:
        found = {}
        for name, weight in self.weights.items():
            scheme = weight.scheme if isinstance(weight, StoredMatrix) else None
            found[name] = TensorInfo(tuple(weight.shape), torch.float32, 1, scheme)
        return found

    def get(self, name: str) -> Tensor:
        return as_tensor(self.weights[name])

    def stored(self, name: str) -> Weight:
        return self.weights[name]


def run(weights: dict[str, Weight], layout: Layout, quantization: str = "auto", bias: bool = True) -> Tensor:
    """The sum over two ranks, each with its slice."""
    total = torch.zeros(len(X), HIDDEN)
    for rank in range(2):
        model = Experts(layout, ParallelGroup(rank, 2), quantization, bias)
        load_weights(model, Given(weights))
        total += model(X)
    return total


def expected(bias: bool = True) -> Tensor:
    gate_up, gate_up_bias = torch.cat((GATE, UP), dim=1), torch.cat((GATE_BIAS, UP_BIAS), dim=1)
    gated = grouped_gate_up(X, IDS, gate_up, gate_up_bias if bias else None, "silu")
    return grouped_down(gated, IDS, WEIGHTS, DOWN, DOWN_BIAS if bias else None)


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_every_form_fills_the_same_matrices(form: int, quantization: str) -> None:
    weights, layout = FORMS[form]
    torch.testing.assert_close(run(dict(weights), layout, quantization), expected(), atol=1e-4, rtol=1e-4)


def test_stored_matrices_are_cut_and_picked_in_their_scheme() -> None:
    data = torch.randint(0, 200, (EXPERTS, 2 * WIDTH, HIDDEN), dtype=torch.uint8)
    stored = StoredMatrix(BYTES, (EXPERTS, 2 * WIDTH, HIDDEN), {"weight": data})
    assert torch.equal(as_tensor(stored), data.float() - 100)
    one = matrix_of(stored, 2)
    assert isinstance(one, StoredMatrix)
    assert torch.equal(as_tensor(one), data[2].float() - 100)
    odd = rows_of(one, torch.arange(1, 2 * WIDTH, 2))
    assert isinstance(odd, StoredMatrix)
    assert torch.equal(as_tensor(odd), data[2, 1::2].float() - 100)
    gate, up = (as_tensor(stored)[:, first::2] / 100 for first in (0, 1))
    weights = {"experts.gate_up_proj": stored, "experts.down_proj": DOWN.transpose(1, 2).contiguous()}
    found = run(weights, "interleaved_columns", bias=False)
    gated = grouped_gate_up(X, IDS, torch.cat((gate, up), dim=1) * 100, None, "silu")
    expected = grouped_down(gated, IDS, WEIGHTS, DOWN, None)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("experts.2.up_proj.weight"), r"missing \(1\): experts.2.up_proj.weight"),
        (lambda w: w.update({"experts.4.up_proj.weight": UP[0]}), r"unexpected \(1\): experts.4.up_proj.weight"),
        (lambda w: w.update({"experts.all.up_proj.weight": UP}), r"given twice \(1\): experts.all.up_proj.weight"),
        (
            lambda w: w.update({"experts.1.down_proj.weight": UP[0]}),
            r"experts.1.down_proj.weight \(expected \[12, 8\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_expert(change: object, message: str) -> None:
    weights: dict[str, Weight] = dict(NUMBERED)
    change(weights)  # type: ignore[operator]
    with pytest.raises(WeightMismatchError, match=message):
        load_weights(Experts("rows", ParallelGroup(), "auto", True), Given(weights))


@pytest.mark.parametrize("shape", [(EXPERTS,), (1, EXPERTS)])
def test_the_router_computes_in_float32(shape: tuple[int, ...]) -> None:
    """Whatever the model computes in: near ties would send tokens to other experts."""
    target = Target(dtype=torch.bfloat16)
    router = Router(HIDDEN, EXPERTS, Routing(2), bias=True, choice_bias=True, target=target).allocate()
    weight, bias, choice_bias = torch.randn(EXPERTS, HIDDEN), torch.randn(EXPERTS), torch.rand(EXPERTS)
    router.load("weight", None, weight)
    router.load("bias", None, bias)
    filling = router.filling("choice_bias", None)
    assert filling is not None
    assert shape in filling.shapes
    router.load("choice_bias", None, choice_bias.view(shape))
    router.finish()
    x = X.bfloat16()
    ids, weights = router.choose(x)
    expected = route(x.float() @ weight.t() + bias, choice_bias, Routing(2))
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, HIDDEN), (HIDDEN,)])
def test_a_gate_may_be_stored_as_a_vector(shape: tuple[int, ...]) -> None:
    gate, weight = TokenGate(HIDDEN, target=Target()).allocate(), torch.randn(HIDDEN)
    filling = gate.filling("weight", None)
    assert filling is not None
    assert shape in filling.shapes
    gate.load("weight", None, weight.view(shape))
    gate.finish()
    torch.testing.assert_close(gate(X), X @ weight.view(HIDDEN, 1), atol=1e-5, rtol=1e-5)


def test_interleaved_heads_are_kept_half_a_head_apart() -> None:
    target, dim = Target(quantization="none"), 6
    kind = {"bias": False, "target": target, "group": ParallelGroup()}
    layer = QKVParallelLinear(HIDDEN, 2, 1, dim, interleaved=True, **kind).allocate()  # type: ignore[arg-type]
    weight = torch.randn(4 * dim, HIDDEN)
    layer.load("weight", None, weight)
    layer.finish()
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    q, k, v = weight[: 2 * dim].view(2, dim, HIDDEN), weight[2 * dim : 3 * dim], weight[3 * dim :]
    kept = torch.cat((q[:, order].flatten(0, 1), k[order], v))
    torch.testing.assert_close(layer(X), X @ kept.t(), atol=1e-5, rtol=1e-5)


def test_a_quantization_without_experts_says_so() -> None:
    layer = GroupedDown(EXPERTS, WIDTH, HIDDEN, bias=False, layout="rows", target=Target(), group=ParallelGroup())
    assert isinstance(layer, GroupedLinear)

    class Dense(METHODS.get("none")):  # type: ignore[misc]
        name = "dense"
        grouped = METHODS.get("none").__mro__[1].grouped  # type: ignore[attr-defined]

    layer._target = Target(quantization="dense")
    expected = pytest.raises(ConfigError, match=r"cannot keep the experts of mlp\.down")
    with METHODS.with_entries({"dense": Dense}), expected:
        layer.allocate("mlp.down")
