"""The sparse MLP: a router chooses experts for each token; their results are added up, a shared one's too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.activation import activation_in_matmul
from quire.layers.adapters import ExpertAdapters
from quire.layers.experts import GroupedDown, GroupedGateUp, GroupedKind, GroupedUp, Router, TokenGate, expert_slots
from quire.layers.fusion import ROWS, Form, Forms, Passed, Stage, on_rows, whole
from quire.layers.quant.base import Joined
from quire.models.base import BuildContext
from quire.models.blocks import GatedMLP
from quire.models.config import DecoderConfig, ExpertsConfig
from quire.models.kinds import MLP
from quire.ops.grouped import ADD_SHARED
from quire.ops.routing import COUNT_EXPERTS, LOCAL_EXPERTS
from quire.ops.scale import SCALE_ROWS
from quire.parallel.expert_exchange import EXCHANGES, BetweenReplicas, SlotShares
from quire.types.ledger import EngineSizes, LedgerLine

Activation = Callable[[Tensor], Tensor]
COPIES_CYCLE = 60  # tokens in which copies of an expert take turns: as often, if there are up to 6 of them


class Routed(Stage):
    """A router and its experts."""

    router: Router
    experts: Experts | UngatedExperts

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        count = sizes.max_num_batched_tokens
        num_bytes = self.experts.workspace_bytes(count, self.router.routing.top_k)
        yield LedgerLine("experts", num_bytes, f"rows of {count} tokens, one for each of their experts", in_step=True)


class ExpertsMLP(Routed, MLP):
    experts: Experts

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        experts = config.experts
        assert experts is not None, "an MLP of experts needs their sizes"
        self.router = Router(
            config.hidden_size,
            experts.num_experts + experts.identities,
            experts.routing,
            bias=experts.router_bias,
            choice_bias=experts.choice_bias,
            target=ctx.target,
        )
        self.experts = Experts(config, experts, ctx)
        self.shared = self.shared_gate = None
        if experts.shared_width is not None:
            self.shared = GatedMLP(replace(config, intermediate_size=experts.shared_width), ctx, layer)
        if experts.shared_gate:
            self.shared_gate = TokenGate(config.hidden_size, target=ctx.target)
        self._scales_input = experts.scales_input
        self._num_real = experts.num_experts if experts.identities else None
        self._scale_rows = SCALE_ROWS.bind(ctx.target)
        self._add_shared = ADD_SHARED.bind(ctx.target)
        self._takes_shared = False  # whether the experts' kernels compute the shared one too
        self._is_alike = experts.activation in (None, config.activation) and not experts.shared_gate

    def feed(self, accepted: Forms) -> None:
        if self._num_real is not None:
            return
        self.experts.down_proj.feed(accepted)
        if self.shared is None:
            self.experts.feed(accepted)
            return
        self.shared.feed(accepted & ROWS)
        if Form.PARTIAL_SUMS in accepted and self._is_alike and not self._scales_input:
            self._takes_shared = self.experts.take_shared(self.shared)

    def forward(self, hidden: Passed) -> Passed:
        x = whole(hidden)
        routed: Passed = self._routed(x)
        if self.shared is None or self._takes_shared:
            return routed
        gate = None if self.shared_gate is None else whole(self.shared_gate(x))
        return on_rows(self._add_shared, routed, self.shared(x), gate)

    def _routed(self, x: Tensor) -> Passed:
        if self._num_real is not None:
            ids, weights = self.router.choose(x)
            is_real = ids < self._num_real
            given = whole(self.experts(x, ids.where(is_real, 0), weights.where(is_real, 0.0)))
            kept = weights.where(~is_real, 0.0).sum(-1, keepdim=True)
            return (given.float() + x.float() * kept).to(x.dtype)
        if not self._scales_input:
            return self.experts(x, *self.router.choose(x))
        expert_ids, factors, ones = self.router.choose_one(x)
        routed = self.experts(self._scale_rows(x, factors, x.shape[1]), expert_ids, ones)
        return routed


class Experts(Stage):
    """The experts themselves."""

    __call__: Callable[..., Passed]
    places: Tensor  # [num_experts, cycle] int32: the slots of each, see ops/routing.py
    load: Tensor  # [num_experts] int64: slots of tokens since the start, where they are counted

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, ctx: BuildContext) -> None:
        super().__init__()
        count, hidden_size, width = experts.num_experts, config.hidden_size, experts.width
        activation = activation_in_matmul(experts.activation or config.activation)
        group = self._group = ctx.group.replicas or ctx.group
        kind = GroupedKind(bias=experts.bias, layout=experts.layout, target=ctx.target, group=group)
        self.gate_up_proj = GroupedGateUp(count, hidden_size, width, activation, **kind)
        self.down_proj = GroupedDown(count, width, hidden_size, **kind)

        # Where experts are: a table at a fixed address, which steps that are captured read.
        self.slots = list(expert_slots(count, group))
        self.register_buffer("places", self.places_of(self.slots), persistent=False)
        self.counts = ctx.group.counts_experts
        self.register_buffer("load", torch.zeros(count, dtype=torch.int64), persistent=False)
        self._splits, self._elsewhere = group.splits_experts and group.size > 1, 0
        self._share = -(-len(self.slots) // group.size)
        self._local, self._count = LOCAL_EXPERTS.bind(ctx.target), COUNT_EXPERTS.bind(ctx.target)
        exchange = EXCHANGES.get(group.expert_exchange, SlotShares)
        by_slots = self._splits and (exchange is not SlotShares or group.exact)  # else ranks add up what theirs give
        self.exchange = exchange(group, self._share) if by_slots else None
        self._activation = activation
        self._joined: Joined | None = None

    def feed(self, accepted: Forms) -> None:
        self._join(Form.PARTIAL_SUMS in accepted and self.down_proj.is_whole)

    def take_shared(self, shared: GatedMLP) -> bool:
        """Compute a shared expert beside the others, as partial sums for the reader, if there are kernels for it."""
        if self.down_proj.is_whole and shared.gate_up_proj.adapters is None and self.gate_up_proj.adapters is None:
            methods = shared.gate_up_proj.method, shared.down_proj.method
            self._joined = self.gate_up_proj.method.joined(self.down_proj.method, self._activation, True, methods)
        return self._joined is not None

    def settle(self) -> None:
        methods = self.gate_up_proj.method, self.down_proj.method
        if all(method.backend == "native" for method in methods):  # these leave such rows out
            self._elsewhere = len(self.gate_up_proj.held)
        if self._joined is None:
            self._join(in_parts=False)

    def _join(self, in_parts: bool) -> None:
        self._joined = self.gate_up_proj.method.joined(self.down_proj.method, self._activation, in_parts)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Passed:
        if self.counts:
            self._count(expert_ids, self.load)
        if self.exchange is not None:
            return self._by_slots(self.exchange, x, expert_ids, weights)
        if self._splits:
            expert_ids, weights = self._of_this_rank(expert_ids, weights)
        adapters = self.gate_up_proj.adapters
        if adapters is not None and adapters.is_active:
            return self.down_proj.summed(self._adapted(adapters, x, expert_ids, weights))
        if self._joined is not None:
            joined = self._joined(x, expert_ids, weights)
            return self.down_proj.summed(joined) if isinstance(joined, Tensor) else joined
        return self.down_proj(self.gate_up_proj(x, expert_ids), expert_ids, weights)

    def _of_this_rank(self, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        held = self._group.rank * self._share, len(self.gate_up_proj.held), self._elsewhere
        return self._local(expert_ids, weights, self.places, *held)

    def _by_slots(self, exchange: SlotShares, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        here, *routed, back = exchange.dispatch(x, expert_ids, weights, self.places)
        local, kept = self._of_this_rank(*routed)
        given = self.down_proj.method.slots(self.gate_up_proj(here, local), local)
        if not self._elsewhere:  # these computed slots of other ranks, too
            given = given.where((kept != 0).unsqueeze(-1), 0.0)
        return exchange.combine(given, weights, back).to(x.dtype)

    def take_part(self, top_k: int, dtype: torch.dtype) -> None:
        """In a step of another replica, without a token of our own."""
        x = torch.empty(0, self.gate_up_proj.in_features, dtype=dtype)
        self.forward(x, torch.empty(0, top_k, dtype=torch.int32), torch.empty(0, top_k))

    def _adapted(self, adapters: ExpertAdapters, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Of this rank; tokens without an adapter keep the bits that they have where nobody has one."""
        if self._joined is not None:
            plain = whole(self._joined(x, expert_ids, weights))
        else:
            plain = self.down_proj.method.down(self.gate_up_proj(x, expert_ids), expert_ids, weights)
        tiles = adapters.rows_of(expert_ids)
        gated = self.gate_up_proj.adapted(x, expert_ids, tiles)
        changed = self.down_proj.adapted(gated, expert_ids, weights, tiles)
        has_one = torch.stack([part.slots.view(expert_ids.shape).amax(1) for part in tiles]).amax(0) >= 0
        return torch.where(has_one.unsqueeze(1), changed, plain)

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """Most memory that `num_tokens` tokens take between the two matmuls and inside them."""
        num_tokens *= self._group.size if isinstance(self.exchange, BetweenReplicas) else 1
        gated = num_tokens * top_k * self.down_proj.in_features * self.down_proj.itemsize
        if self.exchange is not None:  # and what experts give, there and here
            gated += 2 * num_tokens * (top_k + 1) * self.gate_up_proj.in_features * self.down_proj.itemsize
        return gated + max(
            layer.method.workspace_bytes(num_tokens, top_k) for layer in (self.gate_up_proj, self.down_proj)
        )

    def places_of(self, slots: Sequence[int]) -> Tensor:
        """The table of slots that hold these experts. Copies of an expert take turns."""
        cycle = COPIES_CYCLE if len(slots) > self.gate_up_proj.num_experts else 1
        found = [[slot for slot, held in enumerate(slots) if held == expert] for expert in range(max(slots) + 1)]
        columns = [[copies[turn % len(copies)] for turn in range(cycle)] for copies in found]
        return torch.tensor(columns, dtype=torch.int32)


class UngatedExperts(Stage):
    __call__: Callable[..., Passed]

    def __init__(self, up: GroupedUp, down: GroupedDown, activation: Activation) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self._act = up, down, activation

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Passed:
        up: Tensor = self.up_proj(x, expert_ids)
        return self.down_proj(self._act(up.flatten(0, 1)).view(up.shape), expert_ids, weights)

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        up, down, slots = self.up_proj, self.down_proj, num_tokens * top_k
        inside = max(up.method.workspace_bytes(slots, 1), down.method.workspace_bytes(num_tokens, top_k))
        return inside + slots * (up.in_features + 2 * down.in_features) * up.itemsize
