"""DecoderConfig: what the shared blocks need to know about a decoder-only model, and how to read it from a
Hugging Face config. Architectures differ only in the flags they set here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.layers.experts import Layout
from quire.layers.rope.parameters import QueryTemperature, RopeParameters, context_length, rope_parameters
from quire.ops.routing import Routing
from quire.types.errors import ModelError

HFConfig = Mapping[str, Any]
_BOTH_WAYS = {"attention", "gated_attention", "none"}  # mixers in which a token may see those after it


@dataclass(frozen=True)
class ExpertsConfig:
    """The MLPs of kind "experts"."""

    num_experts: int
    width: int  # of one expert
    routing: Routing
    router_bias: bool = False
    choice_bias: bool = False  # a bias on scores that only the choice of experts sees
    bias: bool = False  # of the experts' own matrices
    activation: str | None = None  # a name in quire/layers/activation.py; None: that of dense MLPs
    shared_width: int | None = None  # of an expert that all tokens go to, beside their own
    shared_gate: bool = False  # whether each token weighs what that one gives
    scales_input: bool = False  # what a token's expert reads is weighted, not what it gives; of one expert only
    layout: Layout = "rows"  # of checkpoint tensors that hold all experts
    identities: int = 0  # further experts that the router knows, each of which gives what it reads
    latent_width: int | None = None  # what experts read is projected to, and what they give from; None: hidden_size

    def __post_init__(self) -> None:
        routing = self.routing
        size, rest = divmod(self.num_experts + self.identities, routing.num_groups)
        limits = routing.top_groups < routing.num_groups
        if rest or not 0 < routing.top_groups <= routing.num_groups or (limits and size < 2):
            raise ModelError(
                f"{self.num_experts} experts cannot be in {routing.num_groups} groups of one size of which "
                f"{routing.top_groups} are used; correct n_group (num_expert_group) and topk_group"
            )
        usable = size * routing.top_groups
        if not 0 < routing.top_k <= usable:
            raise ModelError(
                f"{routing.top_k} experts for each token cannot be chosen of {usable}; correct num_experts_per_tok "
                "(num_experts_per_token, moe_k, moe_topk), num_experts (num_local_experts, n_routed_experts, "
                "moe_num_experts) or n_group"
            )


@dataclass(frozen=True)
class IndexConfig:
    """The sparse indexer of latent attention: it chooses the keys that a query attends to."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved_rope: bool = False
    shared: frozenset[int] = frozenset()  # layers without one, which take the choice of the layer before them


@dataclass(frozen=True)
class LatentConfig:
    """The mixers of kind "latent"."""

    kv_rank: int  # of the compressed keys and values
    q_rank: int | None  # of the compressed queries; None: queries are projected at once
    nope_dim: int  # of a query or key head, without position
    rope_dim: int  # of a query head, and of the key part that all heads share, which are rotated
    value_dim: int
    norm_eps: float = 1e-6  # of the norms of what is compressed
    gated: bool = False  # what each head gives is multiplied by the sigmoid of a gate
    kv_scale: float = 1.0  # on the compressed keys and values behind their norm
    index: IndexConfig | None = None  # None: a query attends to all keys before it

    @property
    def width(self) -> int:
        """Of what is kept of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class RecurrentConfig:
    """The recurrent mixers; what a family does not have is left at its default."""

    conv_width: int = 1  # tokens that the convolution reads
    num_heads: int = 0
    num_key_heads: int = 0  # of keys and queries, each shared by as many heads
    key_dim: int = 0  # of a head's state
    value_dim: int = 0
    bias: bool = False  # of the projections
    conv_bias: bool = False
    eps: float = 1e-6  # of the norm behind the recurrence
    norm: bool = True  # whether there is one
    norm_groups: int = 1
    norm_first: bool = False  # normed, then gated
    dt_rank: int = 0
    dt_norms: float | None = None  # eps of norms on dt, B and C (Mamba)
    dt_norm_weights: bool = True
    dt_limits: tuple[float, float] = (0.0, math.inf)
    gate_rank: int = 0  # Kimi delta attention: of the projections to decays and gates; 0: full rank
    decay_floor: float = 0.0  # the same: below 0, the least exponent of a decay, see ops/recurrent.py
    # Multipliers of Falcon-H1: on parts of the input projection, on results of states and of attention, on gates and
    # results of MLPs. Of MiniMax: on what a recurrent mixer, attention and an MLP read and on what each gives.
    scales: tuple[float, ...] = ()
    beside: tuple[float, ...] = (1.0, 1.0)
    mlp: tuple[float, ...] = (1.0, 1.0)


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    activation: str
    norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int  # tokens the model is meant for, RoPE scaling included
    rope: tuple[RopeParameters | QueryTemperature | None, ...]  # per layer; None: the layer rotates nothing
    sliding_windows: tuple[int | None, ...]  # per layer; None: full attention
    mixers: tuple[str, ...]  # per layer; names in quire/models/kinds.py
    mlps: tuple[str, ...]
    causal: bool = True  # False: tokens see those after them too
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    chunked: bool = False  # windows are chunks: a token sees those of its own, not those that many before it
    qk_norm: Literal["none", "head", "head_rotated", "unit_rotated", "full"] = "none"
    """Over each head, the same after the rotation, that without weights, or over all heads together."""
    interleaved_rope: bool = False  # pairs that are rotated together lie side by side, not half a head apart
    layer_norms: bool = False  # norms of the residual stream subtract the mean and, with norm_bias, have a bias
    norm_bias: bool = True
    embedding_norm: bool = False  # embeddings are normed, and the first layer's mixer reads them as they are
    norms: Literal["pre", "pre_post", "post"] = "pre"  # where attention and MLP are normalized
    norm_weight_offset: float = 0.0
    attention_soft_cap: float | None = None
    attention_sinks: bool = False  # each head has a score of its own that takes a share of the weight
    embedding_scale: float | None = None
    residual_multiplier: float | None = None
    logit_divisor: float | None = None
    logit_soft_cap: float | None = None
    experts: ExpertsConfig | None = None  # of the layers whose MLP is of this kind
    latent: LatentConfig | None = None  # of the layers whose mixer is of this kind
    recurrent: RecurrentConfig | None = None  # of the layers whose mixer is recurrent

    def __post_init__(self) -> None:
        one_way = sorted(set(self.mixers) - _BOTH_WAYS) or (["chunked attention"] if self.chunked else [])
        if not self.causal and one_way:
            raise ModelError(
                f"is_causal is false in the model config, but {one_way[0]} layers read no later tokens; correct it"
            )

    @property
    def num_layers(self) -> int:
        return len(self.rope)


class ConfigReader(dict[str, Any]):
    """A Hugging Face config in which the architecture's defaults stand in for keys that are absent or null."""

    def __init__(self, config: HFConfig, defaults: HFConfig) -> None:
        super().__init__({**defaults, **{key: value for key, value in config.items() if value is not None}})

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"the model config has no {key!r}, which its architecture needs")

    def first(self, *keys: str) -> Any:
        """The value of the first key that the config has, for what configs call by several names."""
        found = next((key for key in keys if key in self), None)
        if found is None:
            raise ModelError(
                f"the model config has no {keys[0]!r} ({', '.join(keys[1:])}), which its architecture needs"
            )
        return self[found]

    def one_of(self, key: str, *known: Any) -> Any:
        """The value of a key, which is one of those that are supported: the first where the config has none."""
        if (value := self.get(key, known[0])) not in known:
            raise ModelError(f"{key} is {value!r} in the model config; supported: {', '.join(map(repr, known))}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.get(key, False))

    @property
    def head_dim(self) -> int:
        hidden_size, num_heads = self["hidden_size"], self["num_attention_heads"]
        size = int(self.get("head_dim") or hidden_size // num_heads)
        if size < 1:
            raise ModelError(f"hidden_size is {hidden_size}, which {num_heads} heads cannot share; correct either")
        return size

    def kinds(self, key: str, types: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
        """What `names` calls the type of each layer, which are as `key` says, or as the architecture has it."""
        unknown = sorted(set(types) - set(names))
        if unknown or len(types) != self["num_hidden_layers"]:
            raise ModelError(
                f"{key} must name one of {', '.join(names)} for each of num_hidden_layers = "
                f"{self['num_hidden_layers']} layers; it has {len(types)} entries"
                f"{''.join(f', among them {name!r}' for name in unknown)}"
            )
        return tuple(names[kind] for kind in types)

    def mixers(self, names: Mapping[str, str], attends: Callable[[int], bool]) -> tuple[str, ...]:
        """`kinds` of the config's layer_types, or by the architecture's rule which layers have full attention."""
        other = next(name for name in names if name != "full_attention")
        layers = range(self["num_hidden_layers"])
        types = self.get("layer_types") or ["full_attention" if attends(layer) else other for layer in layers]
        return self.kinds("layer_types", types, names)

    def layer_types(self, is_sliding: Callable[[int], bool]) -> list[str]:
        """The config's own list, or one made from the architecture's rule for layer i."""
        types = self.get("layer_types") or [
            "sliding_attention" if is_sliding(layer) else "full_attention"
            for layer in range(self["num_hidden_layers"])
        ]
        known = ("sliding_attention", "full_attention")
        return list(self.kinds("layer_types", types, dict(zip(known, known, strict=True))))


def every_layer(layer: int) -> bool:
    """As `is_sliding` of `read_config`."""
    return True


def read_config(
    config: HFConfig,
    *,
    defaults: HFConfig | None = None,
    is_sliding: Callable[[int], bool] | None = None,
    **flags: Any,
) -> DecoderConfig:
    """The common part of every architecture; `flags` are DecoderConfig fields that it sets itself.

    `is_sliding` says which layers slide when the config does not list layer types; None: the architecture has
    no sliding layers.
    """
    read = ConfigReader(config, {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, **(defaults or {})})
    num_layers, num_heads, head_dim = read["num_hidden_layers"], read["num_attention_heads"], read.head_dim
    fields: dict[str, Any] = {
        "vocab_size": read["vocab_size"],
        "hidden_size": read["hidden_size"],
        "intermediate_size": read["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": read.get("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "activation": read.get("hidden_activation") or read.get("hidden_act", "silu"),
        "norm_eps": read["rms_norm_eps"],
        "tied_embeddings": read["tie_word_embeddings"],
        "max_position_embeddings": context_length(read),
        "qkv_bias": read.flag("attention_bias"),
        "o_bias": read.flag("attention_bias"),
        "mlp_bias": read.flag("mlp_bias"),
        "causal": read.get("is_causal", True),
        "sliding_windows": (None,) * num_layers,
        "mixers": ("attention",) * num_layers,
        "mlps": ("gated" if flags.get("experts") is None else "experts",) * num_layers,
        **flags,
    }
    types = ["full_attention"] * num_layers
    if is_sliding is not None and read.get("sliding_window"):
        types = read.layer_types(is_sliding)
        # A window of both directions is counted without the token itself.
        window = int(read["sliding_window"]) + (not read.get("is_causal", True))
        fields["sliding_windows"] = tuple(window if kind == "sliding_attention" else None for kind in types)
    if "rope" not in fields:
        of_type = {kind: rope_parameters(read, head_dim, kind) for kind in set(types)}
        fields["rope"] = tuple(of_type[kind] for kind in types)
    return DecoderConfig(**fields)
