"""Nemotron-H: each layer is Mamba-2, attention without RoPE, or an MLP of squared ReLUs, dense or of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.layers.experts import GroupedDown, GroupedUp, Router
from quire.layers.fusion import Passed, Stage, whole
from quire.layers.linear import ColumnParallelLinear, Linear, Piece, RowParallelLinear
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, RecurrentConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.dots1 import grouped_experts
from quire.models.kinds import MLP, NONE
from quire.models.mamba2 import MAMBA_NAMES
from quire.models.recurrent import moved
from quire.ops.grouped import ADD_SHARED
from quire.types.errors import ModelError
from quire.types.ledger import EngineSizes, LedgerLine

_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MIXERS = {**dict.fromkeys(("linear_attention", "mamba"), "mamba2"), "full_attention": "attention"}
_MIXERS["attention"] = "attention"


class SquaredReluMLP(MLP):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind: dict[str, Any] = {"bias": config.mlp_bias, "target": ctx.target, "group": ctx.group}
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, **kind)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, **kind)

    def forward(self, hidden: Passed) -> Passed:
        out: Passed = self.down_proj(squared_relu(whole(self.up_proj(hidden))))
        return out


class SquaredReluExperts(MLP):
    """Experts without gates, beside a shared one; they may read and give fewer features than the layer has."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None, "an MLP of experts needs their sizes"
        count, latent = experts.num_experts, experts.latent_width
        kind: dict[str, Any] = {"target": ctx.target, "group": ctx.group}
        self.router = Router(hidden, count, experts.routing, bias=False, choice_bias=True, target=ctx.target)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:  # whole on every rank
            into, out_of = Piece(None, latent, 0, latent), Piece(None, hidden, 0, hidden)
            self.fc1_latent_proj = Linear(hidden, (into,), bias=config.mlp_bias, target=ctx.target)
            self.fc2_latent_proj = Linear(latent, (out_of,), bias=config.mlp_bias, target=ctx.target)
        self.experts = UngatedExperts(
            GroupedUp(count, latent or hidden, experts.width, bias=False, **kind),
            GroupedDown(count, experts.width, latent or hidden, bias=False, layout="rows", **kind),
        )
        self.shared = SquaredReluMLP(replace(config, intermediate_size=experts.shared_width or 0), ctx, layer)
        self._add_shared = ADD_SHARED.bind(ctx.target)

    def forward(self, hidden: Passed) -> Passed:
        x = whole(hidden)
        ids, weights = self.router.choose(x)
        read = x if self.fc1_latent_proj is None else whole(self.fc1_latent_proj(x))
        given: Tensor = self.experts(read, ids, weights)
        routed = given if self.fc2_latent_proj is None else whole(self.fc2_latent_proj(given))
        return self._add_shared(routed, whole(self.shared(x)), None)

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        count = sizes.max_num_batched_tokens
        num_bytes = self.experts.workspace_bytes(count, self.router.routing.top_k)
        yield LedgerLine("experts", num_bytes, f"rows of {count} tokens, one for each of their experts", in_step=True)


class UngatedExperts(Stage):
    def __init__(self, up: GroupedUp, down: GroupedDown) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up, down

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.down_proj(squared_relu(self.up_proj(x, expert_ids)), expert_ids, weights)
        return out

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        up, down, slots = self.up_proj, self.down_proj, num_tokens * top_k
        inside = max(up.method.workspace_bytes(slots, 1), down.method.workspace_bytes(num_tokens, top_k))
        return inside + slots * (up.in_features + 2 * down.in_features) * up.itemsize


def squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0.0).square()


class NemotronH(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.norm_f", "model.norm"),
        ("backbone.layers", "model.layers"),
        ("model.embeddings", "model.embed_tokens"),
        ("model.norm_f", "model.norm"),
        ("mixer.gate", "mlp.router"),
        ("e_score_correction_bias", "choice_bias"),
        *((f"mixer.{name}", f"mlp.{name}") for name in ("experts", "fc1_latent_proj", "fc2_latent_proj")),
        ("mixer.shared_experts", "mlp.shared"),
        *moved("mixer", *MAMBA_NAMES, "q_proj", "k_proj", "v_proj", "o_proj"),
    )

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        norms = [
            (f"layers.{layer}.norm", f"layers.{layer}.{'mlp_norm' if mixer == NONE else 'attn_norm'}")
            for layer, mixer in enumerate(config.mixers)
        ]
        names = [("mixer.up_proj", "mlp.up_proj"), ("mixer.down_proj", "mlp.down_proj")]
        stack = {name: self.weight_map.stack[name] for name in ("qkv_proj", "down_proj")}
        stack["up_proj"] = ("{i}.up_proj", "all.up_proj")
        self.weight_map = replace(self.weight_map.renaming(*norms, *names), stack=stack)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"layer_norm_epsilon": 1e-5, "time_step_min": 0.001})
        pattern = read.get("hybrid_override_pattern") or ""
        types = read.get("layers_block_type") or read.get("layer_types")
        types = types or [_BY_LETTER.get(kind, kind) for kind in pattern]
        unknown = sorted(set(types) - {*_MIXERS, "mlp", "moe"})
        if unknown or not types:
            raise ModelError(
                "layers_block_type (layer_types, hybrid_override_pattern) must name a known kind for each layer;"
                f" it has {', '.join(map(repr, unknown)) or 'no entries'}"
            )
        heads, groups = read["mamba_num_heads"], read["n_groups"]
        count = len(types)
        return read_config(
            {**config, "num_hidden_layers": count, "rms_norm_eps": read["layer_norm_epsilon"]},
            rope=(None,) * count,
            mixers=tuple(_MIXERS.get(kind, NONE) for kind in types),
            mlps=tuple({"mlp": "squared_relu", "moe": "squared_relu_experts"}.get(kind, NONE) for kind in types),
            experts=_experts(read) if "moe" in types else None,
            recurrent=RecurrentConfig(
                conv_width=read["conv_kernel"],
                num_heads=heads,
                num_key_heads=groups,
                key_dim=read["ssm_state_size"],
                value_dim=read["mamba_head_dim"],
                bias=read.flag("mamba_proj_bias"),
                conv_bias=bool(read.get("use_conv_bias", True)),
                eps=read["layer_norm_epsilon"],
                norm_groups=groups,
                dt_limits=(float(read["time_step_min"]), math.inf),
            ),
        )


def _experts(read: ConfigReader) -> ExpertsConfig:
    read = ConfigReader(read, {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 7688})
    if read["n_shared_experts"] != 1:
        raise ModelError(f"n_shared_experts is {read['n_shared_experts']}; Nemotron-H has one, so it must be 1")
    found: ExpertsConfig = grouped_experts(
        {**read, "num_hidden_layers": 0, "mlp_layer_types": None}, norm_topk_prob=True
    )["experts"]
    shared, latent = read["moe_shared_expert_intermediate_size"], read.get("moe_latent_size")
    return replace(found, shared_width=shared, latent_width=latent)
