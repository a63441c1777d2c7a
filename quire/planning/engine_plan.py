"""Before anything is loaded: find the model, resolve the settings, and write the memory ledger.

This is all that `quire fit` runs; the worker runs the same and then takes what the ledger says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attention.base import AttentionBackend, GroupBackend
from quire.attention.forms import AttentionBackends
from quire.attention.state import StateBackend
from quire.config.engine import MAX_RANKS, EngineConfig
from quire.config.resolve import ResolvedConfig, resolve
from quire.layers.adapters import AdapterSizes
from quire.layers.scheme import Scheme, float_scheme
from quire.layers.weights import Schemes, WeightedLayer
from quire.loader.checkpoint import Checkpoint
from quire.loader.dummy import dummy_schemes
from quire.loader.hub import ModelSource, find_model
from quire.loader.mapper import bytes_in, count_parameters, decoded_elements, stored_schemes
from quire.loader.model_config import load_config
from quire.loader.open import has_weights, open_checkpoint
from quire.loader.pooler import module_files, read_pooler
from quire.loader.quantized.kv_cache import asked_kv_dtype
from quire.loader.with_modules import with_modules
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.registry import describe, model_class
from quire.parallel.connect import replica_group
from quire.parallel.groups import ContextShare, ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.planning.defaults import (
    choose_kv_dtype,
    device_defaults,
    find_default_dtype,
    stored_elements,
    with_whole_prompts,
)
from quire.planning.drafting import DraftPlan, plan_draft
from quire.planning.ledger import MemoryDemand, MemoryLedger, check_trained
from quire.planning.memory import (
    buffer_bytes,
    contributions,
    kv_layout,
    memory_supply,
    other_lines,
    shared_ledger,
    standby_line,
)
from quire.planning.stages import check_group, check_replicas, check_rows, check_stages, cut, layout_of_stage
from quire.platform.base import MemorySupply, Platform
from quire.platform.registry import get_platform
from quire.runner.adapters import make_room
from quire.runner.ways import WayContext
from quire.types.cache import LayerKV
from quire.types.errors import ConfigError
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.pooling import PoolerConfig, only_pools
from quire.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a byte of weights is read."""

    platform: Platform
    source: ModelSource
    model_config: dict[str, Any]
    description: ModelDescription
    settings: ResolvedConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention: AttentionBackends
    demand: MemoryDemand
    sizes: EngineSizes  # that the demand was found for
    ledger: MemoryLedger
    checkpoint: Checkpoint | None  # None: weights are made up
    pooler: PoolerConfig | None  # None: it only generates
    adapters: AdapterSizes | None  # None: there are none
    group: ParallelGroup  # of the ranks that share every layer
    pipeline: Pipeline  # the layers of this rank
    draft: DraftPlan | None  # the model that drafts; None: none does

    @property
    def backend(self) -> AttentionBackend:
        return self.attention.main

    def way_context(self, model: Model) -> WayContext:
        ends = not self.pipeline.is_last, not self.pipeline.is_first
        return WayContext(
            self.platform, self.attention, model, self.dtype, self.sizes, only_pools(self.pooler), *ends
        )

    @property
    def context(self) -> BuildContext:
        context = _build_context(
            self.settings, self.platform, self.ledger.max_model_len, self.deterministic, self.pooler, self.group
        )
        return replace(context, pipeline=self.pipeline)

    @property
    def deterministic(self) -> bool:
        return self.backend.name == self.platform.deterministic_backend

    @property
    def kernel_path(self) -> dict[str, str]:
        """What decides the bits of results, besides the model and the requests."""
        return {
            "device": self.platform.hardware,
            "instruction_set": self.backend.instruction_set,
            "dtype": self.settings.dtype,
            "kv_cache_dtype": str(self.kv_dtype).removeprefix("torch."),
            "quantization": self.settings.quantization,
            "activations": self.settings.activations,
            "attention_backend": self.backend.name,
            "ranks": "any" if self.group.exact else str(self.group.size),
            "ranks_of_a_context": str(self.group.context.size),
        }

    @property
    def backends(self) -> list[GroupBackend]:
        """Of each KV group: one serves all that keep the same form, another all that keep states."""
        states, groups = StateBackend(self.backend), self.ledger.layout.groups
        return [states if group.kind == "state" else self.attention.of(group.form) for group in groups]

    def without_checkpoint(self) -> EnginePlan:
        """The same for a model that is loaded, which needs the file and its metadata no more."""
        return replace(self, checkpoint=None)


def plan_engine(
    config: EngineConfig,
    *,
    needs_weights: bool = True,
    others: Sequence[LedgerLine] = (),
    group: ParallelGroup | None = None,
    pipeline: Pipeline | None = None,
    supply: MemorySupply | None = None,
    platform: Platform | None = None,
) -> EnginePlan:
    """Without `needs_weights` a folder with a config alone will do, its weights counting in the type it names.

    `others`: processes that take their share of the machine's memory, besides what the config leaves to others.
    `group`: the ranks that share every layer; `pipeline`: the stages, of which this is one. All ranks agree on the
    number of KV blocks. `supply`: instead of what is free. `platform`: instead of this machine's.
    """
    group, pipeline = group or ParallelGroup(**config.parallel.group_settings), pipeline or Pipeline()
    (platform := platform or get_platform(config.device.device)).start(config.device.num_threads)
    source = find_model(config.model)
    made_up = config.model.load_format == "dummy"
    reads = not made_up and (needs_weights or has_weights(source))
    checkpoint = open_checkpoint(source) if reads else None
    model_config = load_config(source) if checkpoint is None else checkpoint.config
    architecture, description = model_class(model_config), describe(model_config)
    pooler = _pooler(config, source, architecture, model_config, description)
    checkpoint = checkpoint and with_modules(checkpoint, module_files(source, pooler))
    description = _within(description, None if pooler is None else pooler.max_tokens)
    default_dtype = find_default_dtype(config, platform, architecture, _gguf_elements(source, checkpoint))
    length = config.model.max_model_len or description.max_position_embeddings
    stored_as = stored_elements(checkpoint, source.kind, model_config)
    settings = resolve(config, device_defaults(config, platform, default_dtype, stored_as, checkpoint))
    if description.is_bidirectional:
        settings = with_whole_prompts(settings, config.scheduler.max_num_batched_tokens, length)
    dtype = getattr(torch, settings.dtype)
    draft = None if only_pools(pooler) else plan_draft(config, source, model_config, description, length)
    check_stages(pipeline, architecture, pools=pooler is not None, drafter=None if draft is None else draft.method)
    check_replicas(group, platform, None if draft is None else draft.method)
    kept = (*description.layers, *(() if draft is None else draft.description.layers))
    attention = AttentionBackends(settings.attention_backend, (layer.form for layer in kept))
    for backend in attention if platform.is_here else ():
        backend.start()
    _check_heads(kept, attention, group)
    kv_dtype = choose_kv_dtype(config, attention, dtype, only_pools(pooler), asked_kv_dtype(model_config))
    check_trained(length, description.max_position_embeddings)  # before tables of that length are made
    deterministic = attention.name == platform.deterministic_backend
    context = _build_context(settings, platform, length, deterministic, pooler, group)
    whole = model = build_on_meta(architecture, model_config, context)
    if pipeline.size > 1:
        layout = kv_layout(whole.cached_layers(), attention, kv_dtype, config.cache.block_size)
        pipeline = cut(whole, _stored(whole, model_config, checkpoint, made_up=made_up), layout, length, pipeline)
        context = replace(context, pipeline=pipeline)
        model = build_on_meta(architecture, model_config, context)
    make_room(model, adapter_sizes(config))
    weights = bytes_in(model, _stored(model, model_config, checkpoint, made_up=made_up))
    note = _weights_note(model, weights, checkpoint, settings.dtype, group.size)
    sizes = _sizes(config, settings, description, model, length, dtype, pooler, draft)
    if draft is not None:
        model.drafter, num_bytes, of_drafter = draft.on_meta(context)
        weights, note = weights + num_bytes, f"{note}; {of_drafter}"
    check_group(whole, group, platform)
    check_rows(architecture, config.parallel.sequence_parallel_threshold)
    _check_backend(model, attention)
    attention.main.whole_prompts = model.is_bidirectional
    ends = only_pools(pooler), not pipeline.is_last, not pipeline.is_first
    parts = contributions(WayContext(platform, attention, model, dtype, sizes, *ends))
    weights_line = LedgerLine("weights", weights + buffer_bytes(model), note)
    layout = kv_layout(whole.cached_layers(), attention, kv_dtype, config.cache.block_size)
    others = [*others, standby_line(platform, (weights_line, *parts))] if config.device.standby else others
    demand = MemoryDemand(
        weights=weights_line,
        parts=parts,
        layout=layout_of_stage(layout, whole, pipeline),
        trained_len=description.max_position_embeddings,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        others=other_lines(config, others, model) if platform.uses_host_memory else (),
        state_cache_size=config.cache.state_cache_size,
    )
    supply = supply or memory_supply(config, platform, group, pipeline)
    ledger = shared_ledger(config, platform, demand, supply, group, pipeline)
    plan = EnginePlan(
        platform=platform,
        source=source,
        model_config=model_config,
        description=description,
        settings=settings,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        demand=demand,
        sizes=sizes,
        ledger=ledger,
        checkpoint=checkpoint,
        pooler=pooler,
        adapters=adapter_sizes(config),
        group=group,
        pipeline=pipeline,
        draft=draft,
    )
    return _with_ledger(plan, config, model)


def _gguf_elements(source: ModelSource, checkpoint: Checkpoint | None) -> set[str]:
    """What the tensors of a GGUF file are stored as; empty for other files."""
    if checkpoint is None or source.kind != "gguf":
        return set()
    return {info.scheme.element for info in checkpoint.tensors().values()}


def _within(description: ModelDescription, max_tokens: int | None) -> ModelDescription:
    """The same for prompts of at most `max_tokens`."""
    if max_tokens is None:
        return description
    most = min(max_tokens, description.max_position_embeddings)
    return replace(description, max_position_embeddings=most)


def _pooler(
    config: EngineConfig,
    source: ModelSource,
    architecture: type[Model],
    model_config: dict[str, Any],
    description: ModelDescription,
) -> PoolerConfig | None:
    pooler = read_pooler(
        config.model,
        source,
        model_config,
        classifier=architecture.classifier(model_config),
        token_head=architecture.token_head(model_config),
        size=description.hidden_size,
        generates="generates" in architecture.capabilities and not description.is_bidirectional,
        is_encoder=description.is_bidirectional,
    )
    speculative = config.speculation.speculative_config
    if pooler is not None and pooler.generates and speculative is not None and speculative.method == "eagle3":
        raise ConfigError(
            "speculative_config: method is eagle3, whose heads read other hidden states than those that a model which"
            " generates and embeds keeps; use another method, or leave out --convert"
        )
    if only_pools(pooler) and speculative is not None:
        logger.warning("speculative_config is not used: %s generates no tokens", config.model.model)
    return pooler


def _check_backend(model: Model, backends: AttentionBackends) -> None:
    """Said before anything is loaded; a layer's own check comes after."""
    lacks = (backends.of(layer.keeps.form).lacks(layer.spec) for layer in model.attention_layers())
    lacking = next(filter(None, lacks), None)
    if lacking is not None:
        raise ConfigError(f"the model has {lacking}, which {backends.name} attention does not do; set --device cpu")


def _sizes(
    config: EngineConfig,
    settings: ResolvedConfig,
    description: ModelDescription,
    model: Model,
    length: int,
    dtype: torch.dtype,
    pooler: PoolerConfig | None,
    draft: DraftPlan | None,
) -> EngineSizes:
    return EngineSizes(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=length,
        block_size=config.cache.block_size,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        itemsize=dtype.itemsize,
        token_bytes=model.token_bytes(description.hidden_size, dtype.itemsize),
        max_num_drafts=0 if only_pools(pooler) else settings.max_num_drafts,
        speculates=config.speculation.speculative_config is not None and settings.max_num_drafts > 0,
        proposes=draft is not None,
    )


def _stored(
    model: Model, model_config: dict[str, Any], checkpoint: Checkpoint | None, *, made_up: bool
) -> Mapping[WeightedLayer, Schemes]:
    """How each layer's weights are stored, or would be."""
    if checkpoint is not None:
        return stored_schemes(model, checkpoint.tensors())
    if made_up:
        return dummy_schemes(model, model_config)
    named = _named_scheme(model_config)
    if model_config.get("quantization_config"):
        return dummy_schemes(model, model_config, named)
    return stored_schemes(model, None, named)


def _weights_note(model: Model, num_bytes: int, checkpoint: Checkpoint | None, dtype: str, ranks: int) -> str:
    decoded = [] if checkpoint is None else decoded_elements(model, checkpoint.tensors())
    num_parameters = count_parameters(model)
    note = f"{num_parameters / 1e6:.1f} M parameters of {8 * num_bytes * ranks / num_parameters:.1f} bits"
    note += f", shared by {ranks} ranks" if ranks > 1 else ""
    return note + (f"; {', '.join(decoded)} become {dtype} when they are loaded" if decoded else "")


def build_on_meta(architecture: type[Model], model_config: dict[str, Any], context: BuildContext) -> Model:
    """The model without storage. A group whose size the layers do not allow is refused with those that they do."""
    with torch.device("meta"):
        try:
            return architecture.from_config(model_config, context)
        except ConfigError as error:
            if context.group.size == 1:
                raise
            sizes = [size for size in range(1, MAX_RANKS + 1) if _allows(architecture, model_config, context, size)]
            if not sizes:
                raise
            possible = ", ".join(map(str, sizes))
            raise ConfigError(
                f"tensor_parallel_size is {context.group.size}, but {error}; this model takes {possible}"
            ) from error


def _allows(architecture: type[Model], model_config: dict[str, Any], context: BuildContext, size: int) -> bool:
    try:
        architecture.from_config(model_config, replace(context, group=replace(context.group, rank=0, size=size)))
    except ConfigError:
        return False
    return True


def adapter_sizes(config: EngineConfig) -> AdapterSizes | None:
    lora = config.lora
    return AdapterSizes(lora.buckets, lora.lora_experts, lora.lora_dtype) if lora.enable_lora else None


def with_measured_step(plan: EnginePlan, config: EngineConfig, model: Model, num_bytes: int) -> EnginePlan:
    """The same plan, its KV blocks sized by what the largest step of prompts took instead of the estimate."""
    count = plan.sizes.max_num_batched_tokens
    plan = replace(plan, sizes=replace(plan.sizes, token_bytes=num_bytes / count))
    step = LedgerLine("step", num_bytes, f"of {count} tokens, measured")
    return _with_ledger(plan, config, model, step)


def _with_ledger(plan: EnginePlan, config: EngineConfig, model: Model, step: LedgerLine | None = None) -> EnginePlan:
    """The plan with a ledger, for fewer requests where their states do not fit; `step`: instead of a step's lines."""
    lines = contributions(plan.way_context(model))
    parts = lines if step is None else (step, *(line for line in lines if not line.in_step))
    demand = replace(plan.demand, parts=parts, max_num_seqs=plan.sizes.max_num_seqs)
    ledger = shared_ledger(config, plan.platform, demand, plan.ledger.supply, plan.group, plan.pipeline)
    rows = demand.num_rows(ledger)
    if rows < demand.max_num_seqs and config.scheduler.max_num_seqs is not None:  # as asked: some will wait
        why = f"{ledger.kv_reason}\nmax_num_seqs = {demand.max_num_seqs} (as asked; the states of {rows} fit at once)"
        ledger = replace(ledger, kv_reason=why)
        rows = demand.max_num_seqs
    if rows == demand.max_num_seqs:
        return replace(plan, demand=demand, ledger=ledger)
    settings = plan.settings.with_rows(rows, config.speculation.speculative_config)
    drafts = min(plan.sizes.max_num_drafts, settings.max_num_drafts)
    sizes = replace(plan.sizes, max_num_seqs=rows, max_num_drafts=drafts)
    fewer = _with_ledger(replace(plan, settings=settings, sizes=sizes), config, model, step)
    why = f"{fewer.ledger.kv_reason}\nmax_num_seqs = {rows} ({settings.reasons['max_num_seqs']})"
    return replace(fewer, ledger=replace(fewer.ledger, kv_reason=why))


def plan_memory(
    config: EngineConfig,
    others: Sequence[LedgerLine] = (),
    stage: int = 0,
    supply: MemorySupply | None = None,
    platform: Platform | None = None,
) -> MemoryLedger:
    """Of each rank of a stage."""
    parallel = config.parallel
    context = ContextShare(0, parallel.decode_context_parallel_size)
    group = ParallelGroup(0, parallel.tensor_parallel_size, **parallel.group_settings, context=context)
    group = replica_group(parallel) if parallel.shares_experts else group
    pipeline = Pipeline(stage, parallel.pipeline_parallel_size)
    return plan_engine(
        config, needs_weights=False, others=others, group=group, pipeline=pipeline, supply=supply, platform=platform
    ).ledger


def _named_scheme(model_config: Mapping[str, Any]) -> Scheme:
    """What a config says of its weights."""
    named = str(model_config.get("dtype") or model_config.get("torch_dtype"))
    return float_scheme({"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named, torch.float32))


def _check_heads(layers: Sequence[LayerKV], backends: AttentionBackends, group: ParallelGroup) -> None:
    """Refuse heads that a backend or the group does not take; ranks that split contexts tell the backends."""
    forms = {layer.form for layer in layers if layer.form is not None}
    for form in forms:
        limit = backends.of(form).max_head_dim
        if limit is not None and form.head_dim > limit:
            raise ConfigError(
                f"head_dim is {form.head_dim} but {backends.name} attention takes at most {limit}; set --device cpu"
            )
    if group.context.size > 1:
        for heads in {form.num_heads for form in forms}:
            group.check_context(heads)
        for backend in backends:
            backend.share_context(group.context)


def _build_context(
    settings: ResolvedConfig,
    platform: Platform,
    max_model_len: int,
    deterministic: bool,
    pooler: PoolerConfig | None,
    group: ParallelGroup,
) -> BuildContext:
    return BuildContext(
        dtype=getattr(torch, settings.dtype),
        max_model_len=max_model_len,
        group=group,
        platform=platform.name,
        quantization=settings.quantization,
        deterministic=deterministic,
        activations=settings.activations,
        moe_backend=settings.moe_backend,
        head=pooler is None or pooler.generates or bool(pooler.label_tokens),
        heads={} if pooler is None else pooler.heads,
    )
