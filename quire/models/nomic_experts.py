"""Nomic's mixture of experts, the MLP of some layers: no gates, and softmax scores as they are for weights."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.experts import GroupedDown, GroupedLinear, GroupedUp, Router
from quire.layers.fusion import Passed, whole
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import Filling, WeightedLayer, empty_parameter
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, ExpertsConfig
from quire.models.encoder import ACTIVATIONS, GATES, EncoderConfig, EncoderLayer
from quire.models.experts import Activation, Routed, UngatedExperts
from quire.ops.routing import Routing
from quire.types.errors import ModelError

GATED = {"swiglu": "silu", "geglu": "gelu"}


class Flat(GroupedLinear):
    """In checkpoints, the rows of all experts' matrices are one below the other."""

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        count, rows, columns = self.whole_shape(parameter)
        return {None: (count * rows, columns)}

    def filling(self, parameter: str, piece: str | None) -> Filling | None:
        return Filling((self.pieces(parameter)[None],), (None,)) if piece is None else None

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        super().load(parameter, piece, as_tensor(weight).reshape(self.whole_shape(parameter)))


class FlatUp(Flat, GroupedUp):
    pass


class FlatDown(Flat, GroupedDown):
    pass


class BiasedExperts(UngatedExperts, WeightedLayer):
    """One bias is added to what the experts of a token give together."""

    def __init__(self, up: GroupedUp, down: GroupedDown, activation: Activation, bias: nn.Parameter) -> None:
        super().__init__(up, down, activation)
        self.bias = bias

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return whole(super().forward(x, expert_ids, weights)) + self.bias


class NomicExpertsLayer(Routed, EncoderLayer):
    def add_mlp(self, config: EncoderConfig, ctx: BuildContext) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None, "a layer of experts needs their sizes"
        count = experts.num_experts
        self.router = Router(hidden, count, experts.routing, bias=False, choice_bias=False, target=ctx.target)
        up = FlatUp(count, hidden, experts.width, bias=False, **ctx.split)
        down = FlatDown(count, experts.width, hidden, bias=False, layout="columns", **ctx.split)
        act, bias = ACTIVATIONS[config.activation].bind(ctx.target), empty_parameter(hidden, dtype=ctx.dtype)
        self.experts = BiasedExperts(up, down, act, bias) if experts.bias else UngatedExperts(up, down, act)

    def mlp(self, hidden: Tensor) -> Passed:
        return self.experts(hidden, *self.router.choose(hidden))


def read_activation(read: ConfigReader) -> tuple[str | None, str]:
    """(that of a gated MLP, that of one without gates), of which one is read; transformers' key is for gated ones."""
    named, known = read.get("activation_function"), (*GATED, "gelu")
    if named is None:
        named, known = read["hidden_act"], tuple(GATES)
    if named not in known:
        raise ModelError(f"unknown activation {named!r} in the config of an encoder; known: {', '.join(known)}")
    gate = GATED.get(named, named) if read.get("activation_function") in (None, *GATED) else None
    return gate, "gelu"


def read_experts(read: ConfigReader) -> ExpertsConfig | None:
    if not read.get("num_experts"):
        return None
    routing = Routing(read.get("moe_top_k", 1), score="softmax", renormalize=False)
    return ExpertsConfig(read["num_experts"], read["intermediate_size"], routing, bias=read.get("moe_bias", True))
